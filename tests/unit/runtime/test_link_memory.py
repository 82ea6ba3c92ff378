"""Experts that are measured are real ones: finite, in turn, of every type; speed is not asked."""

from __future__ import annotations

import pytest
import torch

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.link_memory import (
    AT_ONCE,
    ExpertBench,
    ExpertShape,
    _Call,
    check_block_type,
    dram_rates,
)

SMALL = ExpertShape(hidden=512, width=256)


@pytest.mark.parametrize("name", ["MXFP4", "Q4_K", "Q2_K", "IQ2_XXS", "IQ1_M", "FP4_E2M1", "F16"])
def test_experts_of_a_type_compute_finite_sums(name: str) -> None:
    bench = ExpertBench(name, 0, SMALL)
    call = _Call(bench._record, SMALL.hidden, 2, 3)
    call.out.fill_(torch.nan)
    call.compute(bench._following())
    assert bool(call.out.isfinite().all())
    assert float(call.out.abs().max()) > 0


def test_every_expert_has_memory_of_its_own_and_its_turn() -> None:
    bench = ExpertBench("Q4_K", 8 * 3 * 512 * 256 * 9 // 16, SMALL)
    matrices = bench._record.matrices
    addresses = {str(matrices[place].data) for place in range(3 * 8)}
    assert len(addresses) == 24
    turns = [bench._following() for _ in range(4)]
    assert [expert for turn in turns for expert in turn] == [n % 8 for n in range(4 * AT_ONCE)]


def test_bytes_per_weight_are_those_of_the_type() -> None:
    assert ExpertBench("MXFP4", 0, SMALL).bytes_per_weight == 4.25 / 8
    assert ExpertBench("FP4_E2M1", 0, SMALL).bytes_per_weight == 4.25 / 8


def test_no_time_still_computes_once() -> None:
    assert ExpertBench("MXFP4", 0, SMALL).rate(1, 1, seconds=0) > 0


@pytest.mark.parametrize("name", ["", "Q9_K", "FP8_E4M3", "I32", "F4"])
def test_type_without_expert_kernels_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="types"):
        check_block_type(name)


def test_shape_that_the_type_does_not_divide_is_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 256"):
        ExpertBench("Q4_K", 0, ExpertShape(hidden=64, width=64))


def test_memory_is_read_with_every_number_of_threads() -> None:
    rates = dram_rates((1, 2), 1 << 16, repeat=3)
    assert [(rate.threads, len(rate.runs)) for rate in rates] == [(1, 3), (2, 3)]
    assert all(run > 0 for rate in rates for run in rate.runs)


def test_call_computes_only_the_experts_it_was_told_of() -> None:
    bench = ExpertBench("Q4_K", 1 << 20, SMALL)
    call = _Call(bench._record, SMALL.hidden, 2, 1)
    sums = []
    for experts in ([0], [1], [0, 1]):
        call.compute(experts)
        sums.append(call.out.clone())
    torch.testing.assert_close(sums[0] + sums[1], sums[2])
    assert bool(sums[0].any())

"""The CPU's share of a layer's experts, as a GPU's stream calls for it; copies to a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numeric import assert_same_bits

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.expert_ffn import expert_ffn_reference
from edgedsv4.kernels.native.library import fill_matrix, library, new_run, pointer
from edgedsv4.kernels.quant_matmul import QuantMatrix

lib, ffi = library()
HIDDEN, WIDTH, EXPERTS, K = 96, 64, 6, 3
LIMIT = 1.5


def _matrix(rows: int, columns: int, seed: int) -> QuantMatrix:
    values = np.random.default_rng(seed).standard_normal((rows, columns)).astype(np.float32)
    data = torch.from_numpy(values / columns**0.5).view(torch.uint8)
    return QuantMatrix(BLOCK_TYPES["F32"], rows, columns, data, None)


class Job:
    """A job over six small experts, of which the GPU has some."""

    def __init__(self, tokens: int, on_card: list[int], threads: int = 2) -> None:
        shapes = ((WIDTH, HIDDEN), (WIDTH, HIDDEN), (HIDDEN, WIDTH))
        self.experts = [
            [_matrix(*shape, 10 * expert + i) for i, shape in enumerate(shapes)]
            for expert in range(EXPERTS)
        ]
        self.records = ffi.new("dk_matrix[]", 3 * EXPERTS)
        for place, matrix in enumerate(m for expert in self.experts for m in expert):
            fill_matrix(self.records[place], matrix)
        self.layer = ffi.new("dk_experts *")
        self.layer.matrices, self.layer.experts, self.layer.k = self.records, EXPERTS, K
        self.layer.width, self.layer.hidden, self.layer.limit = WIDTH, HIDDEN, LIMIT
        self.places = torch.full((EXPERTS,), -1, dtype=torch.int32)
        self.places[on_card] = 7
        draw = torch.Generator().manual_seed(tokens)
        self.x = torch.randn(tokens, HIDDEN, generator=draw)
        order = torch.rand(tokens, EXPERTS, generator=draw).argsort(dim=1)
        self.ids = order[:, :K].to(torch.int32).contiguous()
        self.weights = torch.rand(tokens, K, generator=draw)
        self.out = torch.full((tokens, HIDDEN), torch.nan)
        self.run = new_run(threads)
        self.run.cdata.is_small = 1
        scratch = lib.dk_host_experts_bytes(self.layer, tokens)
        self.scratch = torch.full((scratch + 128,), 0xFF, dtype=torch.uint8)
        start = -self.scratch.data_ptr() % 64
        self.end = start + scratch
        job = self.cdata = ffi.new("dk_host_job *")
        job.run, job.experts, job.places = self.run.cdata, self.layer, pointer(self.places)
        job.x, job.ids, job.weights = pointer(self.x), pointer(self.ids), pointer(self.weights)
        job.out, job.tokens = pointer(self.out), tokens
        job.scratch = ffi.cast("void *", self.scratch.data_ptr() + start)

    def do(self) -> torch.Tensor:
        lib.dk_host_experts(self.cdata)
        assert bool((self.scratch[self.end :] == 0xFF).all()), "scratch was overrun"
        return self.out

    def expected(self, *, on_card: Any = None) -> torch.Tensor:
        out = torch.zeros(self.x.shape, dtype=torch.float64)
        for token, ids in enumerate(self.ids.tolist()):
            for slot, expert in enumerate(ids):
                if on_card is not None and expert in on_card:
                    continue
                row = self.x[token : token + 1].double()
                y = expert_ffn_reference(row, *self.experts[expert], LIMIT)
                out[token] += self.weights[token, slot].double() * y[0]
        return out


@pytest.mark.parametrize("tokens", [1, 5, 20])
@pytest.mark.parametrize("on_card", [[], [0, 3, 4]])
def test_sums_what_is_not_on_the_card(tokens: int, on_card: list[int]) -> None:
    job = Job(tokens, on_card)
    torch.testing.assert_close(
        job.do().double(), job.expected(on_card=on_card), rtol=1e-5, atol=1e-6
    )
    assert not job.cdata.failed
    left = sum(expert not in on_card for expert in job.ids.flatten().tolist())
    assert (job.cdata.calls, job.cdata.computed) == (1, left)
    assert job.cdata.ns > 0


def test_without_places_everything_is_the_cpus() -> None:
    job = Job(2, [0, 1, 2, 3, 4, 5])
    job.cdata.places = ffi.NULL
    torch.testing.assert_close(job.do().double(), job.expected(), rtol=1e-5, atol=1e-6)


def test_nothing_left_to_do_gives_zero() -> None:
    job = Job(2, [0, 1, 2, 3, 4, 5])
    assert not job.do().any()
    assert job.cdata.computed == 0


def test_tokens_together_have_the_bits_of_tokens_alone() -> None:
    together = Job(5, [1, 2])
    whole = together.do().clone()
    for token in range(5):
        one = Job(1, [1, 2], threads=1)
        for mine, all_ in ((one.x, together.x), (one.weights, together.weights)):
            mine.copy_(all_[token : token + 1])
        one.ids.copy_(together.ids[token : token + 1])
        assert_same_bits(f"token {token}", one.do()[0], whole[token])


@pytest.mark.parametrize("bad", [-1, EXPERTS])
def test_an_id_out_of_range_sets_the_flag(bad: int) -> None:
    job = Job(2, [])
    job.ids[1, 0] = bad
    assert bool(job.do().isnan().all())
    assert (job.cdata.failed, job.cdata.failed_id) == (1, bad)


def test_an_expert_without_a_record_sets_the_flag() -> None:
    job = Job(1, [])
    missing = int(job.ids[0, 1])
    job.records[3 * missing].data = ffi.NULL
    assert bool(job.do().isnan().all())
    assert (job.cdata.failed, job.cdata.failed_id) == (2, missing)


def test_a_stopped_run_sets_the_flag() -> None:
    job = Job(1, [])
    job.run.cdata.stop = 1
    assert bool(job.do().isnan().all())
    assert job.cdata.failed == 3


def test_many_copies_are_all_made() -> None:
    sizes = [3, 1 << 20, (2 << 20) + 5, 0, 77]
    sources = [torch.randint(0, 256, (size + 1,), dtype=torch.uint8) for size in sizes]
    targets = [torch.full((size + 1,), 9, dtype=torch.uint8) for size in sizes]
    addresses = [
        ffi.new("void *[]", [ffi.cast("void *", t.data_ptr()) for t in group])
        for group in (targets, sources)
    ]
    counts = ffi.new("int64_t[]", sizes)
    run = new_run(2)
    run.check(lib.dk_copy_many(run.cdata, addresses[0], addresses[1], counts, len(sizes)))
    for size, source, target in zip(sizes, sources, targets, strict=True):
        assert torch.equal(target[:size], source[:size])
        assert int(target[size]) == 9

"""Block-scaled products of routed experts against each expert alone, on inputs rounded alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from gpu_models import gpu_model_of
from matrix_samples import stored_matrix
from memory_model import ArrayExperts, evaluate, model_of
from numeric import assert_close
from tiny_model import random_tensors, random_tokens, tiny_config
from torch import Tensor
from triton_device import DEVICE, has_scaled_products

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.expert_matmul import ExpertScratch, expert_scratch
from edgedsv4.kernels.gpu.expert_scaled import (
    expert_ffn_scaled,
    fits_scaled,
    pack_scaled,
    scaled_reference,
)
from edgedsv4.kernels.gpu.planes import DeviceMatrix, empty_bank, fill_bank
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.kernels.swiglu import swiglu_reference
from edgedsv4.model import scaled_experts
from edgedsv4.model.weights import ExpertWeights

pytestmark = pytest.mark.skipif(
    not has_scaled_products(), reason="needs Hopper or Blackwell, and Triton 3.7"
)


class _Bank:
    """A bank of MXFP4 and the matrices in it."""

    def __init__(self, slots: int, rows: int, cols: int, seed: int) -> None:
        self.stored = [stored_matrix("MXFP4", rows, cols, seed + slot) for slot in range(slots)]
        self.matrix = bank_of(self.stored)

    def values(self, slot: int) -> Tensor:
        return dequantize(self.stored[slot]).double()


def bank_of(stored: list[QuantMatrix]) -> DeviceMatrix:
    first = stored[0]
    bank = empty_bank(first.block_type.name, len(stored), first.rows, first.columns, DEVICE)
    for slot, weight in enumerate(stored):
        fill_bank(bank, slot, weight)
    return bank


def _banks(slots: int, hidden: int, width: int) -> list[_Bank]:
    shapes = ((width, hidden), (width, hidden), (hidden, width))
    return [_Bank(slots, *shape, 100 * i) for i, shape in enumerate(shapes)]


def _inputs(tokens: int, k: int, slots: int, hidden: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.stack([torch.randperm(slots, generator=generator)[:k] for _ in range(tokens)])
    return x, ids.int(), torch.rand(tokens, k, generator=generator)


def _scratch(x: Tensor, ids: Tensor, banks: list[_Bank], *, precise: bool = False) -> ExpertScratch:
    """Larger than needed and poisoned: every byte is an 8-bit NaN, every scale, too."""
    slots, width = len(banks[0].stored), banks[2].matrix.cols
    sizes = (len(x) + 1, ids.shape[1], slots + 1, x.shape[1], width)
    scratch = expert_scratch(*sizes, device=torch.device(DEVICE), precise=precise)
    for memory in (scratch.x, scratch.hidden, scratch.outputs):
        memory.view(torch.uint8).fill_(255)
    return scratch


def _run(x: Tensor, ids: Tensor, weights: Tensor, banks: list[_Bank], limit: float) -> Tensor:
    scratch = _scratch(x, ids, banks)
    out = torch.full(x.shape, math.nan, device=DEVICE)
    w1, w3, w2 = (bank.matrix for bank in banks)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    expert_ffn_scaled(out, *inputs, (w1, w3, w2), limit, scratch=scratch)
    return out.cpu()


def _reference(x: Tensor, ids: Tensor, weights: Tensor, banks: list[_Bank], limit: float) -> Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    w1, w3, w2 = banks
    x = scaled_reference(x)
    for token, slots in enumerate(ids.tolist()):
        for place, slot in enumerate(slots):
            if 0 <= slot < len(w1.stored):
                gate, up = x[token] @ w1.values(slot).T, x[token] @ w3.values(slot).T
                h = scaled_reference(swiglu_reference(gate, up, limit).float())
                out[token] += weights[token, place].double() * (h @ w2.values(slot).T)
    return out


CASES = {
    "one_token": (1, 2, 4, 64, 96, 10.0),
    "odd_sizes": (5, 2, 4, 96, 160, math.inf),
    "past_a_tile_of_columns": (3, 2, 3, 288, 32, 10.0),
    "tight_limit": (3, 2, 3, 64, 64, 0.5),
    "more_than_a_tile": (34, 1, 1, 64, 64, 10.0),
    "tiles_of_32": (26, 1, 1, 32, 64, 10.0),
    "tiles_of_64": (49, 1, 1, 32, 64, 10.0),
    "tiles_of_128": (99, 1, 1, 32, 96, 10.0),
}


@pytest.mark.parametrize("case", CASES)
def test_chunk_equals_sum_of_experts(case: str) -> None:
    tokens, k, slots, hidden, width, limit = CASES[case]
    banks, inputs = _banks(slots, hidden, width), _inputs(tokens, k, slots, hidden)
    got = _run(*inputs, banks, limit)
    assert_close(case, got, _reference(*inputs, banks, limit), 3.3e-3)


def test_input_may_be_bfloat16() -> None:
    banks, (x, ids, weights) = _banks(2, 64, 32), _inputs(3, 1, 2, 64)
    x = x.bfloat16()
    got = _run(x, ids, weights, banks, 10.0)
    assert_close("bf16", got, _reference(x.float(), ids, weights, banks, 10.0), 3.3e-3)


def test_rounding_of_every_row_is_its_own() -> None:
    """A token among others has the bits that it has alone."""
    banks, (x, ids, weights) = _banks(2, 96, 64), _inputs(5, 2, 2, 96)
    x *= torch.tensor([1e-3, 1.0, 9.0, 0.3, 0.0])[:, None]
    together = _run(x, ids, weights, banks, 10.0)
    alone = [_run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1], banks, 10.0) for t in range(5)]
    assert torch.equal(together, torch.cat(alone))
    assert not together[4].any()


def test_slots_outside_of_the_bank_add_nothing() -> None:
    banks, (x, ids, weights) = _banks(3, 64, 64), _inputs(4, 2, 3, 64)
    ids[0, 1], ids[2, 0], ids[3] = -1, 3, -1
    got = _run(x, ids, weights, banks, 10.0)
    assert_close("outside", got, _reference(x, ids, weights, banks, 10.0), 3.3e-3)
    assert not got[3].any()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_bad_numbers_show(bad: float) -> None:
    banks, (x, ids, weights) = _banks(3, 64, 64), _inputs(3, 2, 3, 64)
    x[1, 7] = bad
    got = _run(x, ids, weights, banks, 10.0)
    assert got[1].isnan().all()
    assert got[[0, 2]].isfinite().all()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_a_scale_of_255_is_nan_and_one_of_0_is_small() -> None:
    """Bytes of a damaged or odd file: what other paths make of them comes out here, too."""
    banks, (x, ids, weights) = _banks(2, 64, 64), _inputs(2, 1, 2, 64)
    ids[:] = torch.tensor([[0], [1]])
    banks[0].stored[0].data.view(-1, 17)[1::2, 0] = 0  # half of every row of w1 of slot 0
    banks[2].stored[1].data.view(-1, 17)[3, 0] = 255  # row 1 of w2 of slot 1
    for bank in banks:
        bank.matrix = bank_of(bank.stored)
    got = _run(x, ids, weights, banks, 10.0)
    ref = _reference(x, ids, weights, banks, 10.0)
    assert_close("zero", got[:1], ref[:1], 3.3e-3)
    assert got[1].isnan().nonzero().flatten().tolist() == [1]


def _unpacked(packed: Tensor, columns: int) -> Tensor:
    """Numbers that a row of `pack_scaled` stands for, float64, columns in order."""
    width = packed.shape[1] // 2
    numbers = packed[:, :width].contiguous().view(torch.float8_e4m3fn).double()
    scales = packed[:, width : width + width // 32].double()
    scales = torch.where(scales == 255, math.nan, torch.exp2(scales - 133))
    values = numbers.unflatten(1, (-1, 2, 4, 2, 2)).permute(0, 1, 3, 2, 5, 4).flatten(2)
    return (values * scales[:, :, None]).flatten(1)[:, :columns]


def _packed(x: Tensor) -> Tensor:
    width = -(-x.shape[1] // 256) * 256
    out = torch.full((len(x), 2 * width), 255, dtype=torch.uint8, device=DEVICE)
    pack_scaled(out, x.to(DEVICE))
    return out.cpu()


def test_activations_are_rounded_as_the_reference_says() -> None:
    x = torch.randn(4, 1120, generator=torch.Generator().manual_seed(3))
    x[1] *= torch.exp2(torch.arange(1120).float() % 37 - 30)
    x[2, 32:64] = 0.0
    got = _unpacked(_packed(x), 1120)
    assert torch.equal(got, scaled_reference(x).nan_to_num(math.pi))
    assert ((got - x).abs() <= x.abs() * 2.0**-4 + 2.0**-18 * x.abs().amax()).all()


@pytest.mark.parametrize(
    "largest",
    [448.0, math.nextafter(448.0, 0.0), 449.0, 256.0, 1.75, 1.7500001, 3.4e38, 2.0**-118, 1e-37],
)
def test_scale_is_the_smallest_power_of_two_that_holds_the_largest(largest: float) -> None:
    x = torch.zeros(1, 32)
    x[0, 5], x[0, 6], x[0, 31] = -largest, largest / 3, largest / 5000
    packed = _packed(x)
    largest = float(x[0].abs().max())
    exponent = max(-127, math.ceil(math.log2(largest / 448)))
    assert packed[0, 256].item() == exponent + 133
    assert torch.equal(_unpacked(packed, 32), scaled_reference(x))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf, -math.inf])
def test_groups_that_are_not_finite_have_the_scale_nan(bad: float) -> None:
    x = torch.ones(1, 96)
    x[0, 40] = bad
    packed = _packed(x)
    assert packed[0, 256:259].tolist() == [133 - 8, 255, 133 - 8]
    assert scaled_reference(x)[0].isnan().nonzero().flatten().tolist() == list(range(32, 64))


def test_columns_that_there_are_not_are_zeros() -> None:
    packed = _packed(torch.ones(2, 64))
    assert not packed[:, 64:256].any()
    assert (packed[:, 256:264] != 255).all()


def test_refuses_what_does_not_fit() -> None:
    banks, (x, ids, weights) = _banks(2, 64, 64), _inputs(2, 1, 2, 64)
    with pytest.raises(ShapeError, match="ids"):
        _run(x, ids[:1], weights, banks, 10.0)
    w1, w3, w2 = (bank.matrix for bank in banks)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    scratch = _scratch(x, ids, banks, precise=True)
    with pytest.raises(ShapeError, match="scratch"):
        expert_ffn_scaled(torch.empty_like(inputs[0]), *inputs, (w1, w3, w2), 10.0, scratch=scratch)


def test_is_for_mxfp4_on_cards_that_have_it() -> None:
    mxfp4, q8 = (empty_bank(name, 2, 64, 64, "meta") for name in ("MXFP4", "Q8_0"))
    assert fits_scaled((mxfp4, mxfp4, mxfp4), "sm_120", precise=False)
    assert not fits_scaled((mxfp4, mxfp4, mxfp4), "sm_120", precise=True)
    assert not fits_scaled((mxfp4, mxfp4, q8), "sm_120", precise=False)
    for family in ("sm_89", "sm_90", "sm_100", "gfx942", "gfx1201", "xpu", ""):
        assert not fits_scaled((mxfp4, mxfp4, mxfp4), family, precise=False)


def test_on_sm_121_only_from_triton_3_8_on(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = empty_bank("MXFP4", 2, 64, 64, "meta")
    for release, expected in (("3.7.1", False), ("3.8.0", True), ("3.10.0", True), ("4.0", True)):
        monkeypatch.setattr("triton.__version__", release)
        assert fits_scaled((bank, bank, bank), "sm_121", precise=False) is expected
        assert fits_scaled((bank, bank, bank), "sm_120", precise=False)


class _Mxfp4Experts(ArrayExperts):
    """Random experts of MXFP4, the same ones in every layer."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        def random(matrix: QuantMatrix, seed: int) -> QuantMatrix:
            stored = stored_matrix("MXFP4", matrix.rows, matrix.columns, seed)
            stored.data.view(-1, 17)[:, 0] += 3  # so that experts are most of the result
            return stored

        return [
            ExpertWeights(
                w1=random(shape.w1, 3 * expert),
                w3=random(shape.w3, 3 * expert + 1),
                w2=random(shape.w2, 3 * expert + 2),
            )
            for expert, shape in zip(expert_ids, super().fetch(layer, expert_ids), strict=True)
        ]


def test_a_chunk_of_the_model_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_config(compress_ratios=(0,), num_hash_layers=1, num_experts=4)
    tensors = random_tensors(config, 5)
    reference = model_of(config, tensors, profile="default")
    reference.experts = _Mxfp4Experts(config, tensors)
    calls = []

    def counted(out: Tensor, *given: Any, **named: Any) -> None:
        calls.append(out.shape)
        expert_ffn_scaled(out, *given, **named)

    monkeypatch.setattr(scaled_experts, "expert_ffn_scaled", counted)
    ids = random_tokens(config, 5, 5)
    expected = evaluate(reference, ids)
    found = evaluate(gpu_model_of(reference, "sm_120"), ids).cpu()
    assert calls == [(5, config.hidden_size)]
    error = (found - expected).square().mean().sqrt() / expected.square().mean().sqrt()
    assert float(error) < 0.08


@pytest.mark.parametrize("is_right", [True, False])
def test_products_that_are_wrong_on_a_card_are_given_up(
    is_right: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def general(out: Tensor, *_: object, **__: object) -> None:
        out.fill_(2.0)

    def scaled(out: Tensor, *_: object, **__: object) -> None:
        out.fill_(2.1 if is_right else math.nan)

    monkeypatch.setattr(scaled_experts, "expert_ffn_chunk", general)
    monkeypatch.setattr(scaled_experts, "expert_ffn_scaled", scaled)
    experts, given = scaled_experts.ScaledExperts(), torch.zeros(1, device=DEVICE)
    for _ in range(2):
        out = torch.zeros(3, 4, device=DEVICE)
        experts.run(out, (given, given, given), (), 1.0, None)
        assert bool((out == (2.1 if is_right else 2.0)).all())
    assert ("block-scaled products" in caplog.text) != is_right

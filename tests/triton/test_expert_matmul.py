"""Routed experts of a chunk against each expert alone and the weighted sum of `moe`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from matrix_samples import stored_matrix
from numeric import assert_close
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu import expert_tiling
from edgedsv4.kernels.gpu.expert_matmul import (
    ExpertPart,
    ExpertScratch,
    expert_ffn_chunk,
    expert_ffn_parts,
    expert_scratch,
    expert_scratch_bytes,
)
from edgedsv4.kernels.gpu.expert_sort import cut_tiles, sort_pairs, tile_capacity
from edgedsv4.kernels.gpu.expert_tiling import tile_width
from edgedsv4.kernels.gpu.half_tiles import HALF_TYPES
from edgedsv4.kernels.gpu.planes import empty_bank, fill_bank
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.kernels.swiglu import swiglu_reference


class _Bank:
    """A bank and the matrices in it."""

    def __init__(self, name: str, slots: int, rows: int, cols: int, seed: int) -> None:
        stored = [stored_matrix(name, rows, cols, seed + slot) for slot in range(slots)]
        self.stored = [_mild(weight) for weight in stored] if name == "NVFP4" else stored
        self.matrix = empty_bank(name, slots, rows, cols, DEVICE)
        for slot, weight in enumerate(self.stored):
            fill_bank(self.matrix, slot, weight)


def _mild(weight: QuantMatrix) -> QuantMatrix:
    """NVFP4 with scales of 2^-3 to 2^-1: with any bytes an exponent overflows."""
    blocks = weight.data.reshape(weight.rows, -1, 36).clone()
    blocks[..., :4] = 0x20 | (blocks[..., :4] & 0x0F)
    return replace(weight, data=blocks.reshape(weight.rows, -1))


def _operand(names: set[str], *, precise: bool) -> torch.dtype:
    """Type of the operands of products with weights of some types."""
    if precise:
        return torch.float64
    is_half = len(names) == 1 and names <= HALF_TYPES
    return torch.float16 if is_half else torch.bfloat16


def _reference(
    x: Tensor, ids: Tensor, weights: Tensor, banks: list[_Bank], limit: float, *, precise: bool
) -> Tensor:
    """In float64, on operands rounded as the kernel rounds them."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    w1, w3, w2 = banks
    outer = _operand({w1.matrix.type, w3.matrix.type}, precise=precise)
    inner = _operand({w2.matrix.type}, precise=precise)
    x = x.to(outer).double()
    for token, slots in enumerate(ids.tolist()):
        for place, slot in enumerate(slots):
            if not 0 <= slot < len(banks[0].stored):
                continue
            a, b = (dequantize(bank.stored[slot]).to(outer).double() for bank in (w1, w3))
            h = swiglu_reference(x[token] @ a.T, x[token] @ b.T, limit)
            c = dequantize(w2.stored[slot]).to(inner).double()
            out[token] += weights[token, place].double() * (h.float().to(inner).double() @ c.T)
    return out


def _run(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    banks: list[_Bank],
    limit: float,
    *,
    precise: bool,
) -> Tensor:
    scratch = _scratch(x, ids, banks, precise=precise)
    out = torch.full(x.shape, math.nan, device=DEVICE)
    w1, w3, w2 = (bank.matrix for bank in banks)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    expert_ffn_chunk(out, *inputs, (w1, w3, w2), limit, scratch=scratch, precise=precise)
    return out.cpu()


def _scratch(x: Tensor, ids: Tensor, banks: list[_Bank], *, precise: bool) -> ExpertScratch:
    """Larger than needed and poisoned."""
    slots, width = len(banks[0].stored), banks[2].matrix.cols
    scratch = expert_scratch(
        len(x) + 1,
        ids.shape[1],
        slots + 1,
        x.shape[1],
        width,
        device=torch.device(DEVICE),
        precise=precise,
    )
    for memory in (scratch.x, scratch.hidden, scratch.outputs):
        memory.fill_(math.nan)
    return scratch


def _inputs(tokens: int, k: int, slots: int, hidden: int, seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    ids = torch.stack([torch.randperm(slots, generator=generator)[:k] for _ in range(tokens)])
    return x, ids.int(), torch.rand(tokens, k, generator=generator)


# Of w1, w3 and w2 with a seed each.
_SHAPES = (((96, 64), 1), ((96, 64), 11), ((64, 96), 21))
CASES = {
    "one_token": (1, 2, 4, 64, 96, ("Q8_0", "Q8_0", "Q8_0"), 10.0),
    "odd_sizes": (5, 2, 4, 96, 96, ("Q8_0", "BF16", "F16"), math.inf),
    "tight_limit": (3, 2, 3, 64, 64, ("BF16", "F32", "Q8_0"), 0.5),
    "factor_per_matrix": (5, 2, 3, 128, 64, ("NVFP4", "NVFP4", "NVFP4"), 10.0),
    "more_than_a_tile": (18, 1, 1, 64, 64, ("Q8_0", "Q8_0", "BF16"), 10.0),
}


@pytest.mark.parametrize("precise", [False, True], ids=["bf16", "precise"])
@pytest.mark.parametrize("case", CASES)
def test_chunk_equals_sum_of_experts(case: str, precise: bool) -> None:
    tokens, k, slots, hidden, width, types, limit = CASES[case]
    w1 = _Bank(types[0], slots, width, hidden, 1)
    w3 = _Bank(types[1], slots, width, hidden, 100)
    w2 = _Bank(types[2], slots, hidden, width, 200)
    x, ids, weights = _inputs(tokens, k, slots, hidden, 5)
    got = _run(x, ids, weights, [w1, w3, w2], limit, precise=precise)
    ref = _reference(x, ids, weights, [w1, w3, w2], limit, precise=precise)
    assert_close(case, got, ref, None if precise else 3.3e-3)


@pytest.mark.parametrize("precise", [False, True], ids=["bf16", "precise"])
@pytest.mark.parametrize("kind", ["Q8_0", "IQ2_XXS", "NVFP4"])
def test_tables_for_amd(monkeypatch: pytest.MonkeyPatch, kind: str, precise: bool) -> None:
    monkeypatch.setattr(expert_tiling, "matrix_unit", lambda: "wmma")
    banks = [
        _Bank(kind, 2, 64, 256, 1),
        _Bank(kind, 2, 64, 256, 100),
        _Bank("BF16", 2, 256, 64, 200),
    ]
    inputs = _inputs(3, 1, 2, 256, 5)
    got = _run(*inputs, banks, 10.0, precise=precise)
    assert_close(
        kind, got, _reference(*inputs, banks, 10.0, precise=precise), None if precise else 3.3e-3
    )


@pytest.mark.parametrize(
    ("gate", "up", "down"),
    [
        ("IQ2_XXS", "IQ2_XXS", "BF16"),
        ("MXFP4", "MXFP4", "Q2_K"),
        ("Q4_K", "Q4_K", "BF16"),
        ("Q6_K", "Q4_K", "BF16"),
    ],
)
def test_types(gate: str, up: str, down: str) -> None:
    width = 256 if down == "Q2_K" else 64
    x, ids, weights = _inputs(2, 1, 2, 256, 5)
    banks = [
        _Bank(gate, 2, width, 256, 1),
        _Bank(up, 2, width, 256, 10),
        _Bank(down, 2, 256, width, 20),
    ]
    got = _run(x, ids, weights, banks, 10.0, precise=False)
    assert_close(gate, got, _reference(x, ids, weights, banks, 10.0, precise=False), 3.3e-3)


def test_slots_outside_of_the_bank_add_nothing() -> None:
    x, ids, weights = _inputs(4, 2, 3, 64, 5)
    banks = [_Bank("Q8_0", 3, 64, 64, seed) for seed in (1, 10, 20)]
    ids[0, 1], ids[2, 0], ids[3] = -1, 3, -1
    got = _run(x, ids, weights, banks, 10.0, precise=True)
    assert_close("outside", got, _reference(x, ids, weights, banks, 10.0, precise=True))
    assert not got[3].any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_bad_numbers_show() -> None:
    x, ids, weights = _inputs(3, 2, 3, 64, 5)
    banks = [_Bank("Q8_0", 3, 64, 64, seed) for seed in (1, 10, 20)]
    x[1, 7] = math.nan
    got = _run(x, ids, weights, banks, 10.0, precise=False)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_refuses_what_does_not_fit() -> None:
    x, ids, weights = _inputs(2, 1, 2, 64, 5)
    banks = [_Bank("Q8_0", 2, 64, 64, seed) for seed in (1, 10, 20)]
    with pytest.raises(ShapeError, match="ids"):
        _run(x, ids[:1], weights, banks, 10.0, precise=False)
    w1, w3, w2 = (bank.matrix for bank in banks)
    scratch = _scratch(x, ids, banks, precise=True)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    with pytest.raises(ShapeError, match="scratch"):
        expert_ffn_chunk(torch.empty_like(inputs[0]), *inputs, (w1, w3, w2), 10.0, scratch=scratch)


@pytest.mark.parametrize(("tokens", "k", "slots", "width"), [(5, 2, 7, 16), (40, 6, 30, 16)])
def test_sort_equals_a_stable_sort(tokens: int, k: int, slots: int, width: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(-1, slots + 1, (tokens, k), dtype=torch.int32, generator=generator)
    order = torch.full((tokens * k,), -7, dtype=torch.int32, device=DEVICE)
    bounds = torch.full((2, slots), -7, dtype=torch.int32, device=DEVICE)
    capacity = tile_capacity(tokens * k, slots, width)
    tiles = torch.full((2, capacity), -7, dtype=torch.int32, device=DEVICE)
    sort_pairs(order, bounds, ids.to(DEVICE))
    cut_tiles(tiles, bounds, tokens * k, width)
    flat, expected, cut = ids.flatten(), [], []
    for slot in range(slots):
        own = (flat == slot).nonzero().flatten().tolist()
        assert bounds[:, slot].tolist() == [len(expected), len(expected) + len(own)]
        cut += [(slot, len(expected) + start) for start in range(0, len(own), width)]
        expected += own
    assert order[: len(expected)].tolist() == expected
    assert list(zip(*tiles[:, : len(cut)].tolist(), strict=True)) == cut
    assert (tiles[0, len(cut) :] == -1).all()


def test_experts_in_parts_have_the_bits_of_experts_together() -> None:
    x, ids, weights = _inputs(7, 2, 5, 64, 5)
    banks = [_Bank("MXFP4", 5, *shape, seed) for shape, seed in _SHAPES]
    whole = _run(x, ids, weights, banks, 10.0, precise=False)
    scratch = _scratch(x, ids, banks, precise=False)
    shuffled = [empty_bank("MXFP4", 3, *shape, DEVICE) for shape, _ in _SHAPES]
    asked = []

    def parts() -> Iterator[ExpertPart]:
        for first, experts in enumerate(([4, 0], [], [1, 3, 2])):
            places = torch.full((5,), -1, dtype=torch.int32)
            for slot, expert in enumerate(experts):
                places[expert] = 2 - slot
                for bank, full in zip(shuffled, banks, strict=True):
                    fill_bank(bank, 2 - slot, full.stored[expert])
            asked.append(first)
            w1, w3, w2 = shuffled
            yield ExpertPart((w1, w3, w2), places.to(DEVICE))

    out = torch.full(x.shape, math.nan, device=DEVICE)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    expert_ffn_parts(out, *inputs, parts(), 10.0, experts=5, scratch=scratch)
    assert asked == [0, 1, 2]
    assert torch.equal(out.cpu(), whole)


def test_no_parts_give_zero() -> None:
    x, ids, weights = _inputs(2, 1, 2, 64, 5)
    banks = [_Bank("MXFP4", 2, *shape, seed) for shape, seed in _SHAPES]
    scratch = _scratch(x, ids, banks, precise=False)
    out = torch.full(x.shape, math.nan, device=DEVICE)
    inputs = (x.to(DEVICE), ids.to(DEVICE), weights.to(DEVICE))
    expert_ffn_parts(out, *inputs, (), 10.0, experts=2, scratch=scratch)
    assert not out.any()


def test_tiles_are_as_wide_as_experts_have_tokens() -> None:
    assert [tile_width(6 * tokens, 256) for tokens in (1, 512, 1024, 2048, 4096, 65536)] == [
        16,
        16,
        32,
        64,
        128,
        128,
    ]


def test_scratch_bytes_are_those_of_the_scratch() -> None:
    made = expert_scratch(3, 2, 4, 64, 96, device=torch.device("cpu"), precise=True)
    parts = (made.x, made.order, made.bounds, made.tiles, made.hidden, made.outputs)
    assert expert_scratch_bytes(3, 2, 4, 64, 96, precise=True) == sum(p.nbytes for p in parts)

"""The experts of one token against the same products in float64."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import relative_error
from stored_matrices import stored_matrix
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up
from edgedsv4.kernels.gpu.planes import DeviceMatrix, device_matrix, empty_bank, fill_bank
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.kernels.swiglu import swiglu_reference

F32_LIMIT = 1e-5
HIDDEN, WIDTH, BANK = 256, 256, 3
TYPES = ["IQ2_XXS", "Q2_K", "Q4_K", "MXFP4", "Q8_0", "BF16"]


def _bank(name: str, rows: int, columns: int, seed: int) -> tuple[DeviceMatrix, list[Tensor]]:
    """A full bank and its matrices in float64."""
    stored = [stored_matrix(name, rows, columns, seed + i) for i in range(BANK)]
    bank = empty_bank(name, BANK, rows, columns, DEVICE)
    for slot, matrix in enumerate(stored):
        fill_bank(bank, slot, matrix)
    return bank, [_wide(matrix) for matrix in stored]


def _wide(matrix: QuantMatrix) -> Tensor:
    return dequantize(matrix, torch.float32).double()


def _vector(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("width", [4, 19])
def test_hidden_layers_of_routed_and_shared_experts(name: str, width: int) -> None:
    slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    (w1, gates), (w3, ups) = (_bank(name, width, HIDDEN, seed) for seed in (1, 11))
    shared = [stored_matrix("Q8_0", 5, HIDDEN, seed) for seed in (21, 31)]
    x = _vector(HIDDEN, 4)
    h = torch.full((2 * width + 5,), math.nan, device=DEVICE)
    s1, s3 = (device_matrix(matrix, DEVICE) for matrix in shared)
    expert_gate_up(h, x[None].to(DEVICE), slots, (w1, w3), (s1, s3), (1.5, 9.0))
    wide = x.double()
    parts = [swiglu_reference(gates[e] @ wide, ups[e] @ wide, 1.5) for e in (2, 0)]
    parts.append(swiglu_reference(_wide(shared[0]) @ wide, _wide(shared[1]) @ wide, 9.0))
    assert relative_error(h, torch.cat(parts)) < F32_LIMIT


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("rows", [4, 19])
def test_weighted_outputs_of_routed_and_shared_experts(name: str, rows: int) -> None:
    slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    w2, downs = _bank(name, rows, WIDTH, 41)
    shared = stored_matrix("Q8_0", rows, 96, 51)
    h, weights = _vector(2 * WIDTH + 96, 5), torch.tensor([0.75, 0.25])
    out = torch.full((1, rows), math.nan, device=DEVICE)
    s2 = device_matrix(shared, DEVICE)
    expert_down(out, h.to(DEVICE), slots, weights.to(DEVICE), w2, s2)
    first, second, last = h.double().split((WIDTH, WIDTH, 96))
    expected = 0.75 * downs[2] @ first + 0.25 * downs[0] @ second + _wide(shared) @ last
    assert relative_error(out[0], expected) < F32_LIMIT


def test_experts_without_a_shared_one() -> None:
    slots = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    (w1, gates), (w3, ups) = (_bank("MXFP4", 64, 64, seed) for seed in (1, 11))
    w2, downs = _bank("MXFP4", 64, 64, 21)
    x = _vector(64, 4)
    h = torch.full((64,), math.nan, device=DEVICE)
    expert_gate_up(h, x[None].to(DEVICE), slots, (w1, w3), None, (math.inf, math.inf))
    hidden = swiglu_reference(gates[1] @ x.double(), ups[1] @ x.double(), math.inf)
    assert relative_error(h, hidden) < F32_LIMIT
    out = torch.full((1, 64), math.nan, device=DEVICE)
    expert_down(out, h, slots, torch.ones(1, device=DEVICE), w2, None)
    assert relative_error(out[0], downs[1] @ hidden) < F32_LIMIT


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_slots_that_do_not_count_are_not_touched(name: str, count: int) -> None:
    slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    (w1, _), (w3, _) = (_bank(name, WIDTH, HIDDEN, seed) for seed in (1, 11))
    w2, _ = _bank(name, 19, WIDTH, 41)
    used = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    x, weights = _vector(HIDDEN, 4)[None].to(DEVICE), torch.tensor([0.75, 0.25], device=DEVICE)

    def run(slots: Tensor, weights: Tensor, used: Tensor | None) -> Tensor:
        h = torch.full((len(slots) * WIDTH,), math.nan, device=DEVICE)
        expert_gate_up(h, x, slots, (w1, w3), None, (1.5, 1.5), used=used)
        out = torch.full((1, 19), math.nan, device=DEVICE)
        expert_down(out, h, slots, weights, w2, None, used=used)
        assert bool(h[count * WIDTH :].isnan().all())
        return out

    found = run(slots, weights, used)
    if count == 0:
        assert not found.any()
    else:
        expected = run(slots[:count], weights[:count], None)
        # One slot is a kernel of its own, which may fuse other products and sums.
        assert relative_error(found, expected) < F32_LIMIT


def test_a_vector_that_is_not_finite_gives_results_that_are_not() -> None:
    slots = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    w1, _ = _bank("Q4_K", 4, HIDDEN, 1)
    x = _vector(HIDDEN, 4)
    x[7] = math.nan
    h = torch.zeros(4, device=DEVICE)
    expert_gate_up(h, x[None].to(DEVICE), slots, (w1, w1), None, (7.0, 7.0))
    assert bool(h.isnan().all())


def test_shapes_that_do_not_fit_are_refused() -> None:
    slots = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    bank = empty_bank("Q8_0", 3, 4, 64, DEVICE)
    x, h = torch.zeros(1, 64, device=DEVICE), torch.zeros(9, device=DEVICE)
    with pytest.raises(ShapeError):
        expert_gate_up(h, x, slots, (bank, bank), None, (1.0, 1.0))
    with pytest.raises(ShapeError):
        expert_down(torch.zeros(1, 4, device=DEVICE), h, slots, h[:2], bank, None)

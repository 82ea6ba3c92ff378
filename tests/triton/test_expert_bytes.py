"""The experts of one token with vectors of bytes, against float64 products of the same bytes."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import relative_error
from stored_matrices import stored_matrix
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.byte_products import BYTE_ORDERS, fits_bytes
from edgedsv4.kernels.gpu.byte_vector import ByteVector, empty_bytes, to_bytes
from edgedsv4.kernels.gpu.expert_bytes import ByteTile, down_bytes, gate_up_bytes
from edgedsv4.kernels.gpu.planes import DeviceMatrix, empty_bank, empty_matrix, fill_bank
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.kernels.swiglu import swiglu_reference

F32_LIMIT = 1e-6
BANK = 3
TYPES = sorted(BYTE_ORDERS)
COLUMNS = {"IQ2_XXS": 768, "Q2_K": 512}
"""More than one step of a program's threads, and lanes without columns in the last one."""


def elements(vector: ByteVector) -> tuple[Tensor, Tensor]:
    """Bytes and scales of the elements in order, float64 [n] and [n / 32], from the definition."""
    raw, groups = vector.words.cpu().view(torch.int8), vector.columns // 32
    scales = vector.scales.cpu().double()
    if vector.order == "nibbles":
        words = raw.view(8, groups, 4).transpose(0, 1)  # [groups, 8, 4]
    else:
        words = raw.view(2, 8, groups // 2, 4).permute(2, 0, 1, 3).reshape(groups, 8, 4)
        scales = scales.view(2, -1).T.flatten()
    found = torch.zeros(groups, 32, dtype=torch.float64)
    for word in range(8):
        for byte in range(4):
            if vector.order == "nibbles":
                element = 8 * (word // 2) + 2 * byte + word % 2
            else:
                half, k = divmod(word, 4)
                element = 16 * half + (2 * k, 2 * k + 8, 2 * k + 1, 2 * k + 9)[byte]
            found[:, element] = words[:, word, byte].double()
    return found.flatten(), scales


def values(vector: ByteVector) -> Tensor:
    found, scales = elements(vector)
    return found * scales.repeat_interleave(32)


def vector(count: int, seed: int) -> Tensor:
    return torch.randn(count, generator=torch.Generator().manual_seed(seed))


def rounded(x: Tensor, name: str) -> ByteVector:
    """A vector for products with a type, poisoned before it is written."""
    made = empty_bytes(len(x), BYTE_ORDERS[name], DEVICE)
    made.words.fill_(0x55555555)
    made.scales.fill_(math.nan)
    to_bytes(made, x.to(DEVICE))
    return made


def bank(name: str, rows: int, columns: int, seed: int) -> tuple[DeviceMatrix, list[Tensor]]:
    """A full bank and its matrices in float64."""
    stored = [stored_matrix(name, rows, columns, seed + i) for i in range(BANK)]
    made = empty_bank(name, BANK, rows, columns, DEVICE)
    for slot, matrix in enumerate(stored):
        fill_bank(made, slot, matrix)
    return made, [dequantize(matrix, torch.float32).double() for matrix in stored]


@pytest.mark.parametrize("name", TYPES)
def test_a_vector_is_rounded_in_groups(name: str) -> None:
    x = vector(448, 3)
    x[32:64] = 0.0
    x[64:96] *= 2.0**-115
    found, scales = elements(rounded(x, name))
    groups = x.view(-1, 32)
    largest = groups.abs().amax(1)
    expected = torch.round(groups * (127.0 / largest)[:, None])
    expected[1:3] = 0.0
    assert torch.equal(found, expected.double().flatten())
    expected_scales = largest / 127.0
    expected_scales[1:3] = 0.0
    assert torch.equal(scales, expected_scales.double())


@pytest.mark.parametrize("name", TYPES)
def test_a_product_is_rounded_before_it_becomes_a_byte(name: str) -> None:
    """As the CPU does it; one instruction for product and sum would give these the other way."""
    largest = torch.tensor(1.7)
    factor = 127.0 / largest
    drawn = largest * (2.0 * torch.rand(1 << 22, generator=torch.Generator().manual_seed(1)) - 1.0)
    expected = torch.round(drawn * factor)
    is_other = torch.round(drawn.double() * factor.double()) != expected
    chosen, bytes_ = drawn[is_other][:31], expected[is_other][:31]
    assert len(chosen) > 2
    x = torch.zeros(64)
    x[0], x[32] = largest, largest
    x[1 : 1 + len(chosen)] = chosen
    found, _ = elements(rounded(x, name))
    assert torch.equal(found[1 : 1 + len(chosen)], bytes_.double())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_group_that_is_not_finite_has_the_scale_nan(bad: float) -> None:
    x = vector(128, 3)
    x[70] = bad
    made = rounded(x, "Q2_K")
    _, scales = elements(made)
    assert scales.isnan().tolist() == [False, False, True, False]


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("tile", [None, ByteTile(8, 2), ByteTile(32, 2)])
def test_hidden_layers(name: str, tile: ByteTile | None) -> None:
    columns, width = COLUMNS[name], 64
    slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    (w1, gates), (w3, ups) = (bank(name, width, columns, seed) for seed in (1, 11))
    x = rounded(vector(columns, 4), name)
    h = rounded(torch.full((2 * width,), 7.0), "Q2_K")
    gate_up_bytes(h, x, slots, (w1, w3), 1.5, width=width, tile=tile)
    wide = values(x)
    expected = torch.cat([swiglu_reference(gates[e] @ wide, ups[e] @ wide, 1.5) for e in (2, 0)])
    steps = expected.view(-1, 32).abs().amax(1, keepdim=True) / 127.0
    error = (values(h) - expected).view(-1, 32).abs() / steps
    # A value that lies in the middle may be rounded either way.
    assert float(error.max()) < 0.5 + 1e-3


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize(("height", "tile"), [(19, None), (4, ByteTile(4, 1))])
def test_weighted_outputs(name: str, height: int, tile: ByteTile | None) -> None:
    columns = COLUMNS[name]
    slots = torch.tensor([2, 0, 1], dtype=torch.int32, device=DEVICE)
    w2, downs = bank(name, height, columns, 41)
    h, weights = rounded(vector(3 * columns, 5), name), torch.tensor([0.75, 0.25, -0.5])
    out = torch.full((1, height), math.nan, device=DEVICE)
    down_bytes(out, h, slots, weights.to(DEVICE), w2, tile=tile)
    first, second, third = values(h).split(columns)
    expected = 0.75 * downs[2] @ first + 0.25 * downs[0] @ second - 0.5 * downs[1] @ third
    assert relative_error(out[0], expected) < F32_LIMIT


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.parametrize("count", [0, 1, 2])
def test_slots_that_do_not_count_are_not_touched(name: str, count: int) -> None:
    columns, width = COLUMNS[name], 64
    slots = torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    (w1, _), (w3, _) = (bank(name, width, columns, seed) for seed in (1, 11))
    w2, _ = bank(name, 19, columns, 41)
    used = torch.tensor([count], dtype=torch.int32, device=DEVICE)
    x, weights = rounded(vector(columns, 4), name), torch.tensor([0.75, 0.25], device=DEVICE)
    h = rounded(torch.full((2 * width,), 7.0), "Q2_K")
    untouched = elements(h)[0].view(2, width)
    gate_up_bytes(h, x, slots, (w1, w3), 1.5, width=width, used=used)
    whole = rounded(torch.full((2 * width,), 9.0), "Q2_K")
    gate_up_bytes(whole, x, slots, (w1, w3), 1.5, width=width)
    found, expected = (elements(part)[0].view(2, width) for part in (h, whole))
    assert torch.equal(found[:count], expected[:count])
    assert torch.equal(found[count:], untouched[count:])
    inner = vector(2 * columns, 5)
    inner[count * columns :] = math.nan
    out = torch.full((1, 19), math.nan, device=DEVICE)
    down_bytes(out, rounded(inner, name), slots, weights, w2, used=used)
    factors = torch.where(torch.arange(2, device=DEVICE) < count, weights, 0.0)
    wanted = torch.full((1, 19), math.nan, device=DEVICE)
    down_bytes(wanted, rounded(inner.nan_to_num(), name), slots, factors, w2)
    assert relative_error(out, wanted) < F32_LIMIT


@pytest.mark.parametrize("name", TYPES)
def test_a_vector_that_is_not_finite_gives_results_that_are_not(name: str) -> None:
    columns = COLUMNS[name]
    slots = torch.tensor([1], dtype=torch.int32, device=DEVICE)
    matrix, _ = bank(name, 64, columns, 1)
    x = vector(columns, 4)
    x[7] = math.nan
    h = empty_bytes(64, "twos", DEVICE)
    gate_up_bytes(h, rounded(x, name), slots, (matrix, matrix), 7.0, width=64)
    assert bool(h.scales.isnan().all())
    out = torch.zeros(1, 64, device=DEVICE)
    down_bytes(out, rounded(x, name), slots, torch.ones(1, device=DEVICE), matrix)
    assert bool(out.isnan().all())


def test_only_cards_with_the_instructions_take_these_kernels() -> None:
    matrix = empty_matrix("IQ2_XXS", 32, 256, "meta")
    assert fits_bytes(matrix, "sm_89")
    assert not fits_bytes(matrix, "gfx942")
    assert not fits_bytes(matrix, "")
    assert not fits_bytes(empty_matrix("Q8_0", 32, 256, "meta"), "sm_90")


def test_what_does_not_fit_is_refused() -> None:
    slots = torch.zeros(2, dtype=torch.int32, device=DEVICE)
    matrix = empty_bank("Q2_K", 2, 64, 256, DEVICE)
    x, h = empty_bytes(256, "twos", DEVICE), empty_bytes(128, "twos", DEVICE)
    with pytest.raises(ShapeError, match="pairs of 32"):
        empty_bytes(96, "twos", DEVICE)
    with pytest.raises(ShapeError, match="to_bytes"):
        to_bytes(x, torch.zeros(128, device=DEVICE))
    wrong = empty_bytes(256, "nibbles", DEVICE)
    with pytest.raises(ShapeError, match="nibbles"):
        gate_up_bytes(h, wrong, slots, (matrix, matrix), 1.0, width=64)
    with pytest.raises(ShapeError, match="gate_up_bytes"):
        gate_up_bytes(x, x, slots, (matrix, matrix), 1.0, width=64)
    with pytest.raises(ShapeError, match="down_bytes"):
        down_bytes(
            torch.zeros(1, 64, device=DEVICE), x, slots, torch.ones(2, device=DEVICE), matrix
        )

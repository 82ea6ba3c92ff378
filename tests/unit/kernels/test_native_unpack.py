"""Groups of unsigned bytes, a scale and an offset stand for the numbers that the decoders give."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native import library
from edgedsv4.kernels.native.library import matrix_of
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

# Group and largest byte of each type.
GROUPS = {
    "Q2_K": (16, 3),
    "Q3_K": (16, 7),
    "Q4_K": (32, 15),
    "Q5_K": (32, 31),
    "Q6_K": (16, 63),
    "IQ2_XXS": (32, 86),
    "IQ2_XS": (16, 86),
    "IQ3_XXS": (32, 124),
    "IQ4_NL": (32, 240),
    "IQ4_XS": (32, 240),
    "Q8_0": (32, 255),
    "Q4_0": (32, 15),
    "MXFP4": (32, 24),
    "NVFP4": (16, 24),
}
# Byte offsets of the half floats of a block.
HALVES = {
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ3_XXS": (0,),
    "IQ4_NL": (0,),
    "IQ4_XS": (0,),
}
# f16 bits: zeros, smallest and largest subnormal, smallest and largest normal.
ODD_HALVES = (0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x7BFF)
POISON_BYTE, POISON = 0xA5, -7.25
SLACK = 64
GUARD = 16


def random_matrix(
    name: str, rows: int, per_row: int, *, address: int = 0, factor: float = 1.0, seed: int = 0
) -> QuantMatrix:
    """Random blocks, whose half floats are finite, `address` bytes past an aligned address.

    The data ends where its memory ends, so that a sanitizer sees every read past it.
    """
    kind = BLOCK_TYPES[name]
    generator = np.random.default_rng(seed)
    size = rows * per_row * kind.block_bytes
    memory = np.empty(address + size, dtype=np.uint8)
    blocks = memory[address:].reshape(rows * per_row, kind.block_bytes)
    blocks[:] = generator.integers(0, 256, blocks.shape, dtype=np.uint8)
    if name in ("Q8_0", "Q4_0"):
        blocks[:, 1] &= 0xBF
    for at in HALVES.get(name, ()):
        blocks[:, at + 1] &= 0xBF
        odd = np.array(ODD_HALVES, dtype="<u2").view(np.uint8).reshape(-1, 2)[: len(blocks)]
        blocks[: len(odd), at : at + 2] = odd
    if name == "MXFP4":
        blocks[:, 0] = blocks[:, 0] % 100 + 60
    data = torch.from_numpy(blocks.reshape(rows, -1))
    return QuantMatrix(kind, rows, per_row * kind.block_elements, data, None, factor)


def aligned(count: int, poison: float, dtype: type) -> np.ndarray:
    """`count` elements at an address that is a multiple of 64, poisoned."""
    size = count * np.dtype(dtype).itemsize
    memory = np.zeros(size + 64, dtype=np.uint8)
    start = (-memory.ctypes.data) % 64
    array: np.ndarray = memory[start : start + size].view(dtype)
    array[:] = poison
    return array


def unpack(
    matrix: QuantMatrix, row: int, first: int, columns: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """u, scale, offset of a part of a row; what lies past the allowed slack must not change."""
    group, _ = GROUPS[matrix.block_type.name]
    groups = columns // group
    u = aligned(columns + SLACK + GUARD, POISON_BYTE, np.uint8)
    floats = [aligned(groups + SLACK // 4 + GUARD, POISON, np.float32) for _ in range(2)]
    lib, ffi = library.library()
    found = lib.dk_unpack_row(
        ffi.from_buffer("uint8_t[]", u),
        ffi.from_buffer("float[]", floats[0]),
        ffi.from_buffer("float[]", floats[1]),
        matrix_of(matrix),
        row,
        first,
        columns,
    )
    assert found == group
    assert (u[columns + SLACK :] == POISON_BYTE).all()
    for array in floats:
        assert (array[groups + SLACK // 4 :] == POISON).all()
    return u[:columns], floats[0][:groups], floats[1][:groups]


def assert_groups_stand_for(matrix: QuantMatrix, row: int, first: int, columns: int) -> None:
    """scale * u + offset, in float64, is the decoder's number to rounding of a group's largest."""
    group, largest = GROUPS[matrix.block_type.name]
    u, scale, offset = unpack(matrix, row, first, columns)
    assert u.max() <= largest
    groups = u.reshape(-1, group).astype(np.float64)
    got = groups * scale[:, None].astype(np.float64) + offset[:, None]
    reference = dequantize(matrix).numpy()[row, first : first + columns].reshape(-1, group)
    terms = np.abs(scale.astype(np.float64)) * largest + np.abs(offset)
    error = np.abs(got - reference.astype(np.float64))
    # Below the normal floats a product is only as exact as the smallest float.
    assert (error <= 1e-6 * terms[:, None] + 2e-45).all()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("per_row", [2, 6, 34])
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_groups_stand_for_the_decoded_numbers(name: str, per_row: int) -> None:
    matrix = random_matrix(name, 3, per_row)
    for row in range(3):
        assert_groups_stand_for(matrix, row, 0, matrix.columns)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("address", [1, 2, 47])
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_blocks_at_any_address_unpack_alike(name: str, address: int) -> None:
    matrix = random_matrix(name, 5, 4, address=address, seed=1)
    assert_groups_stand_for(matrix, 4, 0, matrix.columns)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_a_part_of_a_row_unpacks_as_in_the_whole(name: str) -> None:
    matrix = random_matrix(name, 2, 9, seed=2)
    elements = BLOCK_TYPES[name].block_elements
    group, _ = GROUPS[name]
    whole = unpack(matrix, 1, 0, matrix.columns)
    for first, count in ((0, 1), (1, 1), (2, 7), (8, 1), (3, 0)):
        u, scale, offset = unpack(matrix, 1, first * elements, count * elements)
        start, stop = first * elements, (first + count) * elements
        np.testing.assert_array_equal(u, whole[0][start:stop])
        np.testing.assert_array_equal(scale, whole[1][start // group : stop // group])
        np.testing.assert_array_equal(offset, whole[2][start // group : stop // group])


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", sorted(GROUPS))
def test_the_factor_is_folded_into_scale_and_offset(name: str) -> None:
    matrix = random_matrix(name, 2, 4, factor=float(np.float32(0.7)), seed=3)
    assert_groups_stand_for(matrix, 1, 0, matrix.columns)


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("bits", [0x7C00, 0xFC00, 0x7E00, 0xFD01])
@pytest.mark.parametrize("name", sorted(HALVES))
def test_a_scale_that_is_not_finite_shows(name: str, bits: int) -> None:
    for at in HALVES[name]:
        matrix = random_matrix(name, 1, 4, seed=4)
        blocks = matrix.data.view(4, -1)
        blocks[1, at] = bits & 255
        blocks[1, at + 1] = bits >> 8
        _, scale, offset = unpack(matrix, 0, 0, matrix.columns)
        bad = ~(np.isfinite(scale) & np.isfinite(offset)).reshape(4, -1)
        assert bad[1].all()
        assert not bad[[0, 2, 3]].any()


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "FP8_E4M3", "Q4_1", "Q5_0", "IQ1_S"])
def test_other_types_have_no_int8_form(name: str) -> None:
    lib, ffi = library.library()
    matrix = ffi.new("dk_matrix *")
    matrix.type = lib.dk_type_id(name.encode())
    null = ffi.NULL
    assert lib.dk_unpack_row(null, null, null, matrix, 0, 0, 0) == 0
    assert lib.dk_type_has_int8(matrix.type) == 0

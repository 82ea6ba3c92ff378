"""Scales without a finite value are found, with their row and block."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from edgedsv4.errors import UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.find_bad_scales import find_bad_scales
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, matrix_from_numpy

# Byte and value that make a block's scale bad: infinities and NaNs of half floats, NaN codes.
BAD_BYTES = [
    ("Q4_0", 1, 0x7C),
    ("Q4_1", 3, 0xFC),
    ("Q5_0", 1, 0x7E),
    ("Q5_1", 1, 0x7C),
    ("Q8_0", 1, 0xFF),
    ("Q2_K", 81, 0x7C),
    ("Q2_K", 83, 0x7C),
    ("Q3_K", 109, 0x7C),
    ("Q4_K", 1, 0x7C),
    ("Q4_K", 3, 0x7D),
    ("Q5_K", 1, 0x7C),
    ("Q6_K", 209, 0xFC),
    ("IQ4_NL", 1, 0x7C),
    ("IQ4_XS", 1, 0x7C),
    ("IQ1_S", 1, 0x7C),
    ("IQ2_XXS", 1, 0x7C),
    ("IQ2_XS", 1, 0x7C),
    ("IQ2_S", 1, 0x7C),
    ("IQ3_XXS", 1, 0x7C),
    ("IQ3_S", 1, 0x7C),
    ("TQ1_0", 53, 0x7C),
    ("TQ2_0", 65, 0x7C),
    ("MXFP4", 0, 0xFF),
    ("NVFP4", 2, 0x7F),
    ("F16", 1, 0x7C),
    ("BF16", 1, 0x7F),
]


def zeros(name: str, rows: int, blocks: int) -> tuple[np.ndarray, int]:
    block_type = BLOCK_TYPES[name]
    data = np.zeros((rows, blocks, block_type.block_bytes), dtype=np.uint8)
    return data, blocks * block_type.block_elements


def matrix(name: str, data: np.ndarray) -> QuantMatrix:
    rows, blocks = data.shape[:2]
    block_type = BLOCK_TYPES[name]
    return matrix_from_numpy(data, block_type, rows, blocks * block_type.block_elements)


@pytest.mark.parametrize(("name", "byte", "value"), BAD_BYTES)
def test_a_bad_scale_is_found_in_its_row_and_block(name: str, byte: int, value: int) -> None:
    data, _ = zeros(name, 5, 3)
    data[3, 1, byte] = value
    if name == "BF16":
        data[3, 1, 0] = 0x80
    assert find_bad_scales(matrix(name, data)) == [(3, 1)]


def test_the_scattered_scale_of_iq1_m_is_put_together() -> None:
    data, _ = zeros("IQ1_M", 5, 3)
    data[3, 1, [53, 55]] = 0xC0, 0x70  # 0x7C00: nibbles C and 7 on top of words 2 and 3
    assert find_bad_scales(matrix("IQ1_M", data)) == [(3, 1)]


@pytest.mark.parametrize("name", sorted({name for name, _, _ in BAD_BYTES} | {"IQ1_M"}))
def test_good_scales_are_not_reported(name: str) -> None:
    data, _ = zeros(name, 5, 3)
    assert find_bad_scales(matrix(name, data)) == []


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "Q6_K", "IQ3_S", "IQ1_M", "IQ2_XXS", "TQ1_0"])
def test_what_is_found_is_what_does_not_decode_to_numbers(name: str) -> None:
    generator = np.random.default_rng(3)
    block_type = BLOCK_TYPES[name]
    data = generator.integers(0, 256, (60, 5, block_type.block_bytes), dtype=np.uint8)
    tested = matrix(name, data)
    broken = ~dequantize(tested).isfinite().unflatten(1, (5, -1)).all(2)
    assert find_bad_scales(tested, limit=1000) == [tuple(p) for p in broken.nonzero().tolist()]


def test_infinite_and_nan_numbers_of_a_float_tensor_are_found() -> None:
    data = torch.zeros(3, 4)
    data[1, 2], data[2, 0] = torch.inf, torch.nan
    tested = QuantMatrix(BLOCK_TYPES["F32"], 3, 4, data)
    assert find_bad_scales(tested) == [(1, 2), (2, 0)]


def test_nan_codes_and_scales_of_fp8_are_found() -> None:
    data = torch.zeros(130, 200, dtype=torch.uint8)
    data[5, 7] = 0xFF
    scale = torch.full((2, 2), 127, dtype=torch.uint8)
    scale[1, 0] = 0xFF
    tested = QuantMatrix(BLOCK_TYPES["FP8_E4M3"], 130, 200, data, scale)
    assert find_bad_scales(tested) == [(128, 0), (5, 7)]


def test_nan_scales_of_fp4_are_found() -> None:
    data = torch.full((3, 32), 0xFF, dtype=torch.uint8)
    scale = torch.full((3, 2), 127, dtype=torch.uint8)
    scale[2, 1] = 0xFF
    tested = QuantMatrix(BLOCK_TYPES["FP4_E2M1"], 3, 64, data, scale)
    assert find_bad_scales(tested) == [(2, 1)]


def test_the_list_ends_at_the_limit() -> None:
    data, _ = zeros("MXFP4", 50, 2)
    data[:, :, 0] = 0xFF
    assert find_bad_scales(matrix("MXFP4", data), limit=3) == [(0, 0), (0, 1), (1, 0)]


def test_an_empty_matrix_has_no_bad_scales() -> None:
    data, _ = zeros("Q8_0", 0, 2)
    assert find_bad_scales(matrix("Q8_0", data)) == []


def test_integer_tensors_are_refused() -> None:
    data, _ = zeros("I32", 2, 2)
    with pytest.raises(UnsupportedModelError, match="I32"):
        find_bad_scales(matrix("I32", data))

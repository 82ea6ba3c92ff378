"""Checks of every block type a weight can have: its numbers, and products with them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.kernels.dequantize import DECODABLE_TYPES
from edgedsv4.kernels.native.library import library, matrix_of, pointer
from edgedsv4.kernels.quant_matmul import (
    FP4_SCALE_BLOCK,
    FP8_SCALE_BLOCKS,
    QuantMatrix,
    dequantize,
    matrix_from_numpy,
    quant_matmul,
)
from edgedsv4.runtime.selftest.check import Check, against_float64, draw

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation

ROWS, COLUMNS = 37, 512
"""Two blocks of the longest types; an odd number of rows."""

# Bytes of a block at which half-precision numbers start: random bits could be NaN there, or huge.
_HALVES: Mapping[str, tuple[int, ...]] = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
# Weights in these have scales apart, and no type of their own here.
_PARTS = ("E8M0", "F4")
_E8M0_NEAR_ONE = (122, 126)


def matrix_checks(device: torch.device) -> Iterator[Check]:
    """One check per block type, decoding and products, with float32 and with int8 activations."""

    def multiply(
        few: Tensor, many: Tensor, weight: QuantMatrix, *, backend: Implementation
    ) -> list[Tensor]:
        # The kernels take another way from 16 tokens on.
        products = [
            quant_matmul(x, weight, backend=backend, activations=activations)
            for x in (few, many)
            for activations in ("f32", "int8")
        ]
        return [_bits(weight, backend), *products]

    for place, name in enumerate(sorted(DECODABLE_TYPES.difference(_PARTS))):
        weight = random_matrix(BLOCK_TYPES[name], ROWS, COLUMNS, place)
        inputs = (draw(place, 3, COLUMNS), draw(100 + place, 35, COLUMNS), weight)
        yield against_float64(f"weights: {name}", device, multiply, inputs)


def random_matrix(block_type: BlockType, rows: int, columns: int, seed: int) -> QuantMatrix:
    """A matrix of random bits whose numbers are finite and of moderate size, on the CPU."""
    generator = np.random.default_rng(seed)
    name = block_type.name
    data = _random_bytes(block_type, rows * columns // block_type.block_elements, generator)
    scale = None
    if name in ("FP8_E4M3", "FP4_E2M1"):
        side = FP8_SCALE_BLOCKS[0]
        squares = (-(-rows // side), -(-columns // side))
        shape = squares if name == "FP8_E4M3" else (rows, columns // FP4_SCALE_BLOCK)
        scale = generator.integers(*_E8M0_NEAR_ONE, shape, dtype=np.uint8)
    factor = 0.75 if name == "NVFP4" else 1.0
    return matrix_from_numpy(data, block_type, rows, columns, scale, factor)


def _random_bytes(
    block_type: BlockType, count: int, generator: np.random.Generator
) -> npt.NDArray[np.uint8]:
    """uint8 [count, block_bytes]."""
    name, width = block_type.name, block_type.block_bytes
    if name in ("F32", "F64", "F16"):
        return generator.standard_normal((count, 1)).astype(f"<f{width}").view(np.uint8)
    if name == "BF16":
        words = generator.standard_normal((count, 1)).astype("<f4").view("<u2")
        return np.ascontiguousarray(words[:, 1:]).view(np.uint8)
    data = generator.integers(0, 256, (count, width), dtype=np.uint8)
    for start in _HALVES.get(name, ()):
        scales = generator.uniform(0.01, 0.02, (count, 1)).astype("<f2")
        data[:, start : start + 2] = scales.view(np.uint8)
    if name == "MXFP4":
        data[:, 0] = generator.integers(*_E8M0_NEAR_ONE, count)
    elif name == "NVFP4":
        data[:, :4] = generator.integers(0x20, 0x38, (count, 4))
    elif name == "IQ1_M":  # its scale is spread over the high bits of four bytes
        data[:, 49::2] = data[:, 49::2] & 15 | np.array([0, 0x50, 0xE0, 0x20], dtype=np.uint8)
    elif name in ("FP8_E4M3", "FP8_E5M2"):
        data &= 0xBB  # neither NaN nor infinity
    return data


def _bits(weight: QuantMatrix, backend: Implementation) -> Tensor:
    """The numbers of a matrix as float32, as the int32 of their bits: decoders agree exactly."""
    if backend == "reference":
        return dequantize(weight).contiguous().view(torch.int32)
    lib, _ = library()
    matrix = matrix_of(weight)
    numbers = torch.empty(weight.rows, weight.columns)
    for row, values in enumerate(numbers):
        lib.dk_decode_row(pointer(values), matrix, row, 0, weight.columns)
    return numbers.view(torch.int32)

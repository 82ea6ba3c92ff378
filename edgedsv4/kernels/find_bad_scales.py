"""Where a stored matrix holds scales (or plain floats) that are NaN or infinite.

Damaged weights of a quantised type nearly always still decode to numbers; a scale without a finite
value is a sign that can be looked for. One bad scale spoils its whole block, so blocks are named.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import UnsupportedModelError
from edgedsv4.kernels.dequantize.fields import as_type, halves
from edgedsv4.kernels.dequantize.iq_blocks import iq1_m_scale

if TYPE_CHECKING:
    from edgedsv4.kernels.quant_matmul import QuantMatrix

TILE_BYTES = 1 << 22

BadBlocks = Callable[[Tensor], Tensor]
"""uint8 [n, block_bytes] -> bool [n]."""


def _bad_halves(*starts: int) -> BadBlocks:
    """Half floats at these bytes of a block."""
    return lambda blocks: torch.stack(
        [~halves(blocks[:, start : start + 2]).isfinite().flatten() for start in starts]
    ).any(0)


def _bad_numbers(dtype: torch.dtype) -> BadBlocks:
    """Blocks that are one plain float."""
    return lambda blocks: ~as_type(blocks, dtype).isfinite().flatten()


_BAD_BLOCKS: Mapping[str, BadBlocks] = MappingProxyType(
    {
        **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), _bad_halves(0)),
        **dict.fromkeys(("IQ1_S", "IQ2_XXS", "IQ2_XS", "IQ2_S"), _bad_halves(0)),
        **dict.fromkeys(("IQ3_XXS", "IQ3_S"), _bad_halves(0)),
        **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), _bad_halves(0, 2)),
        "Q2_K": _bad_halves(80, 82),
        "Q3_K": _bad_halves(108),
        "Q6_K": _bad_halves(208),
        "TQ1_0": _bad_halves(52),
        "TQ2_0": _bad_halves(64),
        "IQ1_M": lambda blocks: ~iq1_m_scale(blocks).isfinite().flatten(),
        "MXFP4": lambda blocks: blocks[:, 0] == 0xFF,
        "NVFP4": lambda blocks: (blocks[:, :4] & 0x7F == 0x7F).any(1),
        # E4M3 has no infinity, E5M2 has exponent 31 for both.
        "FP8_E4M3": lambda blocks: blocks[:, 0] & 0x7F == 0x7F,
        "FP8_E5M2": lambda blocks: blocks[:, 0] & 0x7F >= 0x7C,
        "E8M0": lambda blocks: blocks[:, 0] == 0xFF,
        # Every E2M1 code is finite; the scales are a tensor of their own.
        **dict.fromkeys(("FP4_E2M1", "F4"), lambda blocks: blocks[:, 0] != blocks[:, 0]),
        "F32": _bad_numbers(torch.float32),
        "F16": _bad_numbers(torch.float16),
        "BF16": _bad_numbers(torch.bfloat16),
        "F64": _bad_numbers(torch.float64),
    }
)


def find_bad_scales(matrix: QuantMatrix, *, limit: int = 8) -> list[tuple[int, int]]:
    """Blocks without a finite scale, in reading order; reads the whole matrix once.

    Args:
        matrix: any stored matrix.
        limit: stop after so many.

    Returns:
        Up to `limit` pairs (row, block). A block is one of the storage type (one element for plain
        floats and FP8); for a bad element of a scale tensor, the first row and the block of columns
        that it belongs to. NaN or infinite numbers of plain float types, NaN codes of FP8, 0xFF of
        E8M0 and MXFP4, 0x7F of NVFP4 count, even where ggml gives them a finite meaning.

    Raises:
        UnsupportedModelError: if the type is not one that weights can have.
    """
    found: list[tuple[int, int]] = []
    for place in _bad_places(matrix):
        if len(found) >= limit:
            break
        found.append(place)
    return found


def _bad_places(matrix: QuantMatrix) -> Iterator[tuple[int, int]]:
    is_bad = _BAD_BLOCKS.get(matrix.block_type.name)
    if is_bad is None:
        raise UnsupportedModelError(f"a matrix of type {matrix.block_type.name} has no scales")
    if matrix.scale is not None:
        height = matrix.scale_block[0]
        for row, block in (matrix.scale == 0xFF).nonzero().tolist():
            yield row * height, block
    data = matrix.data
    size = matrix.block_type.block_bytes
    height = max(1, TILE_BYTES // max(1, data.shape[1] * data.element_size()))
    for first in range(0, matrix.rows, height):
        tile = data[first : first + height]
        if data.dtype != torch.uint8:
            bad = ~tile.isfinite()
        else:
            bad = is_bad(tile.reshape(-1, size)).view(len(tile), -1)
        for row, block in bad.nonzero().tolist():
            yield first + row, block

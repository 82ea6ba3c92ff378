"""Numbers to blocks of a storage type: the inverse of `edgedsv4.kernels.dequantize`.

Encoders are plain PyTorch, vectorised over blocks. Q8_0 and MXFP4 give the bytes of ggml's rule;
the K types minimise the squared error, weighted by importance when there is one, by searches of our
own (see `affine_search`). Whatever is written decodes with `decode_blocks` to what was compared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from edgedsv4.errors import NumericError, ShapeError, UnsupportedModelError
from edgedsv4.kernels.quantize import k_blocks, small_blocks
from edgedsv4.kernels.quantize.rounding import HALF_MAX

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

_PLAIN: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "F32": small_blocks.f32,
        "F16": small_blocks.f16,
        "BF16": small_blocks.bf16,
        "Q8_0": small_blocks.q8_0,
    }
)
_SEARCHED: Mapping[str, Callable[[Tensor, Tensor], Tensor]] = MappingProxyType(
    {"Q2_K": k_blocks.q2_k, "Q4_K": k_blocks.q4_k, "Q6_K": k_blocks.q6_k}
)

ENCODABLE_TYPES = frozenset((*_PLAIN, *_SEARCHED, "MXFP4"))
"""Names of the types that can be written."""

# Elements per pass. The searches go over the values a few hundred times, so a pass should stay in
# a core's cache, but not be so small that the calls cost more than the work.
_TILE_ELEMENTS: Final = 1 << 16
# Columns without any importance still count a little, or their values would be free.
_LEAST_IMPORTANCE: Final = 1e-6
# Largest magnitude that rounds to a finite bfloat16.
_BF16_MAX: Final = 3.3961775e38


def encode_blocks(
    values: Tensor, block_type: BlockType, *, weights: Tensor | None = None
) -> Tensor:
    """Encode many blocks at once; working memory is some tens of times the input.

    Args:
        values: f32 [n, block_elements].
        block_type: storage type, one of `ENCODABLE_TYPES`.
        weights: above 0, same shape: how much the square of each error counts. The types without a
            choice (floats, Q8_0) ignore them.

    Returns:
        uint8 [n, block_bytes].

    Raises:
        ShapeError: if values or weights are not float32 of that shape.
        NumericError: a value is NaN, infinite or too large for the type.
        UnsupportedModelError: if the type has no encoder.
    """
    _check_type(block_type)
    expected = [len(values), block_type.block_elements] if values.dim() else []
    for name, given in (("values", values), ("weights", weights)):
        if given is not None and (given.dtype != torch.float32 or list(given.shape) != expected):
            raise ShapeError(
                f"{name} for {block_type.name} blocks must be float32"
                f" [n, {block_type.block_elements}], found {given.dtype} {list(given.shape)}"
            )
    if len(values) == 0:
        return torch.empty(0, block_type.block_bytes, dtype=torch.uint8, device=values.device)
    _check_range(values, block_type)
    if block_type.name in _PLAIN:
        return _PLAIN[block_type.name](values)
    if block_type.name == "MXFP4":
        return small_blocks.mxfp4(values, weights)
    if weights is None:
        weights = torch.ones((), dtype=torch.float32, device=values.device).expand(values.shape)
    return _SEARCHED[block_type.name](values, weights)


def quantize(values: Tensor, block_type: BlockType, *, importance: Tensor | None = None) -> Tensor:
    """Encode a matrix row by row.

    Args:
        values: any float type, [rows, columns]; columns a multiple of the type's block.
        block_type: storage type, one of `ENCODABLE_TYPES`.
        importance: f32 [columns], >= 0: mean square of the input that meets each column
            (an "importance matrix"); None counts all columns alike. Only ratios matter.

    Returns:
        uint8 [rows, row_bytes].

    Raises:
        ShapeError: if a shape does not fit.
        NumericError: a value is NaN, infinite or too large for the type, or an importance is NaN,
            infinite or negative.
        UnsupportedModelError: if the type has no encoder.
    """
    _check_type(block_type)
    if values.dim() != 2 or not values.is_floating_point():
        raise ShapeError(
            f"a matrix must be float [rows, columns], found {values.dtype} {list(values.shape)}"
        )
    rows, columns = values.shape
    width = block_type.block_elements
    if columns % width:
        raise ShapeError(
            f"a {block_type.name} matrix needs a multiple of {width} columns, found {columns}"
        )
    weights = None if importance is None else _column_weights(importance, columns)
    result = torch.empty(
        rows, block_type.row_bytes(columns), dtype=torch.uint8, device=values.device
    )
    height = max(1, _TILE_ELEMENTS // max(1, columns))
    for first in range(0, rows, height):
        tile = values[first : first + height].float()
        blocks = tile.reshape(-1, width)
        spread = None if weights is None else weights.expand(tile.shape).reshape(-1, width)
        encoded = encode_blocks(blocks, block_type, weights=spread)
        result[first : first + height] = encoded.view(len(tile), -1)
    return result


def _check_type(block_type: BlockType) -> None:
    if block_type.name not in ENCODABLE_TYPES:
        raise UnsupportedModelError(
            f"weights cannot be written as {block_type.name};"
            f" possible are {', '.join(sorted(ENCODABLE_TYPES))}"
        )


def _check_range(values: Tensor, block_type: BlockType) -> None:
    """Refuse what would be stored as infinity, or cut off without a word."""
    limit = {"F32": float("inf"), "MXFP4": float("inf"), "BF16": _BF16_MAX}.get(
        block_type.name, HALF_MAX
    )
    largest = float(values.abs().amax())  # NaN if any value is
    if not largest < float("inf"):
        raise NumericError(f"values to be stored as {block_type.name} must be finite")
    if largest > limit:
        raise NumericError(
            f"values to be stored as {block_type.name} must be at most {limit:g}, found {largest:g}"
        )


def _column_weights(importance: Tensor, columns: int) -> Tensor:
    """Weights [columns] above 0 with mean about 1."""
    if importance.shape != (columns,) or not importance.is_floating_point():
        raise ShapeError(
            f"importance must be float [{columns}], found {importance.dtype}"
            f" {list(importance.shape)}"
        )
    importance = importance.float()
    if not bool(((importance >= 0) & importance.isfinite()).all()):
        raise NumericError("importance must be finite numbers >= 0")
    largest = importance.amax() if columns else importance.sum()
    if largest == 0:
        return torch.ones_like(importance)
    relative = importance / largest
    return (relative / relative.mean()).clamp_(min=_LEAST_IMPORTANCE)

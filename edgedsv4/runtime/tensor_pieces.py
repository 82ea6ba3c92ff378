"""The bytes of one weight in another storage type, made a few rows at a time.

What has the wanted type already is passed on from the mapped file; packed FP4 becomes MXFP4 by
moving nibbles, without a rounding; everything else is decoded to float32 and encoded again.

Source: OCP Microscaling specification; the block struct of MXFP4 in ggml.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.errors import FormatError, NumericError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quant_matmul import (
    QuantMatrix,
    dequantize,
    matrix_from_numpy,
)
from edgedsv4.kernels.quantize import quantize

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType
    from edgedsv4.model.bound_weights import BoundTensor

Bytes = npt.NDArray[np.uint8]

_TILE_ELEMENTS: Final = 1 << 20
_COPY_BYTES: Final = 1 << 24
_NAN_SCALE: Final = 0xFF
_I32: Final = BLOCK_TYPES["I32"]


def weight_pieces(
    weight: BoundTensor, block_type: BlockType, importance: Tensor | None = None
) -> Iterator[Bytes]:
    """The stored bytes of a matrix or vector, as contiguous pieces of whole rows.

    Args:
        weight: the weight; its columns are a multiple of the type's block.
        block_type: storage type to make.
        importance: f32 [columns], how much each column counts; see `quantize`.

    Raises:
        FormatError: the weight holds NaN, an infinity, or a value the type has no room for; or the
            file changed since it was opened.
    """
    yield from _joined([weight], block_type, importance)


def joined_pieces(weights: Sequence[BoundTensor], block_type: BlockType) -> Iterator[Bytes]:
    """As `weight_pieces`, of matrices with as many rows each, side by side."""
    yield from _joined(weights, block_type, None)


def table_pieces(table: BoundTensor) -> Iterator[Bytes]:
    """An expert table as int32; its ids have been checked."""
    kind = "<i8" if table.block_type.name == "I64" else "<i4"
    ids = np.ascontiguousarray(table.data()).reshape(-1).view(kind)
    yield np.ascontiguousarray(ids, dtype="<i4").view(np.uint8)


def _joined(
    weights: Sequence[BoundTensor], block_type: BlockType, importance: Tensor | None
) -> Iterator[Bytes]:
    encoders = [_row_encoder(weight, block_type, importance) for weight in weights]
    rows = weights[0].rows
    is_copied = all(weight.block_type == block_type for weight in weights)
    per_row = sum(
        block_type.row_bytes(weight.columns) if is_copied else weight.columns for weight in weights
    )
    height = max(1, (_COPY_BYTES if is_copied else _TILE_ELEMENTS) // per_row)
    for first in range(0, rows, height):
        last = min(first + height, rows)
        parts = [encode(first, last) for encode in encoders]
        joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        yield np.ascontiguousarray(joined)


def _row_encoder(
    weight: BoundTensor, block_type: BlockType, importance: Tensor | None
) -> Callable[[int, int], Bytes]:
    """(first, last) -> stored bytes [last - first, row bytes]."""
    data = weight.data()
    if weight.block_type == block_type and weight.scale is None:
        return lambda first, last: data[first:last]
    matrix = _matrix(weight)
    if weight.block_type.name == "FP4_E2M1" and block_type.name == "MXFP4":
        return lambda first, last: _repacked(weight, matrix, first, last)

    def encode(first: int, last: int) -> Bytes:
        values = dequantize(matrix, rows=slice(first, last))
        try:
            encoded = quantize(values, block_type, importance=importance)
        except NumericError as error:
            raise FormatError(
                f"tensor {weight.record.name}, rows {first}..{last - 1}: {error}",
                path=weight.record.file.path,
            ) from error
        found: Bytes = encoded.numpy()
        return found

    return encode


def _matrix(weight: BoundTensor) -> QuantMatrix:
    scale = None if weight.scale is None else weight.scale.data()
    return matrix_from_numpy(
        weight.data(),
        weight.block_type,
        weight.rows,
        weight.columns,
        scale,
        weight.tensor_scale_value(),
    )


def _repacked(weight: BoundTensor, matrix: QuantMatrix, first: int, last: int) -> Bytes:
    """FP4 rows as MXFP4: of 32 codes, byte j takes elements j and j + 16 instead of 2j and 2j+1."""
    scale = matrix.scale
    if scale is None:
        raise FormatError(f"tensor {weight.record.name} has no scales")
    exponents = scale[first:last]  # [n, columns / 32]
    if bool((exponents == _NAN_SCALE).any()):
        row, group = (int(i) for i in (exponents == _NAN_SCALE).nonzero()[0])
        raise FormatError(
            f"the scale of tensor {weight.record.name}, row {first + row}, group {group} is NaN"
            " (0xFF); the file is damaged, fetch it again",
            path=weight.record.file.path,
        )
    packed = matrix.data[first:last].reshape(last - first, -1, 16)
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(2)  # [n, groups, 32]
    bytes_ = codes[..., :16] | (codes[..., 16:] << 4)
    blocks = torch.cat((exponents.unsqueeze(-1), bytes_), dim=-1)
    found: Bytes = blocks.flatten(1).numpy()
    return found


def raw_pieces(data: Bytes) -> Iterator[Bytes]:
    """Bytes of a file as they are."""
    yield np.ascontiguousarray(data).reshape(-1)

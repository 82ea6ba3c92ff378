"""Rows of a stored matrix as floats: the embedding of tokens, and whole blocks of rows.

streams[t, s, :] = W[token_ids[t], :] for every stream s;    out[r, :] = W[row0 + r, :]
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import to_bf16
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.gpu.planes import DeviceMatrix, plane_arguments

# Rows and columns per program: 32 elements per thread, what one wide load of 4-bit codes holds.
_ROWS, _COLUMNS, _WARPS = 16, 256, 4
# Of the embedding, one row per program.
_ROW_COLUMNS, _ROW_WARPS = 1024, 1


def embed_streams(streams: Tensor, token_ids: Tensor, embed: DeviceMatrix) -> None:
    """Write the embedding rows of some tokens into all of their residual streams.

    Args:
        streams: f32 [T, hc, D], contiguous, set by the launch. A token id outside of the matrix
            gives NaN.
        token_ids: int64 [T] on the device.
        embed: [V, D].

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    tokens, copies, width = streams.shape
    is_kind = streams.dtype == torch.float32 and token_ids.dtype == torch.int64
    if not (is_kind and streams.is_contiguous() and token_ids.shape == (tokens,)):
        raise ShapeError(f"embed_streams: streams {streams.shape}, token ids {token_ids.shape}")
    if width != embed.cols:
        raise ShapeError(f"streams of {width} cannot take an embedding of {embed.cols}")
    if tokens == 0:
        return
    columns = max(min(_ROW_COLUMNS, power_of_two(width)), _least_columns(embed))
    launch(
        _embed_kernel,
        (tokens, cdiv(width, columns)),
        streams,
        token_ids,
        *plane_arguments(embed),
        embed.rows,
        width,
        COPIES=copies,
        TYPE=embed.type,
        BK=columns,
        SCALE_COLS=embed.scale_cols,
        num_warps=_ROW_WARPS,
    )


def dequantize(out: Tensor, matrix: DeviceMatrix, row0: int, rows: int) -> None:
    """Write rows row0 .. row0 + rows - 1 of a matrix as floats.

    Args:
        out: bf16 (nearest even) or f32 [rows, K], contiguous, set by the launch.
        matrix: of K columns.
        row0: first row.
        rows: number of rows.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    is_kind = out.dtype in (torch.float32, torch.bfloat16) and out.is_contiguous()
    is_inside = row0 >= 0 and row0 + rows <= matrix.rows
    if not (is_kind and is_inside and out.shape == (rows, matrix.cols)):
        raise ShapeError(
            f"rows {row0} to {row0 + rows} of [{matrix.rows}, {matrix.cols}] cannot be written to"
            f" {out.dtype} {list(out.shape)}"
        )
    if rows == 0 or matrix.cols == 0:
        return
    launch(
        _dequantize_kernel,
        (cdiv(rows, _ROWS), cdiv(matrix.cols, _COLUMNS)),
        out,
        *plane_arguments(matrix),
        row0,
        rows,
        matrix.cols,
        TYPE=matrix.type,
        BN=_ROWS,
        BK=_COLUMNS,
        SCALE_COLS=matrix.scale_cols,
        num_warps=_WARPS,
    )


def _least_columns(matrix: DeviceMatrix) -> int:
    """Smallest tile width of `decode_tile`."""
    return 256 if BLOCK_TYPES[matrix.type].block_elements == 256 else 64


@triton.jit
def _embed_kernel(
    streams_ptr,
    token_ids_ptr,
    p0,
    p1,
    p2,
    p3,
    N,
    D,
    COPIES: tl.constexpr,
    TYPE: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """Program (t, column block): one row, written to every stream."""
    i_token = tl.program_id(0).to(tl.int64)
    k0 = tl.program_id(1) * BK
    row = tl.load(token_ids_ptr + i_token + tl.arange(0, 1))  # [1]
    m_row = (row >= 0) & (row < N)
    w = decode_tile(p0, p1, p2, p3, row, m_row, k0, D, TYPE, BK, SCALE_COLS)  # [1, BK]
    w = tl.where(m_row[:, None], w, float("nan"))
    o_column = k0 + tl.arange(0, BK)[None, :]
    for i_stream in tl.static_range(COPIES):
        address = streams_ptr + (i_token * COPIES + i_stream) * D + o_column
        tl.store(address, w, mask=o_column < D)


@triton.jit
def _dequantize_kernel(
    out_ptr,
    p0,
    p1,
    p2,
    p3,
    row0,
    rows,
    K,
    TYPE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """Program (row block, column block) of out."""
    o_row = tl.program_id(0).to(tl.int64) * BN + tl.arange(0, BN)
    k0 = tl.program_id(1) * BK
    m_row = o_row < rows
    w = decode_tile(p0, p1, p2, p3, row0 + o_row, m_row, k0, K, TYPE, BK, SCALE_COLS)
    if out_ptr.dtype.element_ty == tl.bfloat16:
        w = to_bf16(w)
    o_column = k0 + tl.arange(0, BK)
    mask = m_row[:, None] & (o_column < K)[None, :]
    tl.store(out_ptr + o_row[:, None] * K + o_column[None, :], w, mask=mask)

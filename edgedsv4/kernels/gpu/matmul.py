"""Products of a chunk with a stored matrix: y[t, r] = sum_c x[t, c] W[r, c].

With groups, the rows of W and the columns of x fall into as many equal parts, and part g of y is
the product of parts g (`kernels.grouped_output`). The reference is `kernels.quant_matmul`.

Up to `FUSED_TOKENS` tokens, one kernel decodes a tile of W in registers and multiplies it at once;
the columns may be split among programs, whose sums are then added in order. More tokens pay for
decoded rows in memory: a bounded piece of W at a time, multiplied by the BLAS library.

Three precisions: operands rounded to bf16; `wide`: operands as sums of two bf16 numbers, of whose
products only the smallest is dropped (relative error about 2^-17); `precise`: f32. Sums are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import dot_acc, to_bf16
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.decode_product import PRODUCT_TYPES, product_tile
from edgedsv4.kernels.gpu.fragments import in_positions, matrix_unit, weights_in_positions
from edgedsv4.kernels.gpu.launching import cdiv, launch
from edgedsv4.kernels.gpu.planes import plane_arguments

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix

FUSED_TOKENS = 128
"""Most tokens that are multiplied with weights decoded in registers, where there is a BLAS."""

# Rows per program and warps, by tokens per tile: without and with wgmma, and in f32. Products of
# two parts, and types that are not in `PRODUCT_TYPES`, need more registers.
_SHAPES = {16: (32, 4), 32: (32, 8)}
_LARGE_SHAPES = {16: (16, 8)}
_WGMMA_SHAPES = {16: (64, 4), 32: (64, 4), 64: (64, 4)}
_LARGE_WGMMA_SHAPES = {16: (64, 4)}
_GENERAL_SHAPES = {16: (32, 8), 32: (32, 8)}
_LARGE_GENERAL_SHAPES = {16: (32, 8)}
_PRECISE_SHAPES = {16: (16, 8)}
# Programs that a product is split into: two for each processor of a large GPU.
_LARGEST_ROWS = 64
_PROGRAMS = 256
_LEAST_COLUMNS = 512
# Decoded weights at a time: they stay in the cache of a large GPU until they are multiplied. A
# short chunk is done with them so soon that fewer launches count for more.
_CHUNK_BYTES, _SHORT_CHUNK_BYTES = 32 << 20, 128 << 20
_SHORT_CHUNK = 1024
_DECODE_ROWS = 16
_CONVERT_BLOCK = 1024
_ADD_BLOCK = 256


def matmul(
    y: Tensor,
    x: Tensor,
    matrix: DeviceMatrix,
    *,
    groups: int = 1,
    precise: bool = False,
    wide: bool = False,
    scratch: Tensor | None = None,
) -> None:
    """Multiply a chunk.

    Args:
        y: out, [T, N], f32 or bf16; rows may lie apart.
        x: [T, groups * K], f32 or bf16; rows may lie apart.
        matrix: [N, K].
        groups: parts of `x` and of the rows of `matrix`.
        precise: operands f32.
        wide: operands of twice the bits of bf16.
        scratch: uint8 [n], aligned to 16 bytes, n at least `matmul_scratch_bytes`; None for none.

    Raises:
        ShapeError: if the shapes do not fit, or `scratch` is too small.
    """
    tokens, rows = y.shape
    fits = rows == matrix.rows and x.shape == (tokens, groups * matrix.cols) and rows % groups == 0
    if not fits or (tokens and (y.stride(1) != 1 or x.stride(1) != 1)):
        raise ShapeError(
            f"matmul: x {list(x.shape)}, y {list(y.shape)}, matrix [{matrix.rows}, {matrix.cols}],"
            f" {groups} groups"
        )
    if tokens == 0:
        return
    product = _Product(y, x, matrix, groups, precise, wide)
    if _is_fused(tokens, x.device):
        _fused(product, scratch)
    else:
        _decoded(product, scratch)


def matmul_scratch_bytes(
    tokens: int,
    matrix: DeviceMatrix,
    device: torch.device,
    *,
    groups: int = 1,
    precise: bool = False,
    wide: bool = False,
) -> int:
    """Working memory of a product.

    Args:
        tokens: T.
        matrix: as for `matmul`; only its type and sizes matter.
        device: where the products run.
        groups: as for `matmul`.
        precise: as for `matmul`.
        wide: as for `matmul`.
    """
    fused_tokens = tokens if _is_fused(tokens, device) else FUSED_TOKENS
    splits = _splits(matrix, groups)
    fused = 4 * splits * fused_tokens * matrix.rows if splits > 1 else 0
    if fused_tokens == tokens:
        return fused
    item = _item_bytes(matrix, precise, wide)
    return max(
        fused, item * matrix.cols * (tokens * groups + _rows_at_once(matrix, groups, tokens, item))
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Product:
    """The arguments of `matmul`."""

    y: Tensor
    x: Tensor
    matrix: DeviceMatrix
    groups: int
    precise: bool
    wide: bool


def _is_fused(tokens: int, device: torch.device) -> bool:
    # ROCm's BLAS has no products of bf16 with f32 results.
    has_blas = device.type != "cuda" or torch.version.hip is None
    return tokens <= FUSED_TOKENS or not has_blas


def _shapes(type_name: str, precise: bool, wide: bool) -> dict[int, tuple[int, int]]:
    """Rows per program and warps, by tokens per tile."""
    if precise:
        return _PRECISE_SHAPES
    if type_name not in PRODUCT_TYPES:
        is_large = wide or matrix_unit() in ("mfma", "wmma")
        return _LARGE_GENERAL_SHAPES if is_large else _GENERAL_SHAPES
    if matrix_unit() == "wgmma":
        return _LARGE_WGMMA_SHAPES if wide else _WGMMA_SHAPES
    return _LARGE_SHAPES if wide else _SHAPES


def _splits(matrix: DeviceMatrix, groups: int) -> int:
    """Parts of the columns, so that there are programs for the whole GPU."""
    tiles = -(-(matrix.rows // groups) // _LARGEST_ROWS) * groups
    return max(1, min(_PROGRAMS // max(1, tiles), matrix.cols // _LEAST_COLUMNS))


def _fused(product: _Product, scratch: Tensor | None) -> None:
    """One launch, or two where the columns are split."""
    y, x, matrix, groups = product.y, product.x, product.matrix, product.groups
    tokens, rows = y.shape
    shapes = _shapes(matrix.type, product.precise, product.wide)
    block = next((width for width in shapes if width >= tokens), max(shapes))
    splits = _splits(matrix, groups)
    columns = column_block(matrix.type)
    span = cdiv(cdiv(matrix.cols, splits), columns) * columns
    target, strides = y, (0, y.stride(0))
    if splits > 1:
        count = splits * tokens * rows
        target = _piece(scratch, 0, count, torch.float32)
        strides = (tokens * rows, rows)
    height, warps = shapes[block]
    grid = (cdiv(rows // groups, height) * groups, cdiv(tokens, block), splits)
    launch(
        _fused_kernel,
        grid,
        target,
        x,
        *plane_arguments(matrix),
        tokens,
        rows // groups,
        span,
        *strides,
        x.stride(0),
        K=matrix.cols,
        TYPE=matrix.type,
        SCALE=matrix.scale_cols,
        PRECISE=product.precise,
        WIDE=product.wide,
        BR=height,
        BK=columns,
        BT=block,
        num_warps=warps,
        num_stages=2,
    )
    if splits > 1:
        launch(
            _add_kernel,
            (tokens, cdiv(rows, _ADD_BLOCK)),
            y,
            target,
            tokens,
            rows,
            y.stride(0),
            SPLITS=splits,
            BLOCK=_ADD_BLOCK,
        )


def _piece(scratch: Tensor | None, start: int, count: int, dtype: torch.dtype) -> Tensor:
    """`count` numbers from byte `start` of the scratch memory."""
    found = 0 if scratch is None else scratch.numel()
    stop = start + count * dtype.itemsize
    if scratch is None or found < stop:
        raise ShapeError(f"matmul: scratch of {stop:,} bytes is needed, found {found:,}")
    return scratch[start:stop].view(dtype)


def column_block(type_name: str) -> int:
    """Columns that are decoded at a time."""
    return 128 if type_name in PRODUCT_TYPES else 256


def _decoded_columns(type_name: str) -> int:
    """Columns that `decode_tile` decodes at a time: whole blocks."""
    return max(128, BLOCK_TYPES[type_name].block_elements)


def _parts(matrix: DeviceMatrix, precise: bool, wide: bool) -> int:
    """bf16 numbers per operand: with bf16 weights only x is a sum of two."""
    if precise or not wide:
        return 1
    return 2 if matrix.type == "BF16" else 3


def _item_bytes(matrix: DeviceMatrix, precise: bool, wide: bool) -> int:
    return 4 if precise else 2 * _parts(matrix, precise, wide)


def _rows_at_once(matrix: DeviceMatrix, groups: int, tokens: int, item: int) -> int:
    """Rows that are decoded at a time: whole groups where there are some."""
    limit = _SHORT_CHUNK_BYTES if tokens <= _SHORT_CHUNK else _CHUNK_BYTES
    rows = max(1, limit // (item * max(1, matrix.cols)))
    if groups > 1:
        height = matrix.rows // groups
        return min(groups, max(1, rows // max(1, height))) * height
    return min(matrix.rows, rows)


def _decoded(product: _Product, scratch: Tensor | None) -> None:
    """Decode pieces of the weights into scratch memory, and multiply each by the library."""
    y, matrix, groups = product.y, product.matrix, product.groups
    parts = _parts(matrix, product.precise, product.wide)
    x, used = _operand(product, parts, scratch)  # [T, groups, parts * K]
    height = matrix.rows // groups
    item = _item_bytes(matrix, product.precise, product.wide)
    at_once = _rows_at_once(matrix, groups, len(y), item)
    for first in range(0, matrix.rows, at_once):
        last = min(first + at_once, matrix.rows)
        weights = _decoded_rows(matrix, slice(first, last), x.dtype, parts, (scratch, used))
        target = y[:, first:last]
        if groups == 1:
            _multiply(target, x[:, 0], weights.T)
            continue
        some = slice(first // height, last // height)
        weights = weights.view(-1, height, weights.shape[1])
        target = target.unflatten(1, (-1, height)).transpose(0, 1)
        _multiply(target, x[:, some].transpose(0, 1), weights.transpose(1, 2))


def _operand(product: _Product, parts: int, scratch: Tensor | None) -> tuple[Tensor, int]:
    """Activations as multiplied, [T, groups, parts * K], and the bytes of scratch they take."""
    x, groups, columns = product.x, product.groups, product.matrix.cols
    dtype = torch.float32 if product.precise else torch.bfloat16
    if parts == 1 and x.dtype == dtype:
        return x.unflatten(1, (groups, columns)), 0
    tokens = len(x)
    made = _piece(scratch, 0, tokens * groups * parts * columns, dtype)
    grid = (tokens * groups, cdiv(columns, _CONVERT_BLOCK))
    launch(
        _convert_kernel,
        grid,
        made,
        x,
        groups,
        columns,
        x.stride(0),
        PARTS=parts,
        BLOCK=_CONVERT_BLOCK,
        num_warps=4,
    )
    return made.view(tokens, groups, parts * columns), made.nbytes


def _decoded_rows(
    matrix: DeviceMatrix,
    part: slice,
    dtype: torch.dtype,
    parts: int,
    memory: tuple[Tensor | None, int],
) -> Tensor:
    """Some rows as they are multiplied, [n, parts * K]; stored ones where they fit.

    `memory` is the scratch and how many of its bytes are in use.
    """
    stored = matrix.planes[0]
    if parts == 1 and stored.dtype == dtype:
        return stored[part]
    first, rows, columns = part.start, part.stop - part.start, matrix.cols
    scratch, used = memory
    made = _piece(scratch, used, rows * parts * columns, dtype)
    block = _decoded_columns(matrix.type)
    grid = (cdiv(rows, _DECODE_ROWS), cdiv(columns, block))
    launch(
        _decode_kernel,
        grid,
        made,
        *plane_arguments(matrix),
        first,
        rows,
        columns,
        TYPE=matrix.type,
        SCALE=matrix.scale_cols,
        PARTS=parts,
        BR=_DECODE_ROWS,
        BK=block,
        num_warps=4,
    )
    return made.view(rows, parts * columns)


def _multiply(y: Tensor, a: Tensor, b: Tensor) -> None:
    """Product y = a b by the library, in the precision of the operands, or f32 of bf16 ones."""
    product = torch.mm if a.dim() == 2 else torch.bmm
    if a.is_cuda and y.dtype == a.dtype:
        product(a, b, out=y)
    elif a.is_cuda and y.dtype == torch.float32:
        product(a, b, out_dtype=torch.float32, out=y)
    else:
        y.copy_(product(a.float(), b.float()))


@triton.jit
def _fused_kernel(
    y_ptr,
    x_ptr,
    p0,
    p1,
    p2,
    p3,
    tokens,
    R,
    span,
    stride_y_split,
    stride_y_row,
    stride_x_row,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISE: tl.constexpr,
    WIDE: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """BR rows of one group with BT tokens, over `span` columns; R rows and K columns per group."""
    blocks = tl.cdiv(R, BR)
    group = (tl.program_id(0) // blocks).to(tl.int64)
    o_row = (tl.program_id(0) % blocks) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < R
    row = group * R + o_row
    token = (tl.program_id(1) * BT + tl.arange(0, BT)).to(tl.int64)  # [BT]
    m_token = token < tokens
    o_k = tl.arange(0, BK)
    x_ptrs = x_ptr + group * K + token[None, :] * stride_x_row + o_k[:, None]  # [BK, BT]
    first = tl.program_id(2) * span
    acc = tl.zeros([BR, BT], tl.float32)
    for k0 in range(first, tl.minimum(first + span, K), BK):
        x = tl.load(x_ptrs + k0, mask=m_token[None, :] & (k0 + o_k < K)[:, None], other=0.0)
        x = in_positions(x.to(tl.float32))
        w = product_tile(p0, p1, p2, p3, row, m_row, k0, K, TYPE, BK, SCALE)  # [BR, BK]
        w = weights_in_positions(w)
        if PRECISE:
            acc = tl.dot(w, x, acc, input_precision="ieee")
        else:
            x_high = to_bf16(x)
            w_high = to_bf16(w)
            acc = dot_acc(w_high, x_high, acc)
            if WIDE:
                acc = dot_acc(w_high, to_bf16(x - x_high.to(tl.float32)), acc)
                if TYPE != "BF16":
                    acc = dot_acc(to_bf16(w - w_high.to(tl.float32)), x_high, acc)
    o_y = tl.program_id(2).to(tl.int64) * stride_y_split + token[None, :] * stride_y_row
    y_ptrs = y_ptr + o_y + row[:, None]
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptrs, to_bf16(acc), mask=m_row[:, None] & m_token[None, :])
    else:
        tl.store(y_ptrs, acc, mask=m_row[:, None] & m_token[None, :])


@triton.jit
def _add_kernel(
    y_ptr, partial_ptr, tokens, N, stride_y_row, SPLITS: tl.constexpr, BLOCK: tl.constexpr
):
    """The sums of the parts of the columns, in their order."""
    token = tl.program_id(0).to(tl.int64)
    o_row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(
            partial_ptr + (split * tokens + token) * N + o_row, mask=o_row < N, other=0.0
        )
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + token * stride_y_row + o_row, to_bf16(total), mask=o_row < N)
    else:
        tl.store(y_ptr + token * stride_y_row + o_row, total, mask=o_row < N)


@triton.jit
def _convert_kernel(
    out_ptr, x_ptr, groups, K, stride_x_row, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """One group of a token: its number, or high, low [, high] parts one after another."""
    pid = tl.program_id(0)
    token = (pid // groups).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_k = o_k < K
    x_ptrs = x_ptr + token * stride_x_row + (pid % groups) * K + o_k
    x = tl.load(x_ptrs, mask=m_k, other=0.0).to(tl.float32)
    out_ptrs = out_ptr + pid.to(tl.int64) * PARTS * K + o_k
    if out_ptr.dtype.element_ty == tl.bfloat16:
        high = to_bf16(x)
        tl.store(out_ptrs, high, mask=m_k)
        if PARTS > 1:
            tl.store(out_ptrs + K, to_bf16(x - high.to(tl.float32)), mask=m_k)
        if PARTS > 2:
            tl.store(out_ptrs + 2 * K, high, mask=m_k)
    else:
        tl.store(out_ptrs, x, mask=m_k)


@triton.jit
def _decode_kernel(
    out_ptr,
    p0,
    p1,
    p2,
    p3,
    first,
    rows,
    K,
    TYPE: tl.constexpr,
    SCALE: tl.constexpr,
    PARTS: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
):
    """A tile of decoded rows: the number, or high, high [, low] parts one after another."""
    o_row = tl.program_id(0).to(tl.int64) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < rows
    k0 = tl.program_id(1) * BK
    o_k = k0 + tl.arange(0, BK)
    w = decode_tile(p0, p1, p2, p3, first + o_row, m_row, k0, K, TYPE, BK, SCALE)  # [BR, BK]
    mask = m_row[:, None] & (o_k < K)[None, :]
    out_ptrs = out_ptr + o_row[:, None] * PARTS * K + o_k[None, :]
    if out_ptr.dtype.element_ty == tl.bfloat16:
        high = to_bf16(w)
        tl.store(out_ptrs, high, mask=mask)
        if PARTS > 1:
            tl.store(out_ptrs + K, high, mask=mask)
        if PARTS > 2:
            tl.store(out_ptrs + 2 * K, to_bf16(w - high.to(tl.float32)), mask=mask)
    else:
        tl.store(out_ptrs, w, mask=mask)

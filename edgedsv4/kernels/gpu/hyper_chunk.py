"""Hyper-connections of a chunk: the same step as `hyper.py` with fn shared by a tile of tokens.

Three launches. The first has a program per tile of tokens and range of columns: it writes the new
streams, multiplies them with fn while they are in registers, and leaves the products of its range
(and the sum of squares) as float32 [rows + 1, ranges, T]. The second makes the weights of the mix
with a token per lane, the third reads and normalises, a program per token. The streams are read
twice and written once, which is what the time goes to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.hyper_mix import sigmoid, sinkhorn, written
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.gpu.tuples import appended, nothing

if TYPE_CHECKING:
    from edgedsv4.kernels.mhc import HyperConstants

STREAMS = 4
TILE = 16
# By vendor, (columns of one step, warps, stages, precision of the products): three TF32 products
# make float32 in all but the last place or two; AMD's compiler has none.
PRODUCTS = {"cuda": (32, 4, 3, "tf32x3"), "hip": (16, 8, 1, "ieee")}
# One token per lane: (tokens, warps).
MIX = (32, 1)
# (columns, warps) of the write without products
WRITE = (1024, 4)
# (largest width, warps) of the read
READ = ((1024, 2), (4096, 8), (8192, 16))
# Programs wanted in the first launch, if there are columns enough to share out, and the most ranges
# of columns: six programs for each of 132 processors that hold three at a time.
PROGRAMS, MAX_RANGES = 792, 32


def work_floats(tokens: int, hidden: int) -> int:
    """float32 elements of `work` that chunks of up to `tokens` tokens need."""
    del hidden
    rows = (2 + STREAMS) * STREAMS + 1
    # Of fewer tokens there are more ranges: tiles times ranges are at most PROGRAMS.
    return rows * max(tokens, PROGRAMS * TILE) + STREAMS * tokens


def chunk_read(
    y: Tensor,
    post: Tensor,
    comb: Tensor,
    streams: Tensor,
    o: Tensor | None,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    work: Tensor,
    precise: bool,
) -> None:
    """`hyper.hyper_step` or, when fn has no more than hc rows, `hyper.head_step`.

    The arguments are those, of one number of tokens, and checked there.
    """
    tokens, _, hidden = streams.shape
    pre, partials = work[: STREAMS * tokens], work[STREAMS * tokens :]
    rows = fn.shape[0]
    columns, warps, stages, precision = PRODUCTS["cuda" if torch.version.hip is None else "hip"]
    tiles, blocks = -(-tokens // TILE), -(-hidden // columns)
    share = -(-blocks // max(1, min(PROGRAMS // tiles, MAX_RANGES)))
    ranges = -(-blocks // share)
    launch(
        _product_kernel,
        (tiles, ranges),
        *(partials, streams, streams if o is None else o, post, comb, fn),
        *(tokens, hidden, share * columns),
        ROWS=rows,
        PADDED_ROWS=max(16, power_of_two(rows)),
        HC=STREAMS,
        BT=TILE,
        BN=columns,
        HAS_O=o is not None,
        PRECISION="ieee" if precise else precision,
        num_warps=warps,
        num_stages=stages,
    )
    tile, warps = MIX
    launch(
        _mix_kernel,
        (-(-tokens // tile),),
        *(pre, post, comb, partials, base, scale),
        *(tokens, hidden, ranges, constants.iterations, constants.hc_eps, constants.norm_eps),
        ROWS=rows,
        HC=STREAMS,
        BT=tile,
        num_warps=warps,
    )
    width = power_of_two(hidden)
    warps = next((warps for limit, warps in READ if width <= limit), READ[-1][1])
    launch(
        _read_kernel,
        (tokens,),
        *(y, streams, pre, norm, hidden, constants.norm_eps),
        HC=STREAMS,
        BN=width,
        num_warps=warps,
    )


def write_streams(streams: Tensor, o: Tensor, post: Tensor, comb: Tensor) -> None:
    """The write alone: streams [T, hc, D] in place, o [T, D], post [T, hc], comb [T, hc, hc]."""
    tokens, _, hidden = streams.shape
    columns, warps = WRITE
    columns = min(columns, power_of_two(hidden))
    launch(
        _write_kernel,
        (tokens, cdiv(hidden, columns)),
        *(streams, o, post, comb, hidden),
        HC=STREAMS,
        BN=columns,
        num_warps=warps,
    )


@triton.jit
def _write_kernel(
    streams_ptr, o_ptr, post_ptr, comb_ptr, hidden, HC: tl.constexpr, BN: tl.constexpr
):
    """Program (token, block): BN columns of every stream of one token."""
    token = tl.program_id(0).to(tl.int64)
    o_n = tl.program_id(1) * BN + tl.arange(0, BN)  # [BN]
    m_n = o_n < hidden
    x_ptr = streams_ptr + token * HC * hidden + o_n
    x = nothing()
    for j in tl.static_range(HC):
        x = appended(x, tl.load(x_ptr + j * hidden, mask=m_n, other=0.0))  # [BN]
    b_o = tl.load(o_ptr + token * hidden + o_n, mask=m_n, other=0.0)  # [BN]
    post = nothing()
    comb = nothing()
    for k in tl.static_range(HC):
        post = appended(post, tl.load(post_ptr + token * HC + k))
    for i in tl.static_range(HC * HC):
        comb = appended(comb, tl.load(comb_ptr + token * (HC * HC) + i))
    x = written(x, b_o, post, comb, HC)
    # Another warp may hold the same columns: all have read before one writes.
    tl.debug_barrier()
    for k in tl.static_range(HC):
        tl.store(x_ptr + k * hidden, x[k], mask=m_n)


@triton.jit
def _columns(ptr, row_t, m_t, N: tl.constexpr):
    """The N columns of some rows of a matrix [T, N], each [BT, 1].

    They come out of sums because the compiler moves a conversion to the operand layout of a dot up
    to the loads where it can: then the new streams are computed once for the store and once more,
    in every warp, for the product.
    """
    o_n = tl.arange(0, N)[None, :]  # [1, N]
    tile = tl.load(ptr + row_t[:, None] * N + o_n, mask=m_t[:, None], other=0.0)  # [BT, N]
    columns = nothing()
    for i in tl.static_range(N):
        column = tl.sum(tl.where(o_n == i, tile, 0.0), axis=1)  # [BT]
        columns = appended(columns, column[:, None])
    return columns


@triton.jit
def _product_kernel(
    partials_ptr,
    streams_ptr,
    o_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    tokens,
    hidden,
    range_columns,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HC: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    HAS_O: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (tile of tokens, range): write, products with fn and squares of its columns."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)  # [BT]
    m_t = o_t < tokens
    o_r = tl.arange(0, PADDED_ROWS)  # [PADDED_ROWS]
    row_t = o_t.to(tl.int64)
    post = nothing()
    comb = nothing()
    if HAS_O:
        post = _columns(post_ptr, row_t, m_t, HC)
        comb = _columns(comb_ptr, row_t, m_t, HC * HC)
    acc = tl.zeros([BT, PADDED_ROWS], tl.float32)
    squares = tl.zeros([BT, BN], tl.float32)
    first = tl.program_id(1) * range_columns
    for start in range(first, tl.minimum(first + range_columns, hidden), BN):
        o_n = start + tl.arange(0, BN)  # [BN]
        m_n = o_n < hidden
        m_x = m_t[:, None] & m_n[None, :]
        x_ptr = streams_ptr + row_t[:, None] * (HC * hidden) + o_n[None, :]
        x = nothing()
        for j in tl.static_range(HC):
            x = appended(x, tl.load(x_ptr + j * hidden, mask=m_x, other=0.0))  # [BT, BN]
        if HAS_O:
            b_o = tl.load(o_ptr + row_t[:, None] * hidden + o_n[None, :], mask=m_x, other=0.0)
            x = written(x, b_o, post, comb, HC)
        m_fn = m_n[:, None] & (o_r < ROWS)[None, :]
        for k in tl.static_range(HC):
            o_fn = o_r[None, :] * (HC * hidden) + k * hidden + o_n[:, None]
            fn = tl.load(fn_ptr + o_fn, mask=m_fn, other=0.0)  # [BN, PADDED_ROWS]
            acc = tl.dot(x[k], fn, acc, input_precision=PRECISION)
            squares += x[k] * x[k]
        # After the products: their operands pass through shared memory, so every thread has read
        # its part of the tile when the first one writes.
        if HAS_O:
            for k in tl.static_range(HC):
                tl.store(x_ptr + k * hidden, x[k], mask=m_x)
    stride_row = tl.num_programs(1) * tokens
    at = partials_ptr + tl.program_id(1) * tokens + o_t  # [BT]
    m_acc = m_t[:, None] & (o_r < ROWS)[None, :]
    tl.store(at[:, None] + o_r[None, :] * stride_row, acc, mask=m_acc)
    tl.store(at + ROWS * stride_row, tl.sum(squares, axis=1), mask=m_t)


@triton.jit
def _mix_kernel(
    pre_ptr,
    post_ptr,
    comb_ptr,
    partials_ptr,
    base_ptr,
    scale_ptr,
    tokens,
    hidden,
    ranges,
    iterations,
    hc_eps,
    norm_eps,
    ROWS: tl.constexpr,
    HC: tl.constexpr,
    BT: tl.constexpr,
):
    """Program: the weights of BT tokens."""
    o_t = tl.program_id(0) * BT + tl.arange(0, BT)  # [BT]
    m_t = o_t < tokens
    at = partials_ptr + o_t  # [BT]
    sums = nothing()
    for row in tl.static_range(ROWS + 1):
        sums = appended(sums, tl.load(at + row * ranges * tokens, mask=m_t, other=0.0))
    for i in range(1, ranges):
        longer = nothing()
        for row in tl.static_range(ROWS + 1):
            part = tl.load(at + (row * ranges + i) * tokens, mask=m_t, other=0.0)
            longer = appended(longer, sums[row] + part)
        sums = longer
    factor = tl.rsqrt(sums[ROWS] / (HC * hidden) + norm_eps)
    scale_pre = tl.load(scale_ptr)
    for j in tl.static_range(HC):
        pre = sigmoid(sums[j] * factor * scale_pre + tl.load(base_ptr + j)) + hc_eps
        tl.store(pre_ptr + o_t * HC + j, pre, mask=m_t)
    if ROWS > HC:
        scale_post, scale_comb = tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
        for j in tl.static_range(HC):
            z = sums[HC + j] * factor * scale_post + tl.load(base_ptr + HC + j)
            tl.store(post_ptr + o_t * HC + j, 2.0 * sigmoid(z), mask=m_t)
        c = nothing()
        for i in tl.static_range(HC * HC):
            base = tl.load(base_ptr + 2 * HC + i)
            c = appended(c, sums[2 * HC + i] * factor * scale_comb + base)
        c = sinkhorn(c, iterations, hc_eps, HC)
        for i in tl.static_range(HC * HC):
            tl.store(comb_ptr + o_t * (HC * HC) + i, c[i], mask=m_t)


@triton.jit
def _read_kernel(
    y_ptr, streams_ptr, pre_ptr, norm_ptr, hidden, norm_eps, HC: tl.constexpr, BN: tl.constexpr
):
    """Program: sum_j pre_j X_j of one token, normalised."""
    token = tl.program_id(0).to(tl.int64)
    o_n = tl.arange(0, BN)  # [BN]
    m_n = o_n < hidden
    x_ptr = streams_ptr + token * HC * hidden + o_n
    y = tl.load(pre_ptr + token * HC) * tl.load(x_ptr, mask=m_n, other=0.0)
    for j in tl.static_range(1, HC):
        weight = tl.load(pre_ptr + token * HC + j)
        y += weight * tl.load(x_ptr + j * hidden, mask=m_n, other=0.0)
    factor = tl.rsqrt(tl.sum(y * y, axis=0) / hidden + norm_eps)
    norm = tl.load(norm_ptr + o_n, mask=m_n, other=0.0)
    tl.store(y_ptr + token * hidden + o_n, norm * (y * factor), mask=m_n)

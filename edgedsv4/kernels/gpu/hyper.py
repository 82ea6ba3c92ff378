"""Hyper-connections of few tokens: write a sublayer's output, then mix, read and normalise.

The formulas are those of `kernels/mhc.py`. A step is two launches. The first has a program per
block of columns: it writes X'_k = post_k o + sum_j comb_jk X_j into the streams and leaves partial
sums of two kinds, over its columns: those of fn . X' and of the Gram matrix X'_j . X'_k. The second
adds the partial sums in order of the blocks, which gives every program all there is to know: the
weights of the mix, and the mean square of y = sum_j pre_j X'_j, which is pre^T Gram pre / D. So
each writes its columns of the normalised y without having seen the others. Where the streams nearly
cancel in y that form would lose digits, and the squares of y are added up instead.

Partial sums are float32 [rows, T, blocks]: the rows of fn, then the Gram matrix's (j, k), j <= k.
Longer chunks are in `hyper_chunk.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu import hyper_chunk
from edgedsv4.kernels.gpu.hyper_mix import sigmoid, sinkhorn, written
from edgedsv4.kernels.gpu.tuples import appended, nothing

if TYPE_CHECKING:
    from edgedsv4.kernels.mhc import HyperConstants

STREAMS = 4
"""hc; sums over the streams are unrolled, and no released model has another number."""
FEW_TOKENS = 8
"""More go to the kernels that share fn between tokens."""
GRAM_ROWS = STREAMS * (STREAMS + 1) // 2

# (columns of a program, warps): 128 bytes of each row of fn, 128 programs for 4096 columns.
WRITE = (32, 4)
# One warp adds the partial sums without a barrier.
READ = (128, 1)
# Below this share of the sum of its terms' sizes the Gram form of the mean square is not trusted.
TRUSTED_SHARE = tl.constexpr(1.0 / 64)


def hyper_work_floats(tokens: int, hidden: int) -> int:
    """float32 elements of `work` that steps of up to `tokens` tokens need."""
    few = min(tokens, FEW_TOKENS)
    rows = (2 + STREAMS) * STREAMS + GRAM_ROWS
    need = rows * few * _cdiv(hidden, WRITE[0])
    return need if tokens <= FEW_TOKENS else max(need, hyper_chunk.work_floats(tokens, hidden))


def hyper_step(
    x: Tensor,
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
    precise: bool = False,
    extra: Tensor | None = None,
) -> None:
    """Write the previous sublayer's output to the streams and read the next one's input.

    Args:
        x: [T, D] float32 out, the normalised read.
        post: [T, hc] float32; in: of the sublayer that made `o`, out: of the next one.
        comb: [T, hc, hc] float32, source stream first; in and out as `post`.
        streams: [T, hc, D] float32, in place.
        o: [T, D] float32, what the previous sublayer computed; None when there was none, and then
            `post` and `comb` are only written.
        fn: [(2 + hc) * hc, hc * D] float32, rows pre, post, comb.
        base: [(2 + hc) * hc] float32.
        scale: [3] float32.
        norm: [D] float32, weight of the RMS norm.
        constants: Sinkhorn iterations and epsilons.
        work: float32, at least `hyper_work_floats(T, D)`; contents are of no account.
        precise: products with fn in plain float32, for chunks of many tokens.
        extra: [T, D] float32 to be added to `o`, for few tokens alone.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, hidden = _check(streams, o, (post, comb), (fn, base, scale, norm), work)
    rows = (2 + STREAMS) * STREAMS
    if x.shape != (tokens, hidden) or fn.shape[0] != rows or scale.shape != (3,):
        raise ShapeError(f"hyper: x, fn, scale are {[tuple(t.shape) for t in (x, fn, scale)]}")
    _check_extra(o, extra, tokens)
    if tokens > FEW_TOKENS:
        hyper_chunk.chunk_read(
            x,
            post,
            comb,
            streams,
            o,
            fn=fn,
            base=base,
            scale=scale,
            norm=norm,
            constants=constants,
            work=work,
            precise=precise,
        )
        return
    blocks = _write(streams, (o, extra), post, comb, fn, work)
    columns, warps = READ
    parts = _cdiv(hidden, columns)
    _read_kernel[(parts + 1, tokens)](
        *(x, post, comb, streams, work, base, scale, norm),
        *(
            hidden,
            blocks,
            tokens * blocks,
            constants.iterations,
            constants.hc_eps,
            constants.norm_eps,
        ),
        ROWS=rows,
        HC=STREAMS,
        BN=columns,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=warps,
    )


def head_step(
    y: Tensor,
    streams: Tensor,
    o: Tensor | None,
    post: Tensor,
    comb: Tensor,
    *,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    work: Tensor,
    precise: bool = False,
    extra: Tensor | None = None,
) -> None:
    """Write the last sublayer's output to the streams and read what the output head sees.

    Args:
        y: [R, D] float32 out, the normalised read of the last R tokens; R may be 0.
        streams: [T, hc, D] float32, in place.
        o: [T, D] float32, what the last sublayer computed; None when it is written already.
        post: [T, hc] float32, of that sublayer.
        comb: [T, hc, hc] float32, of that sublayer.
        fn: [hc, hc * D] float32.
        base: [hc] float32.
        scale: [1] float32.
        norm: [D] float32, weight of the RMS norm.
        constants: epsilons.
        work: as for `hyper_step`.
        precise: as for `hyper_step`.
        extra: as for `hyper_step`.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, hidden = _check(streams, o, (post, comb), (fn, base, scale, norm), work)
    wanted = y.shape[0]
    if y.shape[1:] != (hidden,) or wanted > tokens or fn.shape[0] != STREAMS:
        raise ShapeError(f"hyper: y is {tuple(y.shape)}, fn {tuple(fn.shape)}")
    _check_extra(o, extra, tokens if wanted == tokens else FEW_TOKENS + 1)
    if o is not None and wanted < tokens:
        hyper_chunk.write_streams(streams, o, post, comb)
        o = None
    if wanted == 0:
        return
    streams = streams[tokens - wanted :]
    if wanted > FEW_TOKENS:
        hyper_chunk.chunk_read(
            y,
            post,
            comb,
            streams,
            o,
            fn=fn,
            base=base,
            scale=scale,
            norm=norm,
            constants=constants,
            work=work,
            precise=precise,
        )
        return
    blocks = _write(streams, (o, extra), post, comb, fn, work)
    columns, warps = READ
    _read_kernel[(_cdiv(hidden, columns), wanted)](
        *(y, post, comb, streams, work, base, scale, norm),
        *(hidden, blocks, wanted * blocks),
        *(constants.iterations, constants.hc_eps, constants.norm_eps),
        ROWS=STREAMS,
        HC=STREAMS,
        BN=columns,
        BLOCKS=triton.next_power_of_2(blocks),
        num_warps=warps,
    )


def _write(
    streams: Tensor,
    written: tuple[Tensor | None, Tensor | None],
    post: Tensor,
    comb: Tensor,
    fn: Tensor,
    work: Tensor,
) -> int:
    """The first launch; returns the number of blocks whose partial sums are in `work`."""
    tokens, _, hidden = streams.shape
    o, extra = written
    columns, warps = WRITE
    blocks = _cdiv(hidden, columns)
    _write_kernel[(blocks, tokens)](
        *(work, streams, streams if o is None else o, streams if extra is None else extra),
        *(post, comb, fn),
        *(hidden, blocks, tokens * blocks),
        ROWS=fn.shape[0],
        PADDED_ROWS=triton.next_power_of_2(fn.shape[0]),
        HC=STREAMS,
        BN=columns,
        HAS_O=o is not None,
        HAS_EXTRA=extra is not None,
        num_warps=warps,
    )
    return blocks


def _check_extra(o: Tensor | None, extra: Tensor | None, tokens: int) -> None:
    if extra is None:
        return
    if o is None or tokens > FEW_TOKENS or extra.shape != o.shape or not extra.is_contiguous():
        raise ShapeError(
            f"hyper: an addition to the output of {tokens} tokens is {tuple(extra.shape)}, expected"
            f" that of at most {FEW_TOKENS} tokens, contiguous and like the output"
        )


def _check(
    streams: Tensor,
    o: Tensor | None,
    coefficients: tuple[Tensor, Tensor],
    parameters: tuple[Tensor, Tensor, Tensor, Tensor],
    work: Tensor,
) -> tuple[int, int]:
    """T and D."""
    tokens, hc, hidden = streams.shape
    fn, base, _, norm = parameters
    if hc != STREAMS:
        raise ShapeError(f"hyper: {hc} streams, expected {STREAMS}")
    found = [tuple(t.shape) for t in (*coefficients, norm, base)]
    expected = [(tokens, hc), (tokens, hc, hc), (hidden,), fn.shape[:1]]
    if found != expected or fn.shape[1] != hc * hidden:
        raise ShapeError(f"hyper: post, comb, norm, base are {found}, expected {expected}")
    if o is not None and o.shape != (tokens, hidden):
        raise ShapeError(f"hyper: the output is {tuple(o.shape)}, expected {(tokens, hidden)}")
    tensors = (streams, *coefficients, *parameters, work, *(() if o is None else (o,)))
    if not all(tensor.is_contiguous() for tensor in tensors):
        raise ShapeError("hyper: tensors must be contiguous")
    if work.numel() < hyper_work_floats(tokens, hidden):
        raise ShapeError(
            f"hyper: work has {work.numel()} elements, {hyper_work_floats(tokens, hidden)} needed"
        )
    return tokens, hidden


def _cdiv(a: int, b: int) -> int:
    return -(-a // b)


@triton.jit
def _write_kernel(
    partials_ptr,
    streams_ptr,
    o_ptr,
    extra_ptr,
    post_ptr,
    comb_ptr,
    fn_ptr,
    hidden,
    blocks,
    stride_row,
    ROWS: tl.constexpr,
    PADDED_ROWS: tl.constexpr,
    HC: tl.constexpr,
    BN: tl.constexpr,
    HAS_O: tl.constexpr,
    HAS_EXTRA: tl.constexpr,
):
    """Program (block, token): BN columns of every stream."""
    i_block = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    o_n = i_block * BN + tl.arange(0, BN)  # [BN]
    m_n = o_n < hidden
    o_r = tl.arange(0, PADDED_ROWS)  # [PADDED_ROWS]
    m_fn = (o_r < ROWS)[:, None] & m_n[None, :]
    # fn comes from far: its loads go out first.
    fn = nothing()
    for k in tl.static_range(HC):
        at = fn_ptr + o_r[:, None] * (HC * hidden) + k * hidden + o_n[None, :]
        fn = appended(fn, tl.load(at, mask=m_fn, other=0.0))  # [PADDED_ROWS, BN]
    x_ptr = streams_ptr + token * HC * hidden
    x = _columns(x_ptr, o_n, hidden, HC)
    if HAS_O:
        b_o = tl.load(o_ptr + token * hidden + o_n, mask=m_n, other=0.0)  # [BN]
        if HAS_EXTRA:
            b_o += tl.load(extra_ptr + token * hidden + o_n, mask=m_n, other=0.0)
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
            tl.store(x_ptr + k * hidden + o_n, x[k], mask=m_n)
    p_ptr = partials_ptr + token * blocks + i_block
    for j in tl.static_range(HC):
        for k in tl.static_range(j, HC):
            row = ROWS + j * HC - j * (j + 1) // 2 + k
            tl.store(p_ptr + row * stride_row, tl.sum(x[j] * x[k], axis=0))
    product = fn[0] * x[0][None, :]
    for k in tl.static_range(1, HC):
        product += fn[k] * x[k][None, :]
    tl.store(p_ptr + o_r * stride_row, tl.sum(product, axis=1), mask=o_r < ROWS)


@triton.jit
def _partials(
    partials_ptr, stride_row, blocks, FIRST: tl.constexpr, N: tl.constexpr, BLOCKS: tl.constexpr
):
    """N rows of the partial sums, a tuple of [BLOCKS]."""
    o_p = tl.arange(0, BLOCKS)  # [BLOCKS]
    rows = nothing()
    for i in tl.static_range(FIRST, FIRST + N):
        at = partials_ptr + i * stride_row + o_p
        rows = appended(rows, tl.load(at, mask=o_p < blocks, other=0.0))
    return rows


@triton.jit
def _sums(rows, N: tl.constexpr):
    """The rows, added up."""
    sums = nothing()
    for i in tl.static_range(N):
        sums = appended(sums, tl.sum(rows[i], axis=0))
    return sums


@triton.jit
def _factor(gram, count, norm_eps):
    """What the products are multiplied by, from the Gram matrix of streams of `count` values."""
    # X_0 . X_0, X_1 . X_1, ... in the upper triangle of four
    square = (gram[0] + gram[4]) + (gram[7] + gram[9])
    return tl.rsqrt(square / count + norm_eps)


@triton.jit
def _read_kernel(
    y_ptr,
    post_ptr,
    comb_ptr,
    streams_ptr,
    partials_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    hidden,
    blocks,
    stride_row,
    iterations,
    hc_eps,
    norm_eps,
    ROWS: tl.constexpr,
    HC: tl.constexpr,
    BN: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Program (part, token): BN columns of the read; the part behind the last makes post, comb."""
    i_part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    partials_ptr += token * blocks
    # All that comes from memory is asked for before the first of it is used.
    gram_rows = _partials(partials_ptr, stride_row, blocks, ROWS, HC * (HC + 1) // 2, BLOCKS)
    if i_part * BN < hidden:
        x_ptr = streams_ptr + token * HC * hidden
        o_n = i_part * BN + tl.arange(0, BN)  # [BN]
        x = _columns(x_ptr, o_n, hidden, HC)
        weight = tl.load(norm_ptr + o_n, mask=o_n < hidden, other=0.0)
        pre_rows = _partials(partials_ptr, stride_row, blocks, 0, HC, BLOCKS)
        pre_base = _scalars(base_ptr, 0, HC)
        scale_pre = tl.load(scale_ptr)
        gram = _sums(gram_rows, HC * (HC + 1) // 2)
        factor = _factor(gram, HC * hidden, norm_eps)
        pre = _sums(pre_rows, HC)
        pre = _sigmoids(pre, factor * scale_pre, pre_base, 1.0, hc_eps, HC)
        total = _square_of_blend(x_ptr, pre, gram, hidden, HC, BN)
        normed = _blend(x, pre, HC) * tl.rsqrt(total / hidden + norm_eps)
        tl.store(y_ptr + token * hidden + o_n, weight * normed, mask=o_n < hidden)
    elif ROWS > HC:
        post_rows = _partials(partials_ptr, stride_row, blocks, HC, HC, BLOCKS)
        comb_rows = _partials(partials_ptr, stride_row, blocks, 2 * HC, HC * HC, BLOCKS)
        post_base = _scalars(base_ptr, HC, HC)
        comb_base = _scalars(base_ptr, 2 * HC, HC * HC)
        scale_post, scale_comb = tl.load(scale_ptr + 1), tl.load(scale_ptr + 2)
        factor = _factor(_sums(gram_rows, HC * (HC + 1) // 2), HC * hidden, norm_eps)
        mix = _sums(comb_rows, HC * HC)
        comb = nothing()
        for i in tl.static_range(HC * HC):
            comb = appended(comb, mix[i] * (factor * scale_comb) + comb_base[i])
        comb = sinkhorn(comb, iterations, hc_eps, HC)
        post = _sums(post_rows, HC)
        post = _sigmoids(post, factor * scale_post, post_base, 2.0, 0.0, HC)
        for j in tl.static_range(HC):
            tl.store(post_ptr + token * HC + j, post[j])
        for i in tl.static_range(HC * HC):
            tl.store(comb_ptr + token * (HC * HC) + i, comb[i])


@triton.jit
def _scalars(ptr, FIRST: tl.constexpr, N: tl.constexpr):
    """N values of a vector, a tuple."""
    values = nothing()
    for i in tl.static_range(FIRST, FIRST + N):
        values = appended(values, tl.load(ptr + i))
    return values


@triton.jit
def _sigmoids(mix, factor, base, times, eps, N: tl.constexpr):
    """The weights times * sigmoid(mix * factor + base) + eps."""
    weights = nothing()
    for j in tl.static_range(N):
        weights = appended(weights, times * sigmoid(mix[j] * factor + base[j]) + eps)
    return weights


@triton.jit
def _columns(x_ptr, o_n, hidden, HC: tl.constexpr):
    """Some columns of each stream of a token."""
    x = nothing()
    for j in tl.static_range(HC):
        x = appended(x, tl.load(x_ptr + j * hidden + o_n, mask=o_n < hidden, other=0.0))
    return x


@triton.jit
def _blend(x, pre, HC: tl.constexpr):
    """sum_j pre_j X_j."""
    y = pre[0] * x[0]
    for j in tl.static_range(1, HC):
        y += pre[j] * x[j]
    return y


@triton.jit
def _square_of_blend(x_ptr, pre, gram, hidden, HC: tl.constexpr, BN: tl.constexpr):
    """The squared length of sum_j pre_j X_j from the Gram matrix, upper triangle row by row."""
    total = 0.0
    size = 0.0
    for j in tl.static_range(HC):
        for k in tl.static_range(j, HC):
            term = pre[j] * pre[k] * gram[j * HC - j * (j + 1) // 2 + k]
            if j < k:
                term = 2.0 * term
            total += term
            size += tl.abs(term)
    if total < size * TRUSTED_SHARE:
        squares = tl.zeros([BN], tl.float32)
        for start in range(0, hidden, BN):
            x = _columns(x_ptr, start + tl.arange(0, BN), hidden, HC)
            y = _blend(x, pre, HC)
            squares += y * y
        total = tl.sum(squares, axis=0)
    return total

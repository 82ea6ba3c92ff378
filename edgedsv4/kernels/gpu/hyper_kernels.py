"""Kernels of `hyper`: the two launches of a hyper-connection of few tokens."""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.byte_vector import store_bytes
from edgedsv4.kernels.gpu.hyper_mix import output, sigmoid, sinkhorn, written
from edgedsv4.kernels.gpu.nvidia import await_inputs
from edgedsv4.kernels.gpu.tuples import appended, nothing

# Below this share of the sum of its terms' sizes the Gram form of the mean square is not trusted.
TRUSTED_SHARE = tl.constexpr(1.0 / 64)


@triton.jit
def write_kernel(
    partials_ptr,
    streams_ptr,
    o_ptr,
    extra_ptr,
    other_ptr,
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
    HAS_OTHER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write BN columns of every stream, and partial sums of them; program (block, token)."""
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
    await_inputs(OVERLAP)
    x_ptr = streams_ptr + token * HC * hidden
    x = _columns(x_ptr, o_n, hidden, HC)
    if HAS_O:
        at = token * hidden + o_n
        b_o = output(o_ptr, extra_ptr, other_ptr, at, m_n, HAS_EXTRA, HAS_OTHER)  # [BN]
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
def read_kernel(
    y_ptr,
    post_ptr,
    comb_ptr,
    streams_ptr,
    partials_ptr,
    base_ptr,
    scale_ptr,
    norm_ptr,
    words_ptr,
    scales_ptr,
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
    ORDER: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Read BN columns; program (part, token), the part behind the last makes post and comb."""
    i_part = tl.program_id(0)
    token = tl.program_id(1).to(tl.int64)
    partials_ptr += token * blocks
    await_inputs(OVERLAP)
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
        y = weight * normed
        tl.store(y_ptr + token * hidden + o_n, y, mask=o_n < hidden)
        if ORDER != "":
            o_g = i_part * (BN // 32) + tl.arange(0, BN // 32)
            groups = hidden // 32
            y = tl.reshape(y, (BN // 32, 32))
            store_bytes(words_ptr, scales_ptr, y, o_g, o_g < groups, groups, ORDER, BN // 32)
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

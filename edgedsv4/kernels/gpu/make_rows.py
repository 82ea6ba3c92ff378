"""What the row kernels of one token and of a chunk share: norm, rotation, pooling, transform.

A row is held as pairs [G, GP] (`edgedsv4.kernels.gpu.rows`), groups of its format as rows, so that
nothing has to move between threads for its scales.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.rows import number_pairs, store_row


@triton.jit
def load_rotation(cos_ptr, sin_ptr, i_pair, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Cosines and sines of each pair of a row, 1 and 0 where it is not rotated."""
    i_pair -= (WIDTH - ROPE) // 2
    m_pair = (i_pair >= 0) & (i_pair < ROPE // 2)
    cos = tl.load(cos_ptr + i_pair, mask=m_pair, other=1.0)
    return cos, tl.load(sin_ptr + i_pair, mask=m_pair, other=0.0)


@triton.jit
def rotate(a, b, cos, sin, i_pair, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """Pairs with the last ROPE dims before WIDTH rotated; the others keep the sign of a zero."""
    m_pair = (i_pair >= (WIDTH - ROPE) // 2) & (i_pair < WIDTH // 2)
    return tl.where(m_pair, a * cos - b * sin, a), tl.where(m_pair, a * sin + b * cos, b)


@triton.jit
def load_factors(norm_ptr, cos_ptr, sin_ptr, i_pair, WIDTH: tl.constexpr, ROPE: tl.constexpr):
    """What `finish_row` multiplies with: weights of a and of b, cos and sin, [G, GP] each.

    Loaded before the row is known, so that nothing waits for them after its sum.
    """
    m_pair = i_pair < WIDTH // 2
    weight_a = tl.load(norm_ptr + 2 * i_pair, mask=m_pair, other=0.0)
    weight_b = tl.load(norm_ptr + 2 * i_pair + 1, mask=m_pair, other=0.0)
    cos, sin = load_rotation(cos_ptr, sin_ptr, i_pair, WIDTH, ROPE)
    return weight_a, weight_b, cos, sin


@triton.jit
def hadamard(x, LOG_N: tl.constexpr, SIZE: tl.constexpr):
    """Transform each run of 2^LOG_N of x [SIZE], stage by stage as the reference does."""
    for i in tl.static_range(LOG_N):
        pairs = tl.permute(tl.reshape(x, (SIZE // (2 << i), 2, 1 << i)), (0, 2, 1))
        first, second = tl.split(pairs)
        pairs = tl.join(first + second, first - second)
        x = tl.reshape(tl.permute(pairs, (0, 2, 1)), (SIZE,))
    return x


@triton.jit
def keep_raw(values_ptr, gates_ptr, ape_ptr, kept_ptr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """Write one raw row: values [WIDTH], then gates + bias; SIZE is the next power of two."""
    o_c = tl.arange(0, SIZE)
    m_c = o_c < WIDTH
    values = tl.load(values_ptr + o_c, mask=m_c, other=0.0)
    gates = tl.load(gates_ptr + o_c, mask=m_c, other=0.0)
    bias = tl.load(ape_ptr + o_c, mask=m_c, other=0.0)
    tl.store(kept_ptr + o_c, values, mask=m_c)
    tl.store(kept_ptr + WIDTH + o_c, gates + bias, mask=m_c)


@triton.jit
def pool_slots(top, total, row, values, gates):
    """Add a tile of slots [BJ, BC] to the running softmax of every channel [BC]."""
    new_top = tl.maximum(top, tl.max(gates, axis=0))
    rescale = tl.exp(top - new_top)
    weights = tl.exp(gates - new_top[None, :])
    total = total * rescale + tl.sum(weights, axis=0)
    return new_top, total, row * rescale + tl.sum(weights * values, axis=0)


@triton.jit
def finish_row(
    a,
    b,
    factors,
    row,
    codes_ptr,
    scales_ptr,
    bad_ptr,
    eps,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    """Norm, rotate, transform and store pairs [G, GP], 0 past WIDTH, as row `row` (int64).

    A row is finite if its sum of squares is: the other factors are.
    """
    i_pair = number_pairs(G, GP)
    weight_a, weight_b, cos, sin = factors
    total = tl.sum(a * a + b * b)
    tl.store(bad_ptr, 1, mask=(total < float("inf")) == 0)
    scale = tl.math.rsqrt(total / WIDTH + eps)
    a, b = weight_a * (a * scale), weight_b * (b * scale)
    a, b = rotate(a, b, cos, sin, i_pair, WIDTH, ROPE)
    if LOG_HADAMARD > 0:
        x = hadamard(tl.reshape(tl.join(a, b), (2 * G * GP,)), LOG_HADAMARD, 2 * G * GP)
        a, b = tl.split(tl.reshape(x * (WIDTH**-0.5), (G, GP, 2)))
    store_row(codes_ptr, scales_ptr, row, a, b, i_pair, WIDTH, ROPE, SCALE_BYTES, FORMAT, G)


@triton.jit
def store_kv_row(
    raw_ptr,
    row,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scales_ptr,
    bad_ptr,
    eps,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BC: tl.constexpr,
    GP: tl.constexpr,
):
    """Norm, rotate and store one product of wkv as window row `row` (int64)."""
    i_pair = number_pairs(BC // (2 * GP), GP)
    m_pair = i_pair < WIDTH // 2
    finish_row(
        tl.load(raw_ptr + 2 * i_pair, mask=m_pair, other=0.0),
        tl.load(raw_ptr + 2 * i_pair + 1, mask=m_pair, other=0.0),
        load_factors(norm_ptr, cos_ptr, sin_ptr, i_pair, WIDTH, ROPE),
        row,
        codes_ptr,
        scales_ptr,
        bad_ptr,
        eps,
        WIDTH,
        ROPE,
        SCALE_BYTES,
        FORMAT,
        0,
        BC // (2 * GP),
        GP,
    )


@triton.jit
def store_qr_row(out_ptr, raw_ptr, norm_ptr, eps, RANK: tl.constexpr, BQ: tl.constexpr):
    """Norm of one product of wq_a."""
    o_q = tl.arange(0, BQ)
    m_q = o_q < RANK
    x = tl.load(raw_ptr + o_q, mask=m_q, other=0.0)
    weight = tl.load(norm_ptr + o_q, mask=m_q, other=0.0)
    scale = tl.math.rsqrt(tl.sum(x * x) / RANK + eps)
    tl.store(out_ptr + o_q, weight * (x * scale), mask=m_q)

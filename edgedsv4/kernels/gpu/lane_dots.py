"""Products of 16 rows of packed weights with a vector on tensor cores, decoded where they lie.

The matrix unit wants of each thread parts of two rows, 8 apart, and of a quarter of the columns.
Here a quarter of a block of 256 columns is 64 neighbouring ones: a thread loads their words of both
rows in one piece each, and the half floats that it cuts out of them are its operand; no weight goes
through shared memory. The order of columns is one of the sum (`in_positions`).

The vector is the sum of two half floats, x = hi + lo / 2^11, as in `group_dots`. Scales are applied
to the codes as far as the product is exact in a half float, else to the sum over the block.
Rows come as two sets of 8, of one or of two matrices, so that a product can give gate and up.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import dot_acc

LANE_TYPES = ("IQ2_XXS", "Q2_K")
"""Types with such a product."""


@triton.jit
def load_vector(x_ptr, o_u, m_u):
    """Blocks o_u [BU] of 256 columns: f32 [BU, 256]."""
    k = tl.arange(0, 256)
    return tl.load(x_ptr + o_u[:, None] * 256 + k[None, :], mask=m_u[:, None], other=0.0)


@triton.jit
def vector_operand(x, TYPE: tl.constexpr, BU: tl.constexpr):
    """Vector [BU, 256] as the other operand, f16 [BU, 256, 2], and sums of it, f16 [BU, 16, 2]."""
    k = tl.arange(0, 256)
    if TYPE == "Q2_K":
        # Pairs 1, 4 and 7 of a word are cut out times 4, pairs 2 and 5 times 16.
        p = ((k >> 1) & 7) % 3
        factor = tl.where(p == 0, 0.25, tl.where(p == 1, 0.0625, 0.015625))
        parts = tl.sum(tl.reshape(x, (BU, 16, 16)), 2) * 0.25
        parts = tl.permute(tl.reshape(parts, (BU, 4, 2, 2)), (0, 1, 3, 2))
        sums = tl.permute(_halves(tl.reshape(parts, (BU, 16))), (0, 2, 1))
    else:
        factor = tl.where(((k >> 1) & 1) == 0, 0.25, 0.0625)
        sums = 0
    x = tl.reshape(
        tl.permute(tl.reshape(_halves(x * factor[None, :]), (BU, 2, 4, 16, 4)), (0, 1, 3, 2, 4)),
        (BU, 2, 256),
    )
    return tl.permute(x, (0, 2, 1)), sums


@triton.jit
def _halves(x):
    """Split x [BU, n] as hi + lo / 2^11: f16 [BU, 2, n]."""
    hi = x.to(tl.float16)
    lo = ((x - hi.to(tl.float32)) * 2048.0).to(tl.float16)
    is_hi = (tl.arange(0, 2) == 0)[None, :, None]
    return tl.where(is_hi, hi[:, None, :], lo[:, None, :])


@triton.jit
def total(acc, TYPE: tl.constexpr):
    """Products of all blocks [BU, 16, 2] -> [16], with the powers of two that were left out."""
    part = tl.where(tl.arange(0, 2) == 0, 4.0, 4.0 / 2048.0)
    if TYPE == "IQ2_XXS":
        part *= 2097152.0
    else:
        part *= 16777216.0
    return tl.sum(tl.sum(acc, 0) * part[None, :], 1)


@triton.jit
def load_rows(a0, a1, a2, b0, b1, b2, a_row, b_row, o_u, m_u, K: tl.constexpr, TYPE: tl.constexpr):
    """All that a product needs of rows a_row, b_row int64 [8, BU or 1] in blocks o_u [BU]."""
    if TYPE == "IQ2_XXS":
        first = _both(a0, b0, a_row, b_row, o_u, m_u, K // 32, 8)
        second = _both(a1, b1, a_row, b_row, o_u, m_u, K // 32, 8)
    else:
        first = _both(a0, b0, a_row, b_row, o_u, m_u, K // 16, 16)
        second = _both(a1, b1, a_row, b_row, o_u, m_u, K // 64, 4)
    scale = tl.join(
        tl.load(a2 + a_row * (K // 256) + o_u[None, :], mask=m_u[None, :], other=0),
        tl.load(b2 + b_row * (K // 256) + o_u[None, :], mask=m_u[None, :], other=0),
    )  # [8, BU, 2]
    return first, second, scale


@triton.jit
def _both(a, b, a_row, b_row, o_u, m_u, WIDTH: tl.constexpr, W: tl.constexpr):
    """W words of each block, of both sets of rows: uint32 [8, BU, W, 2]."""
    within = (o_u * W)[None, :, None] + tl.arange(0, W)[None, None, :]
    mask = m_u[None, :, None]
    # The first axis is not contiguous; but what comes after the last one is then the rows, and the
    # threads of a warp have all eight.
    a_offset = tl.max_contiguous((a_row * WIDTH)[:, :, None] + within, (2, 1, W))
    b_offset = tl.max_contiguous((b_row * WIDTH)[:, :, None] + within, (2, 1, W))
    first = tl.load(a + a_offset, mask=mask, other=0)
    second = tl.load(b + b_offset, mask=mask, other=0)
    return tl.join(first, second).to(tl.uint32, bitcast=True)


@triton.jit
def product(x, sums, first, second, scale, table, constants, TYPE: tl.constexpr, BU: tl.constexpr):
    """Products of the rows in every block: f32 [BU, 16, 2]."""
    scale = tl.reshape(tl.permute(scale, (1, 2, 0)), (BU, 16))
    if TYPE == "IQ2_XXS":
        acc = dot_acc(
            _iq2_xxs(first, second, table, constants, BU), x, tl.zeros([BU, 16, 2], tl.float32)
        )
        return acc * scale.to(tl.float32)[:, :, None]
    else:
        zero = tl.zeros([BU, 16, 2], tl.float32)
        acc = dot_acc(_q2_k(first, second, BU), x, zero)
        offsets = dot_acc(_q2_k_mins(second, BU), sums, zero)
        pair = scale.to(tl.uint32, bitcast=True)
        return acc * _low(pair)[:, :, None] - offsets * _low(pair >> 16)[:, :, None]


@triton.jit
def _low(word):
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _pair(word):
    """The two half floats in a word, on a last axis."""
    low = word.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _four(v0, v1, v2, v3):
    """Four tensors on two last axes, in order."""
    return tl.join(tl.join(v0, v2), tl.join(v1, v3))


@triton.jit
def _iq2_xxs(index, word, table, constants, BU: tl.constexpr):
    """Codes of both sets times 2 s + 1, those of pairs 1 and 3 times 4, all times 2^-24."""
    eight, eights = constants
    # A word has seven signs of four octets, 4 bits apart; the eighth is their parity.
    three = word ^ (word >> 4) ^ (word >> 8)
    odd = three ^ (three >> 12) ^ (word >> 24)
    signs = (word & 0x0FFFFFFF) | (odd << 28)
    entries = _four(index & 255, (index >> 8) & 255, (index >> 16) & 255, index >> 24)
    flat = tl.reshape(entries, (BU * 512,)).to(tl.int32)
    entry = tl.reshape(tl.gather(table, flat, 0), (8, BU, 8, 2, 2, 2)).to(tl.uint32, bitcast=True)
    signs = _four(signs << 3, signs << 2, signs << 1, signs)
    factor = ((word >> 28) * 2 + 1).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    factor = (factor * 0x10001)[:, :, :, :, None, None]
    later = entry >> 8
    top = 0x80008000
    pair0 = _pair((entry & 0x00330033) | eight) * _pair(factor ^ ((signs << 12) & top))
    pair1 = _pair((entry & 0x00CC00CC) | eights) * _pair(factor ^ ((signs << 8) & top))
    pair2 = _pair((later & 0x00330033) | eight) * _pair(factor ^ ((signs << 4) & top))
    pair3 = _pair((later & 0x00CC00CC) | eights) * _pair(factor ^ (signs & top))
    a = tl.reshape(_four(pair0, pair1, pair2, pair3), (8, BU, 4, 2, 2, 4, 2, 2, 2))
    #             rows, block, quarter, word, set, octet, half, pair of pairs, pair
    a = tl.permute(a, (1, 4, 0, 3, 5, 7, 2, 8, 6))
    return tl.reshape(a, (BU, 16, 256))


@triton.jit
def _q2_k(word, small, BU: tl.constexpr):
    """Codes of both sets times s, those of pairs 1, 4, 7 times 4, of 2, 5 times 16, times 2^-24."""
    word = tl.reshape(word, (8, BU, 4, 2, 2, 2))  # rows, block, quarter, word (2, 2), set
    s = _four(small & 15, (small >> 8) & 15, (small >> 16) & 15, (small >> 24) & 15)
    s = tl.permute(s, (0, 1, 2, 4, 5, 3))
    later, last = word >> 6, word >> 12
    low = _four(
        _pair((word & 0x00030003) * s),
        _pair((word & 0x000C000C) * s),
        _pair((word & 0x00300030) * s),
        _pair((later & 0x00030003) * s),
    )
    high = _four(
        _pair((later & 0x000C000C) * s),
        _pair((later & 0x00300030) * s),
        _pair((last & 0x00030003) * s),
        _pair((last & 0x000C000C) * s),
    )
    a = tl.join(low, high)
    # rows, block, quarter, word (2, 2), set, half, pair (middle bit, low bit, high bit)
    a = tl.permute(a, (1, 5, 0, 3, 4, 9, 7, 2, 8, 6))
    return tl.reshape(a, (BU, 16, 256))


@triton.jit
def _q2_k_mins(small, BU: tl.constexpr):
    """Numbers m of the sub-blocks 4 c + 0, 2, 1, 3, times 2^-24: f16 [BU, 16, 16]."""
    m = tl.join(_pair((small >> 4) & 0x000F000F), _pair((small >> 12) & 0x000F000F))
    # rows, block, quarter, set, half, odd
    return tl.reshape(tl.permute(m, (1, 3, 0, 2, 5, 4)), (BU, 16, 16))

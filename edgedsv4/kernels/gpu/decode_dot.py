"""Products of a tile of a stored matrix with a vector, without its numbers: for matrix-vector work.

    dot_tile(acc, ...)[n, p] = acc[n, p] + sum over the columns k of part p of W[row n, k] x[k]

The codes are multiplied with x as they are, and each part by its scale once: about one instruction
per weight less than `decode_tile` and a product, and far fewer registers. Parts are the even and
the odd columns of a word of codes; a caller goes through the columns and sums over the parts at the
end.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import e8m0_to_f32
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.decode_common import (
    UP_24,
    hidden,
    high,
    load_plane,
    load_words,
    low,
    spread,
)
from edgedsv4.kernels.gpu.decode_iq import all_signs, flat, grid_half, load_flat, signed
from edgedsv4.kernels.gpu.decode_k import six_bit_scales, small_scales
from edgedsv4.kernels.gpu.decode_small import e2m1_pairs

# Columns of a part; types that gain nothing have a part for every column.
_PART_COLUMNS = {"Q4_0": 4, "Q4_K": 4, "MXFP4": 4, "Q2_K": 8, "IQ2_XXS": 16}


def dot_parts(type_name: str, columns: int) -> int:
    """Width of the sums of `dot_tile` for tiles of some columns."""
    return columns // _PART_COLUMNS.get(type_name, 1)


# One branch per type; the compiler keeps one of them.
@triton.jit
def dot_tile(
    acc,
    p0,
    p1,
    p2,
    p3,
    row,
    row_mask,
    k0,
    K,
    x,
    TYPE: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """Products with x f32 [BK], zero beyond K, added to acc f32 [BN, dot_parts(TYPE, BK)].

    The other arguments are those of `decode_tile`. A thread does best with one row (BN 1) and a few
    calls with the same x: what is done with x alone is then done once.
    """
    if TYPE == "Q4_0":
        word = load_words(p0, row, row_mask, k0, K, 8, BK, 32)
        d = load_plane(p1, row, row_mask, k0, K, 32, BK, 32).to(tl.float32)
        d = spread(d, BK // 8)
        return _nibbles(acc, word, d, d * -8.0, p0, x, BK)
    elif TYPE == "Q4_K":
        word = load_words(p0, row, row_mask, k0, K, 8, BK, 256)
        scale, offset = six_bit_scales(p1, row, row_mask, k0, K, BK)
        return _nibbles(acc, word, spread(scale, BK // 8), spread(offset, BK // 8), p0, x, BK)
    elif TYPE == "MXFP4":
        return _mxfp4(acc, p0, p1, row, row_mask, k0, K, x, BK)
    elif TYPE == "Q2_K":
        return _q2_k(acc, p0, p1, p2, row, row_mask, k0, K, x, BK)
    elif TYPE == "IQ2_XXS":
        return _iq2_xxs(acc, p0, p1, p2, p3, row, row_mask, k0, K, x, BK)
    else:
        w = decode_tile(p0, p1, p2, p3, row, row_mask, k0, K, TYPE, BK, SCALE_COLS)
        return acc + w * x[None, :]


@triton.jit
def _eights(x, BK: tl.constexpr):
    """Elements 0 to 7 of each eight: [BK] -> eight [1, BK / 8]."""
    even, odd = tl.split(tl.reshape(x, (1, BK // 8, 2, 2, 2)))
    even0, even1 = tl.split(even)  # elements 0 and 4; 2 and 6
    odd0, odd1 = tl.split(odd)
    x0, x4 = tl.split(even0)
    x2, x6 = tl.split(even1)
    x1, x5 = tl.split(odd0)
    x3, x7 = tl.split(odd1)
    return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _parts(even, odd):
    """Sums over the even and the odd columns of a word: two [BN, W] -> [BN, 2 W].

    They stay apart so that the compiler widens both halves of a pair together; sums of two words
    it would take together, with a permutation for each.
    """
    return tl.reshape(tl.join(even, odd), (even.shape[0], even.shape[1] * 2))


@triton.jit
def _of_parts(acc):
    """The inverse of `_parts`."""
    return tl.split(tl.reshape(acc, (acc.shape[0], acc.shape[1] // 2, 2)))


@triton.jit
def _nibbles(acc, word, scale, offset, p0, x, BK: tl.constexpr):
    """Codes of 4 bits with scale and offset per word: [BN, BK / 4]."""
    x0, x1, x2, x3, x4, x5, x6, x7 = _eights(x, BK)
    even_mask = hidden(0x000F000F, p0)
    odd_mask = hidden(0x00F000F0, p0)
    later = word >> 8
    pair0 = word & even_mask
    pair1 = word & odd_mask
    pair2 = later & even_mask
    pair3 = later & odd_mask
    rest = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    # Those of odd pairs are 16 times too large.
    x2, x3, x6, x7 = x2 * 0.0625, x3 * 0.0625, x6 * 0.0625, x7 * 0.0625
    even = tl.fma(low(pair1), x2, low(pair0) * x0)
    odd = tl.fma(high(pair1), x3, high(pair0) * x1)
    even = tl.fma(low(pair3), x6, tl.fma(low(pair2), x4, even))
    odd = tl.fma(high(pair3), x7, tl.fma(high(pair2), x5, odd))
    scale = scale * UP_24
    acc_even, acc_odd = _of_parts(acc)
    acc_even = tl.fma(even, scale, tl.fma(offset, rest, acc_even))
    return _parts(acc_even, tl.fma(odd, scale, acc_odd))


@triton.jit
def _mxfp4(acc, p0, p1, row, row_mask, k0, K, x, BK: tl.constexpr):
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 32)  # [BN, BK / 8]
    e = load_plane(p1, row, row_mask, k0, K, 32, BK, 32)  # [BN, BK / 32]
    x0, x1, x2, x3, x4, x5, x6, x7 = _eights(x, BK)
    pair0, pair1, pair2, pair3 = e2m1_pairs(word, p0)
    even = tl.fma(low(pair1), x2, low(pair0) * x0)
    odd = tl.fma(high(pair1), x3, high(pair0) * x1)
    even = tl.fma(low(pair3), x6, tl.fma(low(pair2), x4, even))
    odd = tl.fma(high(pair3), x7, tl.fma(high(pair2), x5, odd))
    scale = e8m0_to_f32(spread(e, BK // 8)) * 16384.0
    acc_even, acc_odd = _of_parts(acc)
    return _parts(tl.fma(even, scale, acc_even), tl.fma(odd, scale, acc_odd))


@triton.jit
def _q2_k(acc, p0, p1, p2, row, row_mask, k0, K, x, BK: tl.constexpr):
    word = load_words(p0, row, row_mask, k0, K, 16, BK, 256)  # [BN, BK / 16]
    scale, offset = small_scales(p1, p2, row, row_mask, k0, K, BK)
    later = word >> 10
    x_even, x_odd = tl.split(tl.reshape(x, (BK // 2, 2)))
    mask0 = hidden(0x00030003, p0)
    mask1 = hidden(0x000C000C, p0)
    mask2 = hidden(0x00300030, p0)
    pair0 = word & mask0
    pair1 = word & mask1
    pair2 = word & mask2
    pair3 = word & hidden(0x00C000C0, p0)
    pair4 = word & hidden(0x03000300, p0)
    pair5 = later & mask0
    pair6 = later & mask1
    pair7 = later & mask2
    scale = scale * UP_24
    acc_even, acc_odd = _of_parts(acc)
    x0, x1, x2, x3, x4, x5, x6, x7 = _eights(x_even, BK // 2)
    rest = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    # Codes that were not shifted to the lowest bits are too large by a power of 4.
    x1, x2, x3, x4, x6, x7 = _shrunk(x1, x2, x3, x4, x6, x7)
    even = tl.fma(low(pair1), x1, low(pair0) * x0)
    even = tl.fma(low(pair3), x3, tl.fma(low(pair2), x2, even))
    even = tl.fma(low(pair5), x5, tl.fma(low(pair4), x4, even))
    even = tl.fma(low(pair7), x7, tl.fma(low(pair6), x6, even))
    acc_even = tl.fma(even, scale, tl.fma(offset, rest, acc_even))
    x0, x1, x2, x3, x4, x5, x6, x7 = _eights(x_odd, BK // 2)
    rest = ((x0 + x1) + (x2 + x3)) + ((x4 + x5) + (x6 + x7))
    x1, x2, x3, x4, x6, x7 = _shrunk(x1, x2, x3, x4, x6, x7)
    odd = tl.fma(high(pair1), x1, high(pair0) * x0)
    odd = tl.fma(high(pair3), x3, tl.fma(high(pair2), x2, odd))
    odd = tl.fma(high(pair5), x5, tl.fma(high(pair4), x4, odd))
    odd = tl.fma(high(pair7), x7, tl.fma(high(pair6), x6, odd))
    acc_odd = tl.fma(odd, scale, tl.fma(offset, rest, acc_odd))
    return _parts(acc_even, acc_odd)


@triton.jit
def _shrunk(x1, x2, x3, x4, x6, x7):
    return x1 * 0.25, x2 * 0.0625, x3 * 0.015625, x4 * 0.00390625, x6 * 0.25, x7 * 0.0625


@triton.jit
def _iq2_xxs(acc, p0, p1, p2, table, row, row_mask, k0, K, x, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    index = load_flat(p0, row, row_mask, k0, K, 32, BK).to(tl.uint32, bitcast=True)
    word = load_flat(p1, row, row_mask, k0, K, 32, BK).to(tl.uint32, bitcast=True)
    d = load_plane(p2, row, row_mask, k0, K, 256, BK, 256).to(tl.float32)  # [BN, BK / 256]
    scale = ((word >> 28).to(tl.float32) + 0.5) * flat(d * 0.25, BK // 32)
    signs = all_signs(word)
    mask = hidden(0x80008000, p0)
    # [BK] -> four octets [1, BK / 32, 8] of each group.
    x = tl.permute(tl.reshape(x, (BK // 32, 2, 2, 8)), (0, 3, 1, 2))
    first, second = tl.split(x)  # octets 0 and 2, 1 and 3
    x0, x2 = tl.split(first)
    x1, x3 = tl.split(second)
    even0, odd0 = _octet_dot(table, index & 255, signs, mask, x0, BN, 0)
    even1, odd1 = _octet_dot(table, (index >> 8) & 255, signs, mask, x1, BN, 1)
    even2, odd2 = _octet_dot(table, (index >> 16) & 255, signs, mask, x2, BN, 2)
    even3, odd3 = _octet_dot(table, index >> 24, signs, mask, x3, BN, 3)
    even = tl.reshape((even0 + even1) + (even2 + even3), (BN, BK // 32))
    odd = tl.reshape((odd0 + odd1) + (odd2 + odd3), (BN, BK // 32))
    scale = tl.reshape(scale, (BN, BK // 32))
    acc_even, acc_odd = _of_parts(acc)
    return _parts(tl.fma(even, scale, acc_even), tl.fma(odd, scale, acc_odd))


@triton.jit
def _repeat(x, BN: tl.constexpr):
    """[1, G] -> [BN G]."""
    G: tl.constexpr = x.shape[1]
    return tl.reshape(tl.broadcast_to(x, (BN, G)), (BN * G,))


@triton.jit
def _octet_dot(table, entry, signs, mask, x, BN: tl.constexpr, OCTET: tl.constexpr):
    """One octet of a group of 32 times x [G, 8], even and odd columns: two [BN G]."""
    G: tl.constexpr = x.shape[0]
    x0, x1, x2, x3, x4, x5, x6, x7 = _eights(tl.reshape(x, (G * 8,)), G * 8)
    g0, g1 = grid_half(table, entry, 0)
    g2, g3 = grid_half(table, entry, 1)
    g0 = signed(g0, signs, mask, 15 - OCTET)
    g1 = signed(g1, signs, mask, 11 - OCTET)
    g2 = signed(g2, signs, mask, 7 - OCTET)
    g3 = signed(g3, signs, mask, 3 - OCTET)
    even = tl.fma(low(g1), _repeat(x2, BN), low(g0) * _repeat(x0, BN))
    odd = tl.fma(high(g1), _repeat(x3, BN), high(g0) * _repeat(x1, BN))
    even = tl.fma(low(g3), _repeat(x6, BN), tl.fma(low(g2), _repeat(x4, BN), even))
    odd = tl.fma(high(g3), _repeat(x7, BN), tl.fma(high(g2), _repeat(x5, BN), odd))
    return even, odd

"""Decoders of the K types: blocks of 256 elements, sub-blocks with small integer scales.

Products of d, s and q are exact in f32 (but for Q6_K), so that one fused multiply-add has the
rounding of the reference.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.decode_common import (
    UP_24,
    hidden,
    high,
    join8,
    load_masked,
    load_plane,
    load_words,
    low,
    spread,
)
from edgedsv4.kernels.gpu.decode_small import affine_nibbles, affine_pairs


@triton.jit
def _load_header(
    p, row, row_mask, k0, K, BK: tl.constexpr, INDEX: tl.constexpr, WORDS: tl.constexpr
):
    """Word INDEX of the WORDS words that a plane has for every 256 columns: [BN, BK / 256]."""
    column = (k0 // 256 + tl.arange(0, BK // 256)) * WORDS + INDEX
    width = K // 256 * WORDS
    return load_masked(p, row, row_mask, column, width, K, BK).to(tl.uint32, bitcast=True)


@triton.jit
def six_bit_scales(p, row, row_mask, k0, K, BK: tl.constexpr):
    """Scale d s and offset -dmin m of sub-blocks of 32: two f32 [BN, BK / 32]."""
    GROUPS: tl.constexpr = BK // 32
    pair = spread(_load_header(p, row, row_mask, k0, K, BK, 0, 4), GROUPS)
    scales = spread(_load_header(p, row, row_mask, k0, K, BK, 1, 4), GROUPS)
    offsets = spread(_load_header(p, row, row_mask, k0, K, BK, 2, 4), GROUPS)
    tops = spread(_load_header(p, row, row_mask, k0, K, BK, 3, 4), GROUPS)
    place = (tl.arange(0, GROUPS) % 8)[None, :].to(tl.uint32)
    tops = tops >> (place * 2)
    s = ((scales >> (place * 4)) & 15) | ((tops & 3) << 4)
    m = ((offsets >> (place * 4)) & 15) | (((tops >> 16) & 3) << 4)
    return s.to(tl.float32) * low(pair), m.to(tl.float32) * -high(pair)


@triton.jit
def q4_k(p0, p1, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d s q - dmin m, q of 4 bits."""
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 256)  # [BN, BK / 8]
    scale, offset = six_bit_scales(p1, row, row_mask, k0, K, BK)
    return affine_nibbles(word, spread(scale, BK // 8), spread(offset, BK // 8), p0, BK)


@triton.jit
def q5_k(p0, p1, p2, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d s q - dmin m, q of 4 bits and a fifth."""
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 256)  # [BN, BK / 8]
    fifth = load_plane(p1, row, row_mask, k0, K, 8, BK, 256).to(tl.uint32)  # [BN, BK / 8]
    top = (fifth & 15) | ((fifth >> 4) << 16)  # bits 0-3 of both halves
    scale, offset = six_bit_scales(p2, row, row_mask, k0, K, BK)
    later = word >> 8
    return affine_pairs(
        (word & 0x000F000F) | ((top << 4) & 0x00100010),
        (word & 0x00F000F0) | ((top << 7) & 0x01000100),
        (later & 0x000F000F) | ((top << 2) & 0x00100010),
        (later & 0x00F000F0) | ((top << 5) & 0x01000100),
        spread(scale, BK // 8),
        spread(offset, BK // 8),
        BK,
    )


@triton.jit
def q6_k(p0, p1, p2, p3, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d s (q - 32), q of 4 bits and two more."""
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 256)  # [BN, BK / 8]
    upper = load_plane(p1, row, row_mask, k0, K, 8, BK, 256).to(tl.uint32) & 0xFFFF  # [BN, BK / 8]
    top = (upper & 0x00FF) | ((upper & 0xFF00) << 8)  # two bits of four elements in each half
    s = load_plane(p2, row, row_mask, k0, K, 16, BK, 256).to(tl.float32)  # [BN, BK / 16]
    d = load_plane(p3, row, row_mask, k0, K, 256, BK, 256).to(tl.float32)  # [BN, BK / 256]
    scale = s * spread(d, BK // 16)
    later = word >> 8
    return affine_pairs(
        (word & 0x000F000F) | ((top << 4) & 0x00300030),
        (word & 0x00F000F0) | ((top << 6) & 0x03000300),
        (later & 0x000F000F) | (top & 0x00300030),
        (later & 0x00F000F0) | ((top << 2) & 0x03000300),
        spread(scale, BK // 8),
        spread(scale * -32.0, BK // 8),
        BK,
    )


@triton.jit
def small_scales(p1, p2, row, row_mask, k0, K, BK: tl.constexpr):
    """Scale d s and offset -dmin m of sub-blocks of 16 (Q2_K): two f32 [BN, BK / 16]."""
    WORDS: tl.constexpr = BK // 16
    small = spread(load_words(p1, row, row_mask, k0, K, 64, BK, 256), WORDS)
    small = small >> ((tl.arange(0, WORDS) % 4)[None, :].to(tl.uint32) * 8)
    pair = spread(load_words(p2, row, row_mask, k0, K, 256, BK, 256), WORDS)
    scale = (small & 15).to(tl.float32) * low(pair)
    offset = ((small >> 4) & 15).to(tl.float32) * -high(pair)
    return scale, offset


@triton.jit
def q2_k(p0, p1, p2, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d s q - dmin m, q of 2 bits, s and m of 4 bits for 16 elements."""
    word = load_words(p0, row, row_mask, k0, K, 16, BK, 256)  # [BN, BK / 16]
    scale, offset = small_scales(p1, p2, row, row_mask, k0, K, BK)
    return _affine_twos(word, word >> 10, scale, offset, p0, BK)


@triton.jit
def _affine_twos(word, later, scale, offset, p0, BK: tl.constexpr):
    """Sixteen codes q of 2 bits per word as scale q + offset: [BN, BK / 16] -> [BN, BK].

    later is word >> 10: bits of a half above the tenth are no mantissa.
    """
    BN: tl.constexpr = word.shape[0]
    s0 = scale * UP_24
    s1 = scale * (UP_24 / 4)
    s2 = scale * (UP_24 / 16)
    s3 = scale * (UP_24 / 64)
    s4 = scale * (UP_24 / 256)
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
    even = join8(
        tl.fma(low(pair0), s0, offset),
        tl.fma(low(pair1), s1, offset),
        tl.fma(low(pair2), s2, offset),
        tl.fma(low(pair3), s3, offset),
        tl.fma(low(pair4), s4, offset),
        tl.fma(low(pair5), s0, offset),
        tl.fma(low(pair6), s1, offset),
        tl.fma(low(pair7), s2, offset),
    )
    odd = join8(
        tl.fma(high(pair0), s0, offset),
        tl.fma(high(pair1), s1, offset),
        tl.fma(high(pair2), s2, offset),
        tl.fma(high(pair3), s3, offset),
        tl.fma(high(pair4), s4, offset),
        tl.fma(high(pair5), s0, offset),
        tl.fma(high(pair6), s1, offset),
        tl.fma(high(pair7), s2, offset),
    )
    return tl.reshape(tl.join(even, odd), (BN, BK))


@triton.jit
def q3_k(p0, p1, p2, p3, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d (s - 32) (q - 4), q of 2 bits and a third, s of 6 bits for 16 elements."""
    BN: tl.constexpr = row.shape[0]
    WORDS: tl.constexpr = BK // 16
    word = load_words(p0, row, row_mask, k0, K, 16, BK, 256)  # [BN, BK / 16]
    third = (
        load_plane(p1, row, row_mask, k0, K, 16, BK, 256).to(tl.uint32) & 0xFFFF
    )  # [BN, BK / 16]
    top = (third & 0x00FF) | ((third & 0xFF00) << 8)
    place = (tl.arange(0, WORDS) % 16)[None, :].to(tl.uint32)
    first = spread(_load_header(p2, row, row_mask, k0, K, BK, 0, 3), WORDS)
    second = spread(_load_header(p2, row, row_mask, k0, K, BK, 1, 3), WORDS)
    tops = spread(_load_header(p2, row, row_mask, k0, K, BK, 2, 3), WORDS)
    lows = tl.where(place < 8, first, second) >> (place % 8 * 4)
    s = (lows & 15) | (((tops >> (place * 2)) & 3) << 4)
    d = spread(load_plane(p3, row, row_mask, k0, K, 256, BK, 256).to(tl.float32), WORDS)
    scale = (s.to(tl.float32) - 32.0) * d
    q0 = _three(word, top, 0)
    q1 = _three(word, top, 1)
    q2 = _three(word, top, 2)
    q3 = _three(word, top, 3)
    q4 = _three(word, top, 4)
    q5 = _three(word, top, 5)
    q6 = _three(word, top, 6)
    q7 = _three(word, top, 7)
    even = join8(low(q0), low(q1), low(q2), low(q3), low(q4), low(q5), low(q6), low(q7))
    odd = join8(high(q0), high(q1), high(q2), high(q3), high(q4), high(q5), high(q6), high(q7))
    q = tl.reshape(tl.join(even, odd), (BN, BK))
    scale = spread(scale, BK)
    return tl.fma(q, scale * UP_24, scale * -4.0)


@triton.jit
def _three(word, top, INDEX: tl.constexpr):
    """Pair INDEX of eight, codes of three bits."""
    return ((word >> (2 * INDEX)) & 0x00030003) | (((top >> INDEX) & 0x00010001) << 2)

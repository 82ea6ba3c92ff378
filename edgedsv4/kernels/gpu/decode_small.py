"""Decoders of floats and of the types with one scale per 16 or 32 elements."""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import bf16_to_f32, e8m0_to_f32
from edgedsv4.kernels.gpu.decode_common import (
    UP_24,
    hidden,
    high,
    join4,
    join8,
    load_masked,
    load_plane,
    load_words,
    low,
    spread,
)


@triton.jit
def floats(p0, row, row_mask, k0, K, TYPE: tl.constexpr, BK: tl.constexpr):
    """F32, F16, BF16."""
    values = load_plane(p0, row, row_mask, k0, K, 1, BK, 1)
    if TYPE == "BF16":
        return bf16_to_f32(values.to(tl.uint16, bitcast=True))
    else:
        return values.to(tl.float32)


@triton.jit
def q8_0(p0, p1, row, row_mask, k0, K, BK: tl.constexpr):
    """Codes q + 128, four per word; x = d q."""
    word = load_words(p0, row, row_mask, k0, K, 4, BK, 32)  # [BN, BK / 4]
    d = load_plane(p1, row, row_mask, k0, K, 32, BK, 32).to(tl.float32)  # [BN, BK / 32]
    BN: tl.constexpr = word.shape[0]
    mask = hidden(0x00FF00FF, p0)
    even = word & mask
    odd = (word >> 8) & mask
    q = tl.reshape(join4(low(even), low(odd), high(even), high(odd)), (BN, BK))
    d = spread(d, BK)
    return tl.fma(q, d * UP_24, d * -128.0)


@triton.jit
def q4_0(p0, p1, row, row_mask, k0, K, BK: tl.constexpr):
    """Codes q of 4 bits; x = d (q - 8)."""
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 32)  # [BN, BK / 8]
    d = load_plane(p1, row, row_mask, k0, K, 32, BK, 32).to(tl.float32)  # [BN, BK / 32]
    d = spread(d, BK // 8)
    return affine_nibbles(word, d, d * -8.0, p0, BK)


@triton.jit
def affine_nibbles(word, scale, offset, p0, BK: tl.constexpr):
    """Eight codes q of 4 bits per word as scale q + offset: [BN, BK / 8] -> [BN, BK]."""
    even = hidden(0x000F000F, p0)
    odd = hidden(0x00F000F0, p0)
    later = word >> 8
    return affine_pairs(word & even, word & odd, later & even, later & odd, scale, offset, BK)


@triton.jit
def affine_pairs(pair0, pair1, pair2, pair3, scale, offset, BK: tl.constexpr):
    """Four pairs of codes q per word, those of pairs 1 and 3 times 16: scale q + offset."""
    BN: tl.constexpr = pair0.shape[0]
    scale0 = scale * UP_24
    scale1 = scale * (UP_24 / 16)
    x = join8(
        tl.fma(low(pair0), scale0, offset),
        tl.fma(high(pair0), scale0, offset),
        tl.fma(low(pair1), scale1, offset),
        tl.fma(high(pair1), scale1, offset),
        tl.fma(low(pair2), scale0, offset),
        tl.fma(high(pair2), scale0, offset),
        tl.fma(low(pair3), scale1, offset),
        tl.fma(high(pair3), scale1, offset),
    )
    return tl.reshape(x, (BN, BK))


@triton.jit
def e2m1_pairs(word, p0):
    """Eight 4-bit floats per word as four words of two half floats, 2^14 times smaller.

    The bits are where `plane_layouts.pack_e2m1` puts them: one shift, or two, brings sign and
    magnitude of a pair to where half floats have them.
    """
    both = hidden(0x8E008E00, p0)
    sign = hidden(0x80008000, p0)
    magnitude = hidden(0x0E000E00, p0)
    pair0 = word & both
    pair1 = (word << 3) & both
    pair2 = ((word << 2) & sign) | ((word << 6) & magnitude)
    pair3 = ((word << 1) & sign) | ((word << 9) & magnitude)
    return pair0, pair1, pair2, pair3


@triton.jit
def e2m1_tile(word, p0, BK: tl.constexpr):
    """Eight 4-bit floats per word, times 2^-14: [BN, BK / 8] -> f32 [BN, BK]."""
    BN: tl.constexpr = word.shape[0]
    pair0, pair1, pair2, pair3 = e2m1_pairs(word, p0)
    x = join8(
        low(pair0),
        high(pair0),
        low(pair1),
        high(pair1),
        low(pair2),
        high(pair2),
        low(pair3),
        high(pair3),
    )
    return tl.reshape(x, (BN, BK))


@triton.jit
def mxfp4(p0, p1, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = 2^(e - 127) q, one e for 32 elements; with e above 240 x is infinite or NaN."""
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 32)  # [BN, BK / 8]
    e = load_plane(p1, row, row_mask, k0, K, 32, BK, 32)  # [BN, BK / 32]
    return e2m1_tile(word, p0, BK) * (e8m0_to_f32(spread(e, BK)) * 16384.0)


@triton.jit
def nvfp4(p0, p1, p2, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = E4M3(s) q t, one s for 16 elements and one t for a row.

    ggml reads the scale without its sign bit, and 0x7F as 0.
    """
    word = load_words(p0, row, row_mask, k0, K, 8, BK, 64)  # [BN, BK / 8]
    s = load_plane(p1, row, row_mask, k0, K, 16, BK, 64).to(tl.uint16) & 0x7F  # [BN, BK / 16]
    s = tl.where(s == 0x7F, 0, s) << 7
    scale = s.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    t = tl.load(p2 + row) if row_mask is None else tl.load(p2 + row, mask=row_mask, other=0.0)
    # 2^14 of the code and 2^8 of the scale.
    return e2m1_tile(word, p0, BK) * spread(scale * 4194304.0, BK) * t[:, None]


@triton.jit
def fp8(p0, p1, row, row_mask, k0, K, BK: tl.constexpr, SCALE_COLS: tl.constexpr):
    """Elements x = 2^(e - 127) q, one e for SCALE_COLS columns of a row."""
    word = load_words(p0, row, row_mask, k0, K, 4, BK, 4)  # [BN, BK / 4]
    BN: tl.constexpr = word.shape[0]
    even = e4m3_pair((word << 8) & 0xFF00FF00)
    odd = e4m3_pair(word & 0xFF00FF00)
    q = tl.reshape(join4(low(even), low(odd), high(even), high(odd)), (BN, BK))
    GROUP: tl.constexpr = SCALE_COLS if SCALE_COLS < BK else BK
    column = (k0 + tl.arange(0, BK // GROUP) * GROUP) // SCALE_COLS
    width = (K + SCALE_COLS - 1) // SCALE_COLS
    e = load_masked(p1, row, row_mask, column, width, K, BK)
    # Two factors: 2^8 times the largest scale is no f32.
    return q * 256.0 * spread(e8m0_to_f32(e), BK)


@triton.jit
def e4m3_pair(word):
    """8-bit floats in the upper bytes of two half floats: the halves, 2^8 times smaller."""
    bits = (word & 0x80008000) | ((word >> 1) & 0x3F803F80)
    # A magnitude of 127 is NaN; one more carries into the next bit only from there.
    carry = (((bits & 0x3F803F80) + 0x00800080) >> 14) & 0x00010001
    return bits | (carry * 0x7E00)

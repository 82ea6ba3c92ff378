"""Tiles of weights for matrix products, decoded in the registers from which they are multiplied.

`decode_tile` gives a tile in the layout in which its words were loaded, and a product then moves it
through shared memory. Here each decoder uses nothing but loads, element-wise operations, joins and
reshapes, so that the compiler can choose the layout of the product for all of them; together with
the order of columns of `fragments` no weight moves. Tiles are 64 columns or wider for every type.
What `PRODUCT_TYPES` does not name is left to `decode_tile`.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import e8m0_to_f32
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.decode_common import UP_24, high, join4, join8, low, spread

PRODUCT_TYPES = frozenset(
    ("F32", "F16", "BF16", "Q8_0", "Q4_0", "MXFP4", "FP8_E4M3", "NVFP4", "Q2_K", "Q4_K", "IQ2_XXS")
)
"""Types that are decoded in tiles of 64 or 128 columns; others need 256."""


@triton.jit
def product_tile(
    p0,
    p1,
    p2,
    p3,
    row,
    row_mask,
    k0,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """As `decode_tile`, f32 [BN, BK]; K is known to the compiler, p0 .. p2 may be [BN, 1]."""
    if TYPE == "Q8_0":
        return _q8_0(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "MXFP4":
        return _mxfp4(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "Q2_K":
        return _q2_k(p0, p1, p2, row, row_mask, k0, K, BK)
    elif TYPE == "Q4_K":
        return _q4_k(p0, p1, row, row_mask, k0, K, BK)
    elif TYPE == "IQ2_XXS":
        return _iq2_xxs(p0, p1, p2, p3, row, row_mask, k0, K, BK)
    else:
        return decode_tile(p0, p1, p2, p3, row, row_mask, k0, K, TYPE, BK, SCALE_COLS)


@triton.jit
def plane_numbers(p, row, row_mask, k0, K: tl.constexpr, PER: tl.constexpr, BK: tl.constexpr):
    """Numbers of a plane that has one for every PER columns: [BN, max(1, BK / PER)]."""
    COUNT: tl.constexpr = BK // PER if BK > PER else 1
    WIDTH: tl.constexpr = K // PER
    column = k0 // PER + tl.arange(0, COUNT)
    mask = row_mask[:, None]
    if K % BK != 0:
        mask = mask & (column < WIDTH)[None, :]
    return tl.load(p + row[:, None] * WIDTH + column[None, :], mask=mask, other=0)


@triton.jit
def plane_words(p, row, row_mask, k0, K: tl.constexpr, PER: tl.constexpr, BK: tl.constexpr):
    """As `plane_numbers`, unsigned."""
    return plane_numbers(p, row, row_mask, k0, K, PER, BK).to(tl.uint32, bitcast=True)


@triton.jit
def plane_bytes(p, row, row_mask, k0, K: tl.constexpr, PER: tl.constexpr, BK: tl.constexpr):
    """Bytes of a plane of words, one for every PER columns."""
    p = p.to(tl.pointer_type(tl.uint8))
    return plane_numbers(p, row, row_mask, k0, K, PER, BK).to(tl.uint32)


@triton.jit
def _q8_0(p0, p1, row, row_mask, k0, K: tl.constexpr, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    word = plane_words(p0, row, row_mask, k0, K, 4, BK)  # [BN, BK / 4]
    d = plane_numbers(p1, row, row_mask, k0, K, 32, BK).to(tl.float32)  # [BN, BK / 32]
    even = word & 0x00FF00FF
    odd = (word >> 8) & 0x00FF00FF
    q = tl.reshape(join4(low(even), low(odd), high(even), high(odd)), (BN, BK))
    return tl.fma(q, spread(d * UP_24, BK), spread(d * -128.0, BK))


@triton.jit
def _mxfp4(p0, p1, row, row_mask, k0, K: tl.constexpr, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    word = plane_words(p0, row, row_mask, k0, K, 8, BK)  # [BN, BK / 8]
    e = plane_numbers(p1, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
    pair0 = word & 0x8E008E00
    pair1 = (word << 3) & 0x8E008E00
    pair2 = ((word << 2) & 0x80008000) | ((word << 6) & 0x0E000E00)
    pair3 = ((word << 1) & 0x80008000) | ((word << 9) & 0x0E000E00)
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
    return tl.reshape(x, (BN, BK)) * spread(e8m0_to_f32(e) * 16384.0, BK)


@triton.jit
def _q2_k(p0, p1, p2, row, row_mask, k0, K: tl.constexpr, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    word = plane_words(p0, row, row_mask, k0, K, 16, BK)  # [BN, BK / 16]
    small = plane_bytes(p1, row, row_mask, k0, K, 16, BK)  # [BN, BK / 16]
    both = plane_words(p2, row, row_mask, k0, K, 256, BK)  # [BN, 1]
    scale = (small & 15).to(tl.float32) * spread(low(both), BK // 16)
    offset = (small >> 4).to(tl.float32) * spread(-high(both), BK // 16)
    s0 = scale * UP_24
    s1 = scale * (UP_24 / 4)
    s2 = scale * (UP_24 / 16)
    s3 = scale * (UP_24 / 64)
    s4 = scale * (UP_24 / 256)
    later = word >> 10
    first = join8(
        *_pair(word & 0x00030003, s0, offset),
        *_pair(word & 0x000C000C, s1, offset),
        *_pair(word & 0x00300030, s2, offset),
        *_pair(word & 0x00C000C0, s3, offset),
    )
    second = join8(
        *_pair(word & 0x03000300, s4, offset),
        *_pair(later & 0x00030003, s0, offset),
        *_pair(later & 0x000C000C, s1, offset),
        *_pair(later & 0x00300030, s2, offset),
    )
    x = tl.permute(tl.join(first, second), (0, 1, 5, 2, 3, 4))
    return tl.reshape(x, (BN, BK))


@triton.jit
def _pair(pair, scale, offset):
    """Two codes of a word as scale q + offset."""
    return tl.fma(low(pair), scale, offset), tl.fma(high(pair), scale, offset)


@triton.jit
def _q4_k(p0, p1, row, row_mask, k0, K: tl.constexpr, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    GROUPS: tl.constexpr = BK // 32
    word = plane_words(p0, row, row_mask, k0, K, 8, BK)  # [BN, BK / 8]
    first = (k0 // 256) * 4
    header = p1 + row[:, None] * (K // 64) + first
    mask = row_mask[:, None]
    if K % BK != 0:
        mask = mask & (first < K // 64)
    both = _header_word(header, mask, 0, GROUPS)
    place = ((k0 // 32 + tl.arange(0, GROUPS)) % 8)[None, :].to(tl.uint32)
    tops = _header_word(header, mask, 3, GROUPS) >> (place * 2)
    s = ((_header_word(header, mask, 1, GROUPS) >> (place * 4)) & 15) | ((tops & 3) << 4)
    m = ((_header_word(header, mask, 2, GROUPS) >> (place * 4)) & 15) | ((tops >> 12) & 48)
    scale = spread(s.to(tl.float32) * low(both), BK // 8)
    offset = spread(m.to(tl.float32) * -high(both), BK // 8)
    later = word >> 8
    even = scale * UP_24
    odd = scale * (UP_24 / 16)
    x = join8(
        *_pair(word & 0x000F000F, even, offset),
        *_pair(word & 0x00F000F0, odd, offset),
        *_pair(later & 0x000F000F, even, offset),
        *_pair(later & 0x00F000F0, odd, offset),
    )
    return tl.reshape(x, (BN, BK))


@triton.jit
def _header_word(header, mask, INDEX: tl.constexpr, GROUPS: tl.constexpr):
    word = tl.load(header + INDEX, mask=mask, other=0).to(tl.uint32, bitcast=True)
    return spread(word, GROUPS)


@triton.jit
def _iq2_xxs(p0, p1, p2, table, row, row_mask, k0, K: tl.constexpr, BK: tl.constexpr):
    BN: tl.constexpr = row.shape[0]
    index = plane_words(p0, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
    word = plane_words(p1, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
    d = plane_numbers(p2, row, row_mask, k0, K, 256, BK).to(tl.float32)  # [BN, 1]
    scale = ((word >> 28).to(tl.float32) + 0.5) * spread(d * 0.25, BK // 32)
    signs = word & 0x0FFFFFFF
    odd = signs ^ (signs >> 16)
    odd = odd ^ (odd >> 8)
    signs = signs | ((odd ^ (odd >> 4)) << 28)
    o0 = _octet(table, index & 255, signs, scale, 0)
    o1 = _octet(table, (index >> 8) & 255, signs, scale, 1)
    o2 = _octet(table, (index >> 16) & 255, signs, scale, 2)
    o3 = _octet(table, index >> 24, signs, scale, 3)
    x = tl.permute(join4(o0, o1, o2, o3), (0, 1, 5, 6, 2, 3, 4))
    return tl.reshape(x, (BN, BK))


@triton.jit
def _octet(table, entry, signs, scale, OCTET: tl.constexpr):
    """Octet OCTET of a group of 32: [BN, G, 2, 2, 2]."""
    first = tl.load(table + entry * 2).to(tl.uint64, bitcast=True)
    second = tl.load(table + entry * 2 + 1).to(tl.uint64, bitcast=True)
    return join8(
        *_signed(first.to(tl.uint32), signs << (15 - OCTET), scale),
        *_signed((first >> 32).to(tl.uint32), signs << (11 - OCTET), scale),
        *_signed(second.to(tl.uint32), signs << (7 - OCTET), scale),
        *_signed((second >> 32).to(tl.uint32), signs << (3 - OCTET), scale),
    )


@triton.jit
def _signed(pair, signs, scale):
    pair = pair ^ (signs & 0x80008000)
    return low(pair) * scale, high(pair) * scale

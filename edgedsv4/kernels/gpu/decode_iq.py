"""Decoders of the IQ types: indices into a grid of 4 or 8 half floats, signs, small scales.

Signs are XORed into two half floats at a time. Of eight signs seven are stored, and their number is
even. Where a word holds the signs of four times eight elements, `plane_layouts` has put that of
element i of octet o at bit 4 (i / 2) + o + 16 (i mod 2): one shift brings those of a pair to the
top of its halves, and the eighth ones of all four octets are found at once.

Codes are one-dimensional tensors here: of a load at scattered addresses in two dimensions Triton
3.6 transposes the threads, and would pass codes and values through shared memory.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.decode_common import (
    hidden,
    high,
    is_whole,
    join4,
    join8,
    load_plane,
    load_words,
    low,
    spread,
)


@triton.jit
def load_flat(p, row, row_mask, k0, K, PER: tl.constexpr, BK: tl.constexpr):
    """As `load_plane`, [BN BK / PER]."""
    SIZE: tl.constexpr = row.shape[0] * (BK // PER)
    column = k0 // PER + tl.arange(0, BK // PER)
    width = K // PER
    offset = tl.reshape(row[:, None] * width + column[None, :], (SIZE,))
    if is_whole(K, BK):
        if row_mask is None:
            return tl.load(p + offset)
        else:
            mask = row_mask[:, None] & (column >= 0)[None, :]
            return tl.load(p + offset, mask=tl.reshape(mask, (SIZE,)), other=0)
    elif row_mask is None:
        mask = (row >= 0)[:, None] & (column < width)[None, :]
        return tl.load(p + offset, mask=tl.reshape(mask, (SIZE,)), other=0)
    else:
        mask = row_mask[:, None] & (column < width)[None, :]
        return tl.load(p + offset, mask=tl.reshape(mask, (SIZE,)), other=0)


@triton.jit
def flat(values, WIDTH: tl.constexpr):
    """One number per group to one per column, [BN, G] -> [BN WIDTH]."""
    return tl.reshape(spread(values, WIDTH), (values.shape[0] * WIDTH,))


@triton.jit
def _places(BN: tl.constexpr, WIDTH: tl.constexpr, PERIOD: tl.constexpr):
    """Number of the column modulo a period: uint32 [BN WIDTH]."""
    place = (tl.arange(0, WIDTH) % PERIOD).to(tl.uint32)[None, :]
    return tl.reshape(tl.broadcast_to(place, (BN, WIDTH)), (BN * WIDTH,))


@triton.jit
def all_signs(word):
    """The word with the scale in its top four bits replaced by the eighth sign of each octet."""
    signs = word & 0x0FFFFFFF
    odd = signs ^ (signs >> 16)
    odd = odd ^ (odd >> 8)
    odd = odd ^ (odd >> 4)
    return signs | (odd << 28)


@triton.jit
def signed(pair, signs, mask, SHIFT: tl.constexpr):
    """Two half floats with the signs that the shift brings to bits 15 and 31."""
    return pair ^ ((signs << SHIFT) & mask)


@triton.jit
def grid_half(table, entry, INDEX: tl.constexpr):
    """Four half floats of a grid entry: two words of two."""
    four = tl.load(table + entry * 2 + INDEX).to(tl.uint64, bitcast=True)
    return four.to(tl.uint32), (four >> 32).to(tl.uint32)


@triton.jit
def _octet(table, entry, signs, mask, scale, OCTET: tl.constexpr):
    """Octet OCTET of a group of 32: eight f32 of the shape of `entry`."""
    g0, g1 = grid_half(table, entry, 0)
    g2, g3 = grid_half(table, entry, 1)
    return _scaled_pairs(g0, g1, g2, g3, signs, mask, scale, OCTET)


@triton.jit
def _scaled_pairs(g0, g1, g2, g3, signs, mask, scale, OCTET: tl.constexpr):
    """Eight half floats with signs and scale, in order."""
    g0 = signed(g0, signs, mask, 15 - OCTET)
    g1 = signed(g1, signs, mask, 11 - OCTET)
    g2 = signed(g2, signs, mask, 7 - OCTET)
    g3 = signed(g3, signs, mask, 3 - OCTET)
    return (
        low(g0) * scale,
        high(g0) * scale,
        low(g1) * scale,
        high(g1) * scale,
        low(g2) * scale,
        high(g2) * scale,
        low(g3) * scale,
        high(g3) * scale,
    )


@triton.jit
def _in_order(o0, o1, o2, o3, BN: tl.constexpr, BK: tl.constexpr):
    """Four octets, each a tuple of eight [BN G], of groups of 32: [BN, BK]."""
    x = join8(
        join4(o0[0], o1[0], o2[0], o3[0]),
        join4(o0[1], o1[1], o2[1], o3[1]),
        join4(o0[2], o1[2], o2[2], o3[2]),
        join4(o0[3], o1[3], o2[3], o3[3]),
        join4(o0[4], o1[4], o2[4], o3[4]),
        join4(o0[5], o1[5], o2[5], o3[5]),
        join4(o0[6], o1[6], o2[6], o3[6]),
        join4(o0[7], o1[7], o2[7], o3[7]),
    )
    return tl.reshape(x, (BN, BK))


@triton.jit
def iq2_xxs(p0, p1, p2, table, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d (s + 1/2) / 4 grid sign; four indices, signs and s for 32 elements."""
    BN: tl.constexpr = row.shape[0]
    index = load_flat(p0, row, row_mask, k0, K, 32, BK).to(tl.uint32, bitcast=True)
    word = load_flat(p1, row, row_mask, k0, K, 32, BK).to(tl.uint32, bitcast=True)
    d = load_plane(p2, row, row_mask, k0, K, 256, BK, 256).to(tl.float32)  # [BN, BK / 256]
    scale = ((word >> 28).to(tl.float32) + 0.5) * flat(d * 0.25, BK // 32)
    signs = all_signs(word)
    mask = hidden(0x80008000, p0)
    return _in_order(
        _octet(table, index & 255, signs, mask, scale, 0),
        _octet(table, (index >> 8) & 255, signs, mask, scale, 1),
        _octet(table, (index >> 16) & 255, signs, mask, scale, 2),
        _octet(table, index >> 24, signs, mask, scale, 3),
        BN,
        BK,
    )


@triton.jit
def iq3_xxs(p0, p1, p2, table, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d (s + 1/2) / 2 grid sign; eight indices, signs and s for 32 elements."""
    BN: tl.constexpr = row.shape[0]
    index = load_flat(p0, row, row_mask, k0, K, 32, BK).to(tl.uint64, bitcast=True)
    word = load_flat(p1, row, row_mask, k0, K, 32, BK).to(tl.uint32, bitcast=True)
    d = load_plane(p2, row, row_mask, k0, K, 256, BK, 256).to(tl.float32)  # [BN, BK / 256]
    scale = ((word >> 28).to(tl.float32) + 0.5) * flat(d * 0.5, BK // 32)
    signs = all_signs(word)
    mask = hidden(0x80008000, p0)
    return _in_order(
        _octet_of_fours(table, index, signs, mask, scale, 0),
        _octet_of_fours(table, index, signs, mask, scale, 1),
        _octet_of_fours(table, index, signs, mask, scale, 2),
        _octet_of_fours(table, index, signs, mask, scale, 3),
        BN,
        BK,
    )


@triton.jit
def _octet_of_fours(table, index, signs, mask, scale, OCTET: tl.constexpr):
    """Octet OCTET of a group of 32, from two entries of four half floats."""
    first = tl.load(table + ((index >> (16 * OCTET)) & 255).to(tl.int32)).to(
        tl.uint64, bitcast=True
    )
    second = tl.load(table + ((index >> (16 * OCTET + 8)) & 255).to(tl.int32))
    second = second.to(tl.uint64, bitcast=True)
    return _scaled_pairs(
        first.to(tl.uint32),
        (first >> 32).to(tl.uint32),
        second.to(tl.uint32),
        (second >> 32).to(tl.uint32),
        signs,
        mask,
        scale,
        OCTET,
    )


@triton.jit
def iq2_xs(p0, p1, p2, table, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d (s + 1/2) / 4 grid sign; an index and signs for 8 elements, s for 16."""
    BN: tl.constexpr = row.shape[0]
    code = load_flat(p0, row, row_mask, k0, K, 8, BK).to(tl.uint32) & 0xFFFF
    small = load_plane(p1, row, row_mask, k0, K, 32, BK, 256).to(tl.uint32)  # [BN, BK / 32]
    small = flat(small, BK // 8) >> (_places(BN, BK // 8, 4) // 2 * 4)
    d = load_plane(p2, row, row_mask, k0, K, 256, BK, 256).to(tl.float32)  # [BN, BK / 256]
    scale = ((small & 15).to(tl.float32) + 0.5) * flat(d * 0.25, BK // 8)
    stored = code >> 9
    odd = stored ^ (stored >> 4)
    odd = odd ^ (odd >> 2)
    odd = (odd ^ (odd >> 1)) & 1
    # Sign i of the octet at bit 4 (i / 2) + 16 (i mod 2), as in the wider words.
    even = (stored & 1) | ((stored & 4) << 2) | ((stored & 16) << 4) | ((stored & 64) << 6)
    other = ((stored & 2) << 15) | ((stored & 8) << 17) | ((stored & 32) << 19) | (odd << 28)
    octets = _octet(table, code & 511, even | other, hidden(0x80008000, p0), scale, 0)
    return tl.reshape(join8(*octets), (BN, BK))


@triton.jit
def iq4_xs(p0, p1, p2, table, row, row_mask, k0, K, BK: tl.constexpr):
    """Elements x = d (s - 32) values[q], s of 6 bits for 32; the table has pairs of values."""
    BN: tl.constexpr = row.shape[0]
    word = load_flat(p0, row, row_mask, k0, K, 8, BK).to(tl.uint32, bitcast=True)
    place = _places(BN, BK // 8, 32) // 4
    lows = flat(load_words(p1, row, row_mask, k0, K, 256, BK, 256), BK // 8)
    pair = flat(load_words(p2, row, row_mask, k0, K, 256, BK, 256), BK // 8)  # d, upper bits of s
    s = ((lows >> (place * 4)) & 15) | (((pair >> (place * 2 + 16)) & 3) << 4)
    scale = (s.to(tl.float32) - 32.0) * low(pair)
    v0 = tl.load(table + (word & 255)).to(tl.uint32, bitcast=True)
    v1 = tl.load(table + ((word >> 8) & 255)).to(tl.uint32, bitcast=True)
    v2 = tl.load(table + ((word >> 16) & 255)).to(tl.uint32, bitcast=True)
    v3 = tl.load(table + (word >> 24)).to(tl.uint32, bitcast=True)
    x = join8(
        low(v0) * scale,
        high(v0) * scale,
        low(v1) * scale,
        high(v1) * scale,
        low(v2) * scale,
        high(v2) * scale,
        low(v3) * scale,
        high(v3) * scale,
    )
    return tl.reshape(x, (BN, BK))

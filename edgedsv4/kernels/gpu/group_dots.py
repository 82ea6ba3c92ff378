"""Dot products of rows of a stored matrix with a vector on tensor cores, codes as half floats.

Two codes are cut out of a word at once, 16 bits apart. Read as half floats, integers n below 1024
are the subnormal numbers n 2^-24, exact in a product with f32 accumulation; so a weight costs half
an instruction and no conversion. The vector is the sum of two half floats, x = hi + lo / 2^11 (22
bits), which are two columns of the other operand. A scale is applied to the sum over its group, not
to the elements: the groups of a row are a batch of small products.

`vector_columns` makes the second operand of some units (groups of 32, or blocks of 256 columns) in
the order in which `add_products` cuts out the codes; `total` adds it all up. |x| must be below
2^13, or results are not finite.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.dequantize.tables import iq_grid
from edgedsv4.kernels.gpu.conversions import dot_acc
from edgedsv4.kernels.gpu.planes import DeviceMatrix, plane_arguments

GROUPED = ("Q8_0", "Q4_0", "MXFP4", "Q2_K", "Q4_K", "IQ2_XXS")
"""Types with such a product."""

_PAIR_BITS = (0, 2, 8, 10)
_BASE = 8


def unit_columns(type_name: str) -> int:
    """Columns of a unit: what one product of the batch sums over; 0 for other types."""
    if type_name not in GROUPED:
        return 0
    return 256 if type_name in ("Q2_K", "Q4_K") else 32


def group_planes(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Three planes as `add_products` takes them, and a table."""
    p0, p1, p2, _ = plane_arguments(matrix)
    if matrix.type == "IQ2_XXS":
        return p0.view(torch.uint8), p1, p2, _grid_codes(p0.device)
    if matrix.type == "Q2_K":
        return p0, p1.view(torch.uint8), p2, p0
    return p0, p1, p2, p0


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """The grid of IQ2_XXS in 32 bits per entry, int32 [256], then constants of `_octets`, [4, 4].

    Of the bits of a value less 8 (0, 17 or 35) numbers 0, 1, 4 and 5 can be set. Those of the
    elements 2 p and 2 p + 1 go to bit `_PAIR_BITS[p]` and above it in the two halves of the entry.
    """
    grid = iq_grid("IQ2_XXS", torch.device("cpu")).to(torch.int64) - _BASE  # [256, 8]
    codes = torch.zeros(256, dtype=torch.int64)
    for element in range(8):
        pair, half = divmod(element, 2)
        codes |= grid[:, element] << (_PAIR_BITS[pair] + 16 * half)
    rows = [[8, 4, 2, 1], [0x00080008] * 4, [0x00200020] * 4, [0x80008000] * 4]
    words = torch.cat((codes, torch.tensor(rows).flatten()))
    signed = torch.where(words >= 1 << 31, words - (1 << 32), words)
    return signed.to(torch.int32).to(device)


@triton.jit
def vector_columns(
    x_ptr, factor, u0, K: tl.constexpr, TYPE: tl.constexpr, UNIT: tl.constexpr, BU: tl.constexpr
):
    """Units u0 .. u0 + BU - 1 of factor x: f16 [BU, UNIT, 2], and what offsets need of it.

    That is, of Q2_K and Q4_K the sums of x over sub-blocks, f16 [BU, 16, 2]; of the types with an
    offset of all codes the sum over the group, f32 [BU]; else [BU] without a meaning.
    """
    o_u = u0 + tl.arange(0, BU)
    m_u = (o_u < K // UNIT)[:, None]
    k = tl.arange(0, UNIT)
    if TYPE == "Q8_0":
        place = (k & (UNIT - 4)) | ((k & 1) << 1) | ((k >> 1) & 1)
    elif TYPE == "Q2_K":
        place = ((k >> 6) * 4 + ((k >> 3) & 3)) * 16 + ((k >> 5) & 1) * 8 + (k & 7)
    elif TYPE == "IQ2_XXS":
        place = k
    else:
        place = (k >> 5) * 32 + ((k >> 2) & 3) * 8 + ((k >> 4) & 1) * 4 + (k & 3)
    address = x_ptr + o_u[:, None] * UNIT
    x = tl.load(address + place[None, :], mask=m_u, other=0.0) * factor  # [BU, UNIT]
    if TYPE == "Q2_K":
        # Pairs 1 and 4 and 7 of a word are cut out times 4, pairs 2 and 5 times 16.
        p = (((k >> 5) & 1) * 4 + ((k >> 1) & 3)) % 3
        x *= tl.where(p == 0, 1.0, tl.where(p == 1, 0.25, 0.0625))[None, :]
    elif TYPE == "IQ2_XXS":
        x *= tl.where((k & 2) == 0, 1.0, 0.25)[None, :]
    if TYPE == "Q2_K":
        i = tl.arange(0, 16)
        group = (i & 12) | ((i & 1) << 1) | ((i >> 1) & 1)
        o_x = group[:, None] * 16 + i[None, :]
        parts = tl.load(address[:, :, None] + o_x[None, :, :], mask=m_u[:, :, None], other=0.0)
        sums = _halves(tl.sum(parts, 2) * factor)
    elif TYPE == "Q4_K":
        group = tl.arange(0, 16)
        o_x = group[:, None] * 32 + tl.arange(0, 32)[None, :]
        mask = m_u[:, :, None] & (group < 8)[None, :, None]
        parts = tl.load(address[:, :, None] + o_x[None, :, :], mask=mask, other=0.0)
        sums = _halves(tl.sum(parts, 2) * factor)
    else:
        sums = tl.sum(x, 1) * 0.25
    return _halves(x), sums


@triton.jit
def _halves(x):
    """Split x / 4 [BU, n] as hi + lo / 2^11: f16 [BU, n, 2]."""
    x = x[:, None, :] * 0.25
    hi = x.to(tl.float16).to(tl.float32)
    is_hi = (tl.arange(0, 2) == 0)[None, :, None]
    both = tl.where(is_hi, hi, (x - hi) * 2048.0)
    return tl.permute(both.to(tl.float16), (0, 2, 1))


@triton.jit
def total(acc, TYPE: tl.constexpr):
    """Products of all units [BU, BM, 2] -> [BM], with the powers of two that were left out."""
    part = tl.where(tl.arange(0, 2) == 0, 4.0, 4.0 / 2048.0)
    if TYPE == "MXFP4":
        part *= 16384.0
    elif TYPE == "IQ2_XXS":
        part *= 4194304.0
    else:
        part *= 16777216.0
    return tl.sum(tl.sum(acc, 0) * part[None, :], 1)


@triton.jit
def add_products(
    acc,
    x,
    sums,
    p0,
    p1,
    p2,
    table,
    row,
    u0,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    BM: tl.constexpr,
):
    """Add to acc [BU, BM, 2] the products of rows `row` int64 [BM] in units u0 .. u0 + BU - 1."""
    o_u = u0 + tl.arange(0, BU)
    m_u = o_u < K // UNIT
    if TYPE == "Q2_K":
        return _q2_k(acc, x, sums, p0, p1, p2, row, o_u, m_u, K, BU, BM)
    elif TYPE == "Q4_K":
        return _q4_k(acc, x, sums, p0, p1, row, o_u, m_u, K, BU, BM)
    else:
        start = tl.zeros([BU, BM, 2], tl.float32)
        if TYPE == "Q8_0":
            a = _bytes(_words(p0, row, o_u, m_u, K, 8), BU, BM)
            start += _offset(sums, -128.0 / 16777216.0)
        elif TYPE == "Q4_0":
            a = _nibbles(_words(p0, row, o_u, m_u, K, 4), BU, BM)
            start += _offset(sums, -8.0 / 16777216.0)
        elif TYPE == "MXFP4":
            a = _e2m1(_words(p0, row, o_u, m_u, K, 4), BU, BM)
        else:
            a = _octets(p0, p1, table, row, o_u, m_u, K, BU, BM)
        product = dot_acc(a, x, start)
        scale = _group_scale(p1, p2, row, o_u, m_u, K, TYPE)  # [BU, BM]
        return acc + product * scale[:, :, None]


@triton.jit
def _words(p, row, o_u, m_u, K: tl.constexpr, W: tl.constexpr):
    """W words per group of 32: uint32 [BU, BM, W]."""
    i = tl.arange(0, W)
    address = p + (row * (K // 32 * W))[None, :, None] + (o_u * W)[:, None, None]
    word = tl.load(address + i[None, None, :], mask=m_u[:, None, None], other=0)
    return word.to(tl.uint32, bitcast=True)


@triton.jit
def _group_scale(p1, p2, row, o_u, m_u, K: tl.constexpr, TYPE: tl.constexpr):
    """Scale of a group, but for a power of two that `total` knows: f32 [BU, BM]."""
    address = p1 + (row * (K // 32))[None, :] + o_u[:, None]
    if TYPE == "MXFP4":
        e = tl.load(address, mask=m_u[:, None], other=0)
        # 0 becomes 0 instead of 2^-127, and 255 infinite.
        return (e.to(tl.uint32) << 23).to(tl.float32, bitcast=True)
    elif TYPE == "IQ2_XXS":
        word = tl.load(address, mask=m_u[:, None], other=0).to(tl.uint32, bitcast=True)
        d_address = p2 + (row * (K // 256))[None, :] + (o_u // 8)[:, None]
        d = tl.load(d_address, mask=m_u[:, None], other=0.0).to(tl.float32)
        return ((word >> 28).to(tl.float32) + 0.5) * d
    else:
        return tl.load(address, mask=m_u[:, None], other=0.0).to(tl.float32)


@triton.jit
def _offset(sums, factor):
    """The factor times the sums [BU] in the column of hi: [BU, 1, 2]."""
    is_hi = tl.arange(0, 2) == 0
    return tl.where(is_hi[None, None, :], (sums * factor)[:, None, None], 0.0)


@triton.jit
def _pair(word):
    """The two half floats in a word, on a last axis."""
    low = word.to(tl.uint16).to(tl.float16, bitcast=True)
    high = (word >> 16).to(tl.uint16).to(tl.float16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _bytes(word, BU: tl.constexpr, BM: tl.constexpr):
    """Unsigned bytes of words [BU, BM, 8], times 2^-24."""
    a = tl.join(_pair(word & 0x00FF00FF), _pair((word >> 8) & 0x00FF00FF))
    return tl.reshape(tl.permute(a, (0, 1, 2, 4, 3)), (BU, BM, 32))


@triton.jit
def _four_pairs(pair0, pair1, pair2, pair3, BU: tl.constexpr, BM: tl.constexpr):
    """Four pairs of each of four words [BU, BM, 4] in the order of `vector_columns`."""
    low, high = tl.join(_pair(pair0), _pair(pair1)), tl.join(_pair(pair2), _pair(pair3))
    a = tl.permute(tl.join(low, high), (0, 1, 5, 2, 4, 3))
    return tl.reshape(a, (BU, BM, 32))


@triton.jit
def _nibbles(word, BU: tl.constexpr, BM: tl.constexpr):
    """Codes of 4 bits of words [BU, BM, 4], times 2^-24."""
    mask = 0x000F000F
    return _four_pairs(
        word & mask, (word >> 4) & mask, (word >> 8) & mask, (word >> 12) & mask, BU, BM
    )


@triton.jit
def _e2m1(word, BU: tl.constexpr, BM: tl.constexpr):
    """4-bit floats of words [BU, BM, 4], times 2^-14; bits as in `decode_small.e2m1_tile`."""
    return _four_pairs(
        word & 0x8E008E00,
        (word << 3) & 0x8E008E00,
        ((word << 2) & 0x80008000) | ((word << 6) & 0x0E000E00),
        ((word << 1) & 0x80008000) | ((word << 9) & 0x0E000E00),
        BU,
        BM,
    )


@triton.jit
def _constant(table, octet, ROW: tl.constexpr):
    return tl.load(table + 256 + 4 * ROW + octet).to(tl.uint32, bitcast=True)[None, None, :]


@triton.jit
def _octets(p0, p1, table, row, o_u, m_u, K: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr):
    """Signed values of four octets per group, those of pairs 1 and 3 times 4, all times 2^-24.

    A value is 8, 25 or 43; the table holds its bits but for the 8, which no value less 8 has.
    """
    octet = tl.arange(0, 4)
    address = p0 + (row * (K // 8))[None, :, None] + (o_u * 4)[:, None, None]
    index = tl.load(address + octet[None, None, :], mask=m_u[:, None, None], other=0)
    entry = tl.load(table + index.to(tl.int32)).to(tl.uint32, bitcast=True)  # [BU, BM, 4]
    s_address = p1 + (row * (K // 32))[None, :] + o_u[:, None]
    word = tl.load(s_address, mask=m_u[:, None], other=0).to(tl.uint32, bitcast=True)
    # Constants that are loaded: ranges are not moved into the layout of the product, and masks that
    # the compiler knows cost it more instructions.
    factor = _constant(table, octet, 0)  # 2^(3 - o) for octet o
    eight, eights, top = (
        _constant(table, octet, 1),
        _constant(table, octet, 2),
        _constant(table, octet, 3),
    )
    # The seven signs of an octet become the upper bits of nibbles, whose sum comes to the top of
    # the product with 0x11111111: the eighth sign.
    signs = word[:, :, None] * factor
    odd = (signs & 0x08888888) * 0x11111111
    signs = (signs & 0x7FFFFFFF) | (odd & 0x80000000)
    later = entry >> 8
    pair0 = _pair(((entry & 0x00330033) | eight) ^ ((signs << 12) & top))
    pair1 = _pair(((entry & 0x00CC00CC) | eights) ^ ((signs << 8) & top))
    pair2 = _pair(((later & 0x00330033) | eight) ^ ((signs << 4) & top))
    pair3 = _pair(((later & 0x00CC00CC) | eights) ^ (signs & top))
    a = tl.join(tl.join(pair0, pair1), tl.join(pair2, pair3))  # [BU, BM, 4, 2, 2, 2]
    return tl.reshape(tl.permute(a, (0, 1, 2, 5, 4, 3)), (BU, BM, 32))


@triton.jit
def _header(p, row, o_u, m_u, K: tl.constexpr, WORD: tl.constexpr, WORDS: tl.constexpr):
    """Word WORD of the WORDS words of each block of 256: uint32 [BU, BM]."""
    address = p + (row * (K // 256 * WORDS))[None, :] + (o_u * WORDS + WORD)[:, None]
    return tl.load(address, mask=m_u[:, None], other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _low(word):
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _affine(acc, product, offsets, pair):
    """The sum acc + d product - dmin offsets; pair [BU, BM] has d and dmin."""
    acc += product * _low(pair)[:, :, None]
    return acc - offsets * _low(pair >> 16)[:, :, None]


@triton.jit
def _q2_k(
    acc, x, sums, p0, p1, p2, row, o_u, m_u, K: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr
):
    """Add d sum s q x - dmin sum m x, both sums of integers with x; p1 as bytes."""
    i = tl.arange(0, 16)
    mask = m_u[:, None, None]
    w_address = p0 + (row * (K // 16))[None, :, None] + (o_u * 16)[:, None, None]
    word = tl.load(w_address + i[None, None, :], mask=mask, other=0).to(tl.uint32, bitcast=True)
    s_address = p1 + (row * (K // 16))[None, :, None] + (o_u * 16)[:, None, None]
    small = tl.load(s_address + i[None, None, :], mask=mask, other=0)  # [BU, BM, 16]
    word = tl.reshape(word, (BU, BM, 4, 4))
    s = tl.reshape(small, (BU, BM, 4, 4)).to(tl.uint32) & 15
    later, last = word >> 6, word >> 12
    low = tl.join(
        tl.join(_pair((word & 0x00030003) * s), _pair((word & 0x000C000C) * s)),
        tl.join(_pair((word & 0x00300030) * s), _pair((later & 0x00030003) * s)),
    )
    high = tl.join(
        tl.join(_pair((later & 0x000C000C) * s), _pair((later & 0x00300030) * s)),
        tl.join(_pair((last & 0x00030003) * s), _pair((last & 0x000C000C) * s)),
    )
    a = tl.permute(tl.join(low, high), (0, 1, 2, 7, 3, 6, 5, 4))
    zero = tl.zeros([BU, BM, 2], tl.float32)
    product = dot_acc(tl.reshape(a, (BU, BM, 256)), x, zero)
    four = tl.arange(0, 4)
    m_address = p1.to(tl.pointer_type(tl.int32), bitcast=True) + (row * (K // 64))[None, :, None]
    m_address = m_address + (o_u * 4)[:, None, None] + four[None, None, :]
    m = tl.load(m_address, mask=mask, other=0).to(tl.uint32, bitcast=True)  # [BU, BM, 4]
    m = tl.join(_pair((m >> 4) & 0x000F000F), _pair((m >> 12) & 0x000F000F))
    m = tl.permute(m, (0, 1, 2, 4, 3))  # bytes 0, 2, 1, 3 of a word, as in `vector_columns`
    offsets = dot_acc(tl.reshape(m, (BU, BM, 16)), sums, zero)
    return _affine(acc, product, offsets, _header(p2, row, o_u, m_u, K, 0, 1))


@triton.jit
def _six_bits(lows, tops):
    """Eight numbers of 6 bits in order, their lower and upper bits in words: [BU, BM, 2, 2, 2]."""
    n0 = (lows & 15) | ((tops & 3) << 4)
    n1 = ((lows >> 4) & 15) | ((tops << 2) & 48)
    n2 = ((lows >> 8) & 15) | (tops & 48)
    n3 = ((lows >> 12) & 15) | ((tops >> 2) & 48)
    n4 = ((lows >> 16) & 15) | ((tops >> 4) & 48)
    n5 = ((lows >> 20) & 15) | ((tops >> 6) & 48)
    n6 = ((lows >> 24) & 15) | ((tops >> 8) & 48)
    n7 = (lows >> 28) | ((tops >> 10) & 48)
    even = tl.join(tl.join(n0, n4), tl.join(n2, n6))
    odd = tl.join(tl.join(n1, n5), tl.join(n3, n7))
    return tl.join(even, odd)


@triton.jit
def _q4_k(acc, x, sums, p0, p1, row, o_u, m_u, K: tl.constexpr, BU: tl.constexpr, BM: tl.constexpr):
    """As `_q2_k`, with s and m of 6 bits for 32 elements."""
    i = tl.arange(0, 32)
    address = p0 + (row * (K // 8))[None, :, None] + (o_u * 32)[:, None, None]
    word = tl.load(address + i[None, None, :], mask=m_u[:, None, None], other=0)
    word = tl.reshape(word.to(tl.uint32, bitcast=True), (BU, BM, 8, 4))
    scales = _header(p1, row, o_u, m_u, K, 1, 4)
    mins = _header(p1, row, o_u, m_u, K, 2, 4)[:, :, None]
    tops = _header(p1, row, o_u, m_u, K, 3, 4)
    s = tl.reshape(_six_bits(scales, tops), (BU, BM, 8, 1))
    tops = tops[:, :, None]
    low = tl.join(_pair((word & 0x000F000F) * s), _pair(((word >> 4) & 0x000F000F) * s))
    high = tl.join(_pair(((word >> 8) & 0x000F000F) * s), _pair(((word >> 12) & 0x000F000F) * s))
    a = tl.permute(tl.join(low, high), (0, 1, 2, 6, 3, 5, 4))
    zero = tl.zeros([BU, BM, 2], tl.float32)
    product = dot_acc(tl.reshape(a, (BU, BM, 256)), x, zero)
    twice = (tl.arange(0, 16) & 7)[None, None, :].to(tl.uint32)
    m = ((mins >> (twice * 4)) & 15) | (((tops >> (twice * 2 + 16)) & 3) << 4)
    offsets = dot_acc(m.to(tl.uint16).to(tl.float16, bitcast=True), sums, zero)
    return _affine(acc, product, offsets, _header(p1, row, o_u, m_u, K, 0, 4))

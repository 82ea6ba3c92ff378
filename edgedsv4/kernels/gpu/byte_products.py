"""Products of packed rows with a vector of bytes: four weights an instruction, sums in integers.

A thread has some neighbouring columns of each row ("lane", of `LANE_COLUMNS`) and their part of the
vector. It turns codes into bytes, four at a time, multiplies them with the vector's and applies the
scales: those of integers within a group in integers, the rest in float32. The C kernels do the same
with these types, so the terms of a sum are theirs up to the rounding of the last bit.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.dequantize.tables import iq_grid
from edgedsv4.kernels.gpu.nvidia import dot4, has_byte_products, pick4
from edgedsv4.kernels.gpu.tuples import appended, nothing

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.byte_vector import Order
    from edgedsv4.kernels.gpu.planes import DeviceMatrix

BYTE_ORDERS: dict[str, Order] = {"IQ2_XXS": "nibbles", "Q2_K": "twos"}
"""Types with such a product, and the order of the vector that goes with them."""
BLOCK = 256

LANE_COLUMNS: dict[str, int] = {"IQ2_XXS": 128, "Q2_K": 64}
"""Columns of a row that a thread takes at a time."""
_LEVELS = (8, 25, 43)


def fits_bytes(matrix: DeviceMatrix, family: str) -> bool:
    """Whether these kernels can multiply the rows of a matrix."""
    return (
        matrix.type in BYTE_ORDERS
        and has_byte_products(family)
        and matrix.cols % LANE_COLUMNS[matrix.type] == 0
    )


def byte_planes(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The planes as `load_groups` takes them, and a table."""
    p0, p1, p2 = matrix.planes[:3]
    if matrix.type == "IQ2_XXS":
        return p0, p1, p2, _grid_codes(p0.device)
    return p0, p1, p2, p0


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """The grid of IQ2_XXS, 4 bits per value, and constants: int32 [256 + 64].

    A nibble is the place of a value among 8, 25 and 43, those of the elements 0, 2, 4, 6 before
    those of 1, 3, 5, 7; with a sign in bit 2 it is the place among eight bytes, the last negated.
    Those eight come after the grid, for each thread of a warp.
    """
    grid = iq_grid("IQ2_XXS", torch.device("cpu"))  # [256, 8]
    codes = torch.zeros(256, dtype=torch.int32)
    for element in range(8):
        level = (grid[:, element] == _LEVELS[1]).int() + 2 * (grid[:, element] == _LEVELS[2]).int()
        codes |= level << (4 * (element // 2) + 16 * (element % 2))
    signed = torch.tensor([*_LEVELS, 0, *(-level for level in _LEVELS), 0], dtype=torch.int8)
    plus, minus = signed.view(torch.int32).repeat_interleave(32).split(32)
    return torch.cat((codes, plus, minus)).to(device)


@triton.jit
def load_vector(words_ptr, scales_ptr, o_l, m_l, groups, TYPE: tl.constexpr):
    """Lanes o_l [BL] of a vector: words, scales, and sums of bytes where a type has offsets."""
    if TYPE == "IQ2_XXS":
        o_g = (o_l[:, None] * 4 + tl.arange(0, 4)[None, :])[None, :, :]
        m_g = m_l[None, :, None]
        words = nothing()
        for i in tl.static_range(8):
            words = appended(words, tl.load(words_ptr + i * groups + o_g, mask=m_g, other=0))
        return words, tl.load(scales_ptr + o_g, mask=m_g, other=0.0), words
    else:
        pairs = groups // 2
        words, scales, sums = nothing(), nothing(), nothing()
        for i in tl.static_range(16):
            at = words_ptr + i * pairs + o_l[None, :]
            words = appended(words, tl.load(at, mask=m_l[None, :], other=0))
        for i in tl.static_range(2):
            at = scales_ptr + i * pairs + o_l[None, :]
            scales = appended(scales, tl.load(at, mask=m_l[None, :], other=0.0))
        for b in tl.static_range(4):
            total = words[4 * b] * 0
            for k in tl.static_range(4):
                total = dot4(words[4 * b] * 0 + 0x01010101, words[4 * b + k], total)
            sums = appended(sums, total)
        return words, scales, sums


@triton.jit
def load_lanes(p0, p1, p2, row, o_l, m_l, K: tl.constexpr, TYPE: tl.constexpr):
    """All that a product needs of rows [R, 1 or BL], int64, in lanes o_l [BL]; zero if masked."""
    four = tl.arange(0, 4)[None, None, :]
    mask = m_l[None, :, None]
    if TYPE == "IQ2_XXS":
        words = (row * (K // 32) + o_l[None, :] * 4)[:, :, None] + four
        first = tl.load(p0 + words, mask=mask, other=0, eviction_policy="evict_first")
        second = tl.load(p1 + words, mask=mask, other=0, eviction_policy="evict_first")
        block = (row * (K // 256) + o_l[None, :] // 2)[:, :, None]
        return first, second, tl.load(p2 + block, mask=mask, other=0.0)
    else:
        words = (row * (K // 16) + o_l[None, :] * 4)[:, :, None] + four
        codes = tl.load(p0 + words, mask=mask, other=0, eviction_policy="evict_first")
        # Said not to be neighbours, or a thread would get two of them, and other rows.
        within = tl.max_contiguous(row * (K // 64) + o_l[None, :], (1, 1))
        small = tl.load(p1 + within, mask=m_l[None, :], other=0)
        block = row * (K // 256) + o_l[None, :] // 4
        return codes, small, tl.load(p2 + block, mask=m_l[None, :], other=0)


@triton.jit
def load_constants(table_ptr, o_l, TYPE: tl.constexpr):
    """What `lane_products` needs of the table.

    Two of them each thread loads for itself: of a value that all share, the compiler makes a copy
    for every use.
    """
    if TYPE == "IQ2_XXS":
        own = table_ptr + 256 + (o_l & 31)[None, :, None]
        plus = tl.load(own).to(tl.uint32, bitcast=True)
        minus = tl.load(own + 32).to(tl.uint32, bitcast=True)
        return tl.load(table_ptr + tl.arange(0, 256)), plus, minus
    else:
        return 0, 0, 0


@triton.jit
def lane_products(x, loaded, constants, TYPE: tl.constexpr):
    """Products of the loaded lanes with the vector's: f32 [R, BL]."""
    words, scales, sums = x
    if TYPE == "IQ2_XXS":
        index, word, scale = loaded
        return tl.sum(_iq2_xxs(words, scales, index, word, scale, constants), 2)
    else:
        codes, small, pair = loaded
        return _q2_k(words, scales, sums, codes, small, pair)


@triton.jit
def _iq2_xxs(x, scales, index, word, scale, constants):
    """Sum of d (2 s + 1) / 8 signed values of the grid: f32 [R, BL, 4]."""
    table, plus, minus = constants
    index, word = index.to(tl.uint32, bitcast=True), word.to(tl.uint32, bitcast=True)
    # A word has seven signs of four octets, 4 bits apart; the eighth is their parity.
    three = word ^ (word >> 4) ^ (word >> 8)
    odd = three ^ (three >> 12) ^ (word >> 24)
    signs = (word & 0x0FFFFFFF) | (odd << 28)
    R: tl.constexpr = index.shape[0]
    BL: tl.constexpr = index.shape[1]
    places = tl.join(
        tl.join(index & 255, (index >> 16) & 255), tl.join((index >> 8) & 255, index >> 24)
    )
    flat = tl.reshape(places, (R * BL * 16,)).to(tl.int32)
    entries = tl.reshape(tl.gather(table, flat, 0), (R, BL, 4, 2, 2)).to(tl.uint32, bitcast=True)
    even, odd = tl.split(entries)
    e0, e2 = tl.split(even)
    e1, e3 = tl.split(odd)
    entries = (e0, e1, e2, e3)
    acc = index.to(tl.int32) * 0
    for o in tl.static_range(4):
        here = (signs << (2 - o) if o < 2 else signs >> (o - 2)) & 0x44444444
        both = entries[o] | here
        acc = dot4(pick4(both, plus, minus), x[2 * o], acc)
        acc = dot4(pick4(both >> 16, plus, minus), x[2 * o + 1], acc)
    acc *= ((word >> 28) * 2 + 1).to(tl.int32)
    return acc.to(tl.float32) * (scales * (scale.to(tl.float32) * 0.125))


@triton.jit
def _q2_k(x, scales, sums, codes, small, pair):
    """Difference d sum s q x - dmin sum m x of sums of integers: f32 [R, BL]."""
    R: tl.constexpr = codes.shape[0]
    BL: tl.constexpr = codes.shape[1]
    even, odd = tl.split(tl.reshape(codes.to(tl.uint32, bitcast=True), (R, BL, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    words = (w0, w1, w2, w3)
    small, pair = small.to(tl.uint32, bitcast=True), pair.to(tl.uint32, bitcast=True)
    d, dmin = _low(pair), _low(pair >> 16)
    out = d * 0.0
    for g in tl.static_range(2):
        product = small.to(tl.int32) * 0
        offset = product
        for half in tl.static_range(2):
            acc = small.to(tl.int32) * 0
            for k in tl.static_range(4):
                acc = dot4(
                    (words[2 * g + half] >> (2 * k)) & 0x03030303, x[8 * g + 4 * half + k], acc
                )
            product += acc * ((small >> (16 * g + 8 * half)) & 15).to(tl.int32)
            offset += sums[2 * g + half] * ((small >> (16 * g + 8 * half + 4)) & 15).to(tl.int32)
        out += scales[g] * (product.to(tl.float32) * d - offset.to(tl.float32) * dmin)
    return out


@triton.jit
def _low(word):
    return word.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)

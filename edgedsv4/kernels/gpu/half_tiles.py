"""Products with weights that are decoded to half floats, two at a time.

Two codes are cut out of a word at once, 16 bits apart, and are halves as they are: of a form that
one packed multiplication or addition turns into the weight. So a weight costs two to three
instructions, and its rounding is 2^-12 of its size (2^-25 at least), less than that of a bfloat16.

Loads for a step are issued one step ahead, and the words that a look-up needs two steps ahead: the
compiler would copy each of them to shared memory and back instead.
Activations are halves, too. |x| above 65504 or |d| of a block above 1/8 give infinities.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.dequantize.tables import iq_grid
from edgedsv4.kernels.gpu.conversions import INTERPRETED, dot_acc, e8m0_to_f32
from edgedsv4.kernels.gpu.decode_common import hidden, high, join4, join8, low, spread
from edgedsv4.kernels.gpu.decode_product import plane_numbers, plane_words
from edgedsv4.kernels.gpu.fragments import weights_in_positions
from edgedsv4.kernels.gpu.planes import DeviceMatrix, plane_arguments

HALF_TYPES = frozenset(("IQ2_XXS", "Q2_K", "MXFP4"))
"""Types with such a product."""

_PLACES = (0, 2, 8, 10)
_CONSTANTS = (0x00080008, 0x00200020)


def half_planes(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Planes as `add_halves` takes them; of other types as `plane_arguments` has them."""
    planes = plane_arguments(matrix)
    if matrix.type == "IQ2_XXS":
        return (*planes[:3], _grid_codes(planes[0].device))
    return planes


@cache
def _grid_codes(device: torch.device) -> Tensor:
    """The grid of IQ2_XXS in 16 bits per entry, int16 [256], then `_CONSTANTS` in two numbers each.

    A value is 8, 25 or 43: in two bits 0, 1 or 2. Those of the elements 2 p + h are bits
    `_PLACES[p]` + 4 h and above.
    """
    grid = iq_grid("IQ2_XXS", torch.device("cpu")).to(torch.int64)  # [256, 8]
    code = (grid > 8).long() + (grid > 25).long()
    codes = torch.zeros(256, dtype=torch.int64)
    for element in range(8):
        pair, half = divmod(element, 2)
        codes |= code[:, element] << (_PLACES[pair] + 4 * half)
    constants = torch.tensor(_CONSTANTS, dtype=torch.int32).view(torch.int16)
    return torch.cat((codes.to(torch.int16), constants)).to(device)


@triton.jit
def add_halves(
    acc,
    x_ptr,
    x_mask,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    table,
    row_a,
    row_b,
    mask_a,
    mask_b,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BK: tl.constexpr,
):
    """Add to acc [2 BN, BT] the products of rows of two matrices with x [BK, BT], f16.

    Of 16 rows of the operand the first 8 are rows `row_a` [BN] of a, the others `row_b` of b.
    """
    LAST: tl.constexpr = (K - 1) // BK * BK
    a, a_s, a_d = _fetch(a0, a1, a2, row_a, mask_a, 0, K, TYPE, BK)
    b, b_s, b_d = _fetch(b0, b1, b2, row_b, mask_b, 0, K, TYPE, BK)
    if TYPE == "IQ2_XXS":
        ae0, ae1, ae2, ae3, a_sign, a_scale = _prepared(table, a, a_s, a_d)
        be0, be1, be2, be3, b_sign, b_scale = _prepared(table, b, b_s, b_d)
        SECOND: tl.constexpr = BK if BK < LAST else LAST
        a, a_s, a_d = _fetch(a0, a1, a2, row_a, mask_a, SECOND, K, TYPE, BK)
        b, b_s, b_d = _fetch(b0, b1, b2, row_b, mask_b, SECOND, K, TYPE, BK)
        for k0 in range(0, K, BK):
            x = tl.load(x_ptr + k0, mask=x_mask, other=0.0)
            an0, an1, an2, an3, a_sign1, a_scale1 = _prepared(table, a, a_s, a_d)
            bn0, bn1, bn2, bn3, b_sign1, b_scale1 = _prepared(table, b, b_s, b_d)
            after = tl.minimum(k0 + 2 * BK, LAST)
            a, a_s, a_d = _fetch(a0, a1, a2, row_a, mask_a, after, K, TYPE, BK)
            b, b_s, b_d = _fetch(b0, b1, b2, row_b, mask_b, after, K, TYPE, BK)
            w_a = _iq2_xxs(ae0, ae1, ae2, ae3, a_sign, a_scale, table)
            w_b = _iq2_xxs(be0, be1, be2, be3, b_sign, b_scale, table)
            acc = dot_acc(weights_in_positions(_interleaved(w_a, w_b)), x, acc)
            ae0, ae1, ae2, ae3, a_sign, a_scale = an0, an1, an2, an3, a_sign1, a_scale1
            be0, be1, be2, be3, b_sign, b_scale = bn0, bn1, bn2, bn3, b_sign1, b_scale1
        return acc * 128.0
    else:
        for k0 in range(0, K, BK):
            x = tl.load(x_ptr + k0, mask=x_mask, other=0.0)
            after = tl.minimum(k0 + BK, LAST)
            w_a = _weights(a, a_s, a_d, table, TYPE)
            w_b = _weights(b, b_s, b_d, table, TYPE)
            a, a_s, a_d = _fetch(a0, a1, a2, row_a, mask_a, after, K, TYPE, BK)
            b, b_s, b_d = _fetch(b0, b1, b2, row_b, mask_b, after, K, TYPE, BK)
            acc = dot_acc(weights_in_positions(_interleaved(w_a, w_b)), x, acc)
        return acc


@triton.jit
def _interleaved(w_a, w_b):
    """Eight rows of each in turn: [2 BN, BK]."""
    BN: tl.constexpr = w_a.shape[0]
    BK: tl.constexpr = w_a.shape[1]
    w = tl.permute(tl.reshape(tl.join(w_a, w_b), (BN // 8, 8, BK, 2)), (0, 3, 1, 2))
    return tl.reshape(w, (2 * BN, BK))


@triton.jit
def _fetch(p0, p1, p2, row, row_mask, k0, K: tl.constexpr, TYPE: tl.constexpr, BK: tl.constexpr):
    """Words of a tile as the decoder takes them."""
    if TYPE == "IQ2_XXS":
        index = plane_words(p0, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
        word = plane_words(p1, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
        d = plane_numbers(p2, row, row_mask, k0, K, 256, BK)  # [BN, 1]
        return index, word, d
    elif TYPE == "MXFP4":
        word = plane_words(p0, row, row_mask, k0, K, 8, BK)  # [BN, BK / 8]
        e = plane_numbers(p1, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
        return word, e, e
    else:
        # Two words, and bytes, at once: then a thread has one number of each tile.
        word_ptr = p0.to(tl.pointer_type(tl.int64))
        words = plane_numbers(word_ptr, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
        small_ptr = p1.to(tl.pointer_type(tl.int16))
        small = plane_numbers(small_ptr, row, row_mask, k0, K, 32, BK)  # [BN, BK / 32]
        both = plane_words(p2, row, row_mask, k0, K, 256, BK)  # [BN, 1]
        return words, small, both


@triton.jit
def _prepared(table, index, word, d):
    """Entries of the four octets of each group, its signs, and its scale twice in a word."""
    G: tl.constexpr = word.shape[1]
    e0 = _entry(table, index & 255)
    e1 = _entry(table, (index >> 8) & 255)
    e2 = _entry(table, (index >> 16) & 255)
    e3 = _entry(table, index >> 24)
    scale = ((word >> 28).to(tl.float32) + 0.5) * spread(d.to(tl.float32) * 32768.0, G)
    signs = word & 0x0FFFFFFF
    odd = signs ^ (signs >> 16)
    odd = odd ^ (odd >> 8)
    signs = signs | ((odd ^ (odd >> 4)) << 28)
    return e0, e1, e2, e3, signs, scale.to(tl.float16)


@triton.jit
def _entry(table, index):
    """One entry per group; flat, or the compiler would choose another order of threads."""
    BN: tl.constexpr = index.shape[0]
    G: tl.constexpr = index.shape[1]
    return tl.reshape(tl.load(table + tl.reshape(index, (BN * G,))), (BN, G))


@triton.jit
def _iq2_xxs(e0, e1, e2, e3, signs, scale, table):
    """Weights of groups of 32 over 128, f16 [BN, 32 G], from what `_prepared` makes [BN, G]."""
    BN: tl.constexpr = signs.shape[0]
    G: tl.constexpr = signs.shape[1]
    constants = table.to(tl.pointer_type(tl.uint32)) + 128
    eight, eights = tl.load(constants), tl.load(constants + 1)
    quarter = scale * tl.full(scale.shape, 0.25, tl.float16)
    o0 = _octet(e0, signs << 3, scale, quarter, eight, eights)
    o1 = _octet(e1, signs << 2, scale, quarter, eight, eights)
    o2 = _octet(e2, signs << 1, scale, quarter, eight, eights)
    o3 = _octet(e3, signs, scale, quarter, eight, eights)
    x = tl.permute(join4(o0, o1, o2, o3), (0, 1, 5, 6, 2, 3, 4))
    return tl.reshape(x, (BN, 32 * G))


@triton.jit
def _octet(entry, signs, scale, quarter, eight, eights):
    """Eight weights [BN, G, 2, 2, 2]; the signs of pair p are bits 3 + 4 p and 19 + 4 p."""
    entry = entry.to(tl.uint16, bitcast=True).to(tl.uint32)
    code = (entry | (entry << 12)) & 0x0F0F0F0F
    # A code c becomes 17 c and one more if c = 2: the value less 8, of which bit 3 is never set.
    value = code * 17 + ((code >> 1) & 0x05050505)
    later = value >> 8
    top = 0x80008000
    return join8(
        *_scaled(((value & 0x00330033) | eight) ^ ((signs << 12) & top), scale),
        *_scaled(((value & 0x00CC00CC) | eights) ^ ((signs << 8) & top), quarter),
        *_scaled(((later & 0x00330033) | eight) ^ ((signs << 4) & top), scale),
        *_scaled(((later & 0x00CC00CC) | eights) ^ (signs & top), quarter),
    )


@triton.jit
def _scaled(pair, scale):
    """Both halves of a word times a scale; the second one first, as a compiler pairs them so."""
    first, second = _halves(pair)
    second *= scale
    return first * scale, second


@triton.jit
def _weights(a, b, c, table, TYPE: tl.constexpr):
    """Weights f16 of a tile from what `_fetch` loads."""
    if TYPE == "MXFP4":
        return _mxfp4(a, b)
    else:
        return _q2_k(a, b, c, table)


@triton.jit
def _mxfp4(words, e):
    """Weights f16 [BN, 32 G] from words [BN, 4 G] and exponents [BN, G]."""
    BN: tl.constexpr = words.shape[0]
    G: tl.constexpr = e.shape[1]
    # Values are cut out times 2^-14.
    scale = (e8m0_to_f32(e) * 16384.0).to(tl.float16)
    even, odd = tl.split(tl.reshape(words, (BN, G, 2, 2)))
    word0, word2 = tl.split(even)
    word1, word3 = tl.split(odd)
    x = join4(_e2m1(word0, scale), _e2m1(word1, scale), _e2m1(word2, scale), _e2m1(word3, scale))
    x = tl.permute(x, (0, 1, 5, 6, 2, 3, 4))
    return tl.reshape(x, (BN, 32 * G))


@triton.jit
def _e2m1(word, scale):
    """Eight weights [BN, G, 2, 2, 2]; the places of the bits are those of `pack_e2m1`."""
    pair2 = ((word << 2) & 0x80008000) | ((word << 6) & 0x0E000E00)
    pair3 = ((word << 1) & 0x80008000) | ((word << 9) & 0x0E000E00)
    return join8(
        *_scaled(word & 0x8E008E00, scale),
        *_scaled((word << 3) & 0x8E008E00, scale),
        *_scaled(pair2, scale),
        *_scaled(pair3, scale),
    )


@triton.jit
def _q2_k(words, small, both, table):
    """Weights s q - m of pairs of sub-blocks, f16 [BN, 32 G], from what `_fetch` loads."""
    BN: tl.constexpr = words.shape[0]
    G: tl.constexpr = words.shape[1]
    words, small = words.to(tl.uint64, bitcast=True), small.to(tl.uint32)
    d, minus = spread(low(both), G), spread(-high(both), G)
    first = _sub_block(words.to(tl.uint32), small & 255, d, minus, table)
    second = _sub_block((words >> 32).to(tl.uint32), (small >> 8) & 255, d, minus, table)
    x = tl.permute(tl.join(first, second), (0, 1, 6, 5, 2, 3, 4))
    return tl.reshape(x, (BN, 32 * G))


@triton.jit
def _sub_block(word, small, d, minus, table):
    """Sixteen weights, [BN, G, 2, 2, 2, 2]: the first of the axes last."""
    # Two bits below a one are 1 + q / 4.
    scale = (small & 15).to(tl.float32) * d * 4.0
    offset = ((small >> 4).to(tl.float32) * minus - scale).to(tl.float16)
    scale = scale.to(tl.float16)
    mask, one = 0x03000300, hidden(0x3C003C00, table)
    first = join8(
        *_affine(((word << 8) & mask) | one, scale, offset),
        *_affine(((word << 6) & mask) | one, scale, offset),
        *_affine(((word << 4) & mask) | one, scale, offset),
        *_affine(((word << 2) & mask) | one, scale, offset),
    )
    second = join8(
        *_affine((word & mask) | one, scale, offset),
        *_affine(((word >> 2) & mask) | one, scale, offset),
        *_affine(((word >> 4) & mask) | one, scale, offset),
        *_affine(((word >> 6) & mask) | one, scale, offset),
    )
    return tl.join(first, second)


@triton.jit
def _affine(pair, scale, offset):
    """Both halves of a word times a scale plus an offset, in the order of `_scaled`."""
    first, second = _halves(pair)
    second = _fma(second, scale, offset)
    return _fma(first, scale, offset), second


@triton.jit
def _fma(x, scale, offset):
    """With one rounding."""
    if INTERPRETED:
        x = x.to(tl.float32) * scale.to(tl.float32) + offset.to(tl.float32)
        return x.to(tl.float16)
    else:
        return tl.fma(x, scale, offset)


@triton.jit
def _halves(pair):
    """The two half floats in a word."""
    first = pair.to(tl.uint16).to(tl.float16, bitcast=True)
    return first, (pair >> 16).to(tl.uint16).to(tl.float16, bitcast=True)

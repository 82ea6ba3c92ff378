"""Decoders of the K types: 256 elements in sub-blocks of 16 or 32 with small integer scales.

Each function: uint8 [n, block_bytes] -> f32 [n, 256]. The order of the float operations is ggml's,
so the results are equal bit for bit. Notation: d and dmin half-precision scales, s and m integer
scale and offset of a sub-block, q stored integer.

Source: block structs and dequantize functions of ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.fields import bit_planes, halves, look_up, spread
from edgedsv4.kernels.dequantize.tables import iq4_values


def _pairs(data: Tensor) -> tuple[Tensor, Tensor]:
    """Two half floats in four bytes: two f32 [n, 1]."""
    both = halves(data)
    return both[:, :1], both[:, 1:]


def _six_bit_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Eight 6-bit scales and offsets in 12 bytes (Q4_K, Q5_K): two f32 [n, 8].

    Bytes 0-3 and 4-7 hold scales and offsets 0-3 in their low six bits; bytes 8-11 hold the low
    four bits of scales and offsets 4-7, whose upper two bits are on top of the first eight bytes.
    """
    first, second, third = packed.split(4, dim=1)
    scales = torch.cat((first & 63, (third & 15) | ((first >> 6) << 4)), dim=1)
    offsets = torch.cat((second & 63, (third >> 4) | ((second >> 6) << 4)), dim=1)
    return scales.float(), offsets.float()


def q2_k(data: Tensor) -> Tensor:
    """Fields u4 s, u4 m [16 each], u2 q[256], f16 d, f16 dmin; x = d s q - dmin m."""
    d, dmin = _pairs(data[:, 80:])
    packed = data[:, :16]
    scale = (packed & 15).float().mul_(d).unsqueeze(2)
    offset = (packed >> 4).float().mul_(dmin).unsqueeze(2)
    q = bit_planes(data[:, 16:80], (0, 2, 4, 6), 3, 32).view(-1, 16, 16)
    return q.float().mul_(scale).sub_(offset).flatten(1)


def q3_k(data: Tensor) -> Tensor:
    """Fields third bits [256], u2 q[256], u6 s[16], f16 d; x = d (s - 32) (q + 4 bit - 4)."""
    lows = torch.cat((data[:, 96:104] & 15, data[:, 96:104] >> 4), dim=1)
    highs = torch.cat([(data[:, 104:108] >> shift) & 3 for shift in (0, 2, 4, 6)], dim=1)
    scale = (lows | (highs << 4)).float().sub_(32).mul_(halves(data[:, 108:]))
    q = bit_planes(data[:, 32:96], (0, 2, 4, 6), 3, 32).flatten(1)
    third = bit_planes(data[:, :32], range(8), 1, 32).flatten(1)
    q = q.bitwise_or_(third << 2).view(-1, 16, 16)
    return q.float().sub_(4).mul_(scale.unsqueeze(2)).flatten(1)


def q4_k(data: Tensor) -> Tensor:
    """Fields f16 d, f16 dmin, u6 s and m [8 each], u4 q[256]; x = d s q - dmin m."""
    d, dmin = _pairs(data[:, :4])
    scale, offset = _six_bit_scales(data[:, 4:16])
    q = bit_planes(data[:, 16:], (0, 4), 15, 32).view(-1, 8, 32)
    return _affine(q, scale.mul_(d), offset.mul_(dmin))


def q5_k(data: Tensor) -> Tensor:
    """Fields f16 d, f16 dmin, u6 s and m [8 each], fifth bits [256], u4 q[256]; x as Q4_K."""
    d, dmin = _pairs(data[:, :4])
    scale, offset = _six_bit_scales(data[:, 4:16])
    q = bit_planes(data[:, 48:], (0, 4), 15, 32).view(-1, 8, 32)
    fifth = bit_planes(data[:, 16:48], range(8), 1, 32).view(-1, 8, 32)
    return _affine(q.bitwise_or_(fifth << 4), scale.mul_(d), offset.mul_(dmin))


def _affine(q: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """Integers [n, sub-blocks, w] times scale minus offset [n, sub-blocks], as [n, 256]."""
    return q.float().mul_(scale.unsqueeze(2)).sub_(offset.unsqueeze(2)).flatten(1)


def q6_k(data: Tensor) -> Tensor:
    """Fields u4 q[256], upper two bits [256], i8 s[16], f16 d; x = d s (q - 32)."""
    scale = data[:, 192:208].view(torch.int8).float().mul_(halves(data[:, 208:]))
    lows = bit_planes(data[:, :128], (0, 4), 15, 64).flatten(1)
    highs = bit_planes(data[:, 128:192], (0, 2, 4, 6), 3, 32).flatten(1)
    q = lows.bitwise_or_(highs << 4).view(-1, 16, 16)
    return q.float().sub_(32).mul_(scale.unsqueeze(2)).flatten(1)


def iq4_xs(data: Tensor) -> Tensor:
    """Fields f16 d, upper scale bits u16, u4 s[8], u4 q[256]; x = d (s - 32) values[q]."""
    lows = spread(data[:, 4:8], (0, 4), 15)
    highs = spread(data[:, 2:4], (0, 2, 4, 6), 3)
    scale = (lows | (highs << 4)).float().sub_(32).mul_(halves(data[:, :2]))
    q = bit_planes(data[:, 8:], (0, 4), 15, 16).view(-1, 8, 32)
    return look_up(iq4_values(data.device), q).mul_(scale.unsqueeze(2)).flatten(1)

"""Encoders of Q2_K, Q4_K and Q6_K: the searches' integers, packed as ggml's block structs.

Each function: f32 [n, 256] and weights of the same shape -> uint8 [n, block_bytes].

Source: block structs of ggml (ggml-common.h); the searches are our own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.quantize.affine_search import affine_blocks
from edgedsv4.kernels.quantize.rounding import half_bytes
from edgedsv4.kernels.quantize.scale_search import scaled_blocks


def q2_k(x: Tensor, w: Tensor) -> Tensor:
    """Fields u4 s, u4 m [16 each], u2 q[256], f16 d, f16 dmin; x = d s q - dmin m."""
    found = affine_blocks(x.unflatten(1, (16, 16)), w.unflatten(1, (16, 16)), 3, 15)
    scales = _bytes(found.s) | (_bytes(found.m) << 4)
    integers = _two_bit_planes(_bytes(found.q).flatten(1))
    return torch.cat((scales, integers, half_bytes(found.d), half_bytes(found.dmin)), dim=1)


def q4_k(x: Tensor, w: Tensor) -> Tensor:
    """Fields f16 d, f16 dmin, u6 s and m [8 each], u4 q[256]; x = d s q - dmin m."""
    found = affine_blocks(x.unflatten(1, (8, 32)), w.unflatten(1, (8, 32)), 15, 63)
    q = _bytes(found.q).view(len(x), 4, 2, 32)
    integers = (q[:, :, 0] | (q[:, :, 1] << 4)).flatten(1)
    scales = _six_bit_scales(_bytes(found.s), _bytes(found.m))
    return torch.cat((half_bytes(found.d), half_bytes(found.dmin), scales, integers), dim=1)


def q6_k(x: Tensor, w: Tensor) -> Tensor:
    """Fields u4 q[256], upper two bits [256], i8 s[16], f16 d; x = d s (q - 32)."""
    found = scaled_blocks(x.unflatten(1, (16, 16)), w.unflatten(1, (16, 16)), -32, 31)
    q = _bytes(found.q + 32).flatten(1)
    halves = q.view(len(x), 2, 2, 64) & 15
    lows = (halves[:, :, 0] | (halves[:, :, 1] << 4)).flatten(1)
    scales = found.s.to(torch.int8).view(torch.uint8)
    return torch.cat((lows, _two_bit_planes(q >> 4), scales, half_bytes(found.d)), dim=1)


def _bytes(integers: Tensor) -> Tensor:
    return integers.to(torch.uint8).contiguous()


def _two_bit_planes(q: Tensor) -> Tensor:
    """Values 0..3 [n, 256] as [n, 64]: byte l of each half holds elements l, l+32, l+64, l+96."""
    planes = q.view(len(q), 2, 4, 32)
    packed = planes[:, :, 0] | (planes[:, :, 1] << 2)
    return (packed | (planes[:, :, 2] << 4) | (planes[:, :, 3] << 6)).flatten(1)


def _six_bit_scales(s: Tensor, m: Tensor) -> Tensor:
    """Eight 6-bit scales and offsets [n, 8] each in 12 bytes, as `dequantize.k_blocks` reads them.

    The low six bits of bytes 0-3 and 4-7 are scales and offsets 0-3; bytes 8-11 hold the low four
    bits of the others, whose upper two bits are on top of the first eight bytes.
    """
    first = s[:, :4] | ((s[:, 4:] >> 4) << 6)
    second = m[:, :4] | ((m[:, 4:] >> 4) << 6)
    third = (s[:, 4:] & 15) | ((m[:, 4:] & 15) << 4)
    return torch.cat((first, second, third), dim=1)

"""Decoders of the 32-element types with one half-precision scale, and of the ternary types.

Each function: uint8 [n, block_bytes] -> f32 [n, block_elements]. The order of the float operations
is ggml's, so the results are equal bit for bit. Notation: d scale, m offset, q stored integer.

Source: block structs and dequantize functions of ggml (ggml-common.h, ggml-quants.c).
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.fields import bit_planes, halves, look_up, nibbles, spread
from edgedsv4.kernels.dequantize.tables import iq4_values


def _fifth_bits(field: Tensor) -> Tensor:
    """Bit e of a 32-bit word belongs to element e and counts 16: uint8 [n, 4] -> uint8 [n, 32]."""
    return spread(field, range(8), 1) << 4


def q8_0(data: Tensor) -> Tensor:
    """Fields f16 d, i8 q[32]; x = d q."""
    return data[:, 2:].view(torch.int8).float().mul_(halves(data[:, :2]))


def q4_0(data: Tensor) -> Tensor:
    """Fields f16 d, u4 q[32]; x = d (q - 8)."""
    return nibbles(data[:, 2:]).float().sub_(8).mul_(halves(data[:, :2]))


def q4_1(data: Tensor) -> Tensor:
    """Fields f16 d, f16 m, u4 q[32]; x = d q + m."""
    d, m = halves(data[:, :4]).split(1, dim=1)
    return nibbles(data[:, 4:]).float().mul_(d).add_(m)


def q5_0(data: Tensor) -> Tensor:
    """Fields f16 d, fifth bits u32, u4 q[32]; x = d (q - 16)."""
    q = nibbles(data[:, 6:]).bitwise_or_(_fifth_bits(data[:, 2:6]))
    return q.float().sub_(16).mul_(halves(data[:, :2]))


def q5_1(data: Tensor) -> Tensor:
    """Fields f16 d, f16 m, fifth bits u32, u4 q[32]; x = d q + m."""
    d, m = halves(data[:, :4]).split(1, dim=1)
    q = nibbles(data[:, 8:]).bitwise_or_(_fifth_bits(data[:, 4:8]))
    return q.float().mul_(d).add_(m)


def iq4_nl(data: Tensor) -> Tensor:
    """Fields f16 d, u4 q[32]; x = d values[q]."""
    return look_up(iq4_values(data.device), nibbles(data[:, 2:])).mul_(halves(data[:, :2]))


def tq1_0(data: Tensor) -> Tensor:
    """Fields u8 q[48], u8 r[4], f16 d; five (r: four) base-3 digits per byte, x = d (digit - 1).

    A byte holds the digits as a fraction: multiplying by 3^k modulo 256 brings digit k to the top.
    """
    n = len(data)
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device=data.device).view(1, 5, 1)
    parts = (
        data[:, None, :32] * powers,
        data[:, None, 32:48] * powers,
        data[:, None, 48:52] * powers[:, :4],
    )
    fractions = torch.cat([part.reshape(n, -1) for part in parts], dim=1)
    digits = (fractions.to(torch.int16) * 3) >> 8
    return digits.float().sub_(1).mul_(halves(data[:, 52:]))


def tq2_0(data: Tensor) -> Tensor:
    """Fields u2 q[256], f16 d; x = d (q - 1)."""
    q = bit_planes(data[:, :64], (0, 2, 4, 6), 3, 32).flatten(1)
    return q.float().sub_(1).mul_(halves(data[:, 64:]))

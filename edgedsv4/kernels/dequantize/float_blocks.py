"""Decoders of the small floats (E2M1 in blocks or plain, FP8, E8M0) and of the IEEE types.

Each function: uint8 [n, block_bytes] -> f32 [n, block_elements]. Types whose scales are a separate
tensor (FP8_E4M3, FP4_E2M1) come out unscaled here; the caller applies them.

Source: OCP 8-bit floating point and Microscaling (MX) specifications; ggml's block structs for
MXFP4 and NVFP4.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.fields import as_type, bit_planes, look_up, nibbles
from edgedsv4.kernels.dequantize.tables import (
    e4m3_values,
    e5m2_values,
    e8m0_values,
    half_e8m0_values,
    nvfp4_scales,
)


def e2m1(codes: Tensor) -> Tensor:
    """4-bit floats: uint8 codes 0..15 -> f32 of the same shape.

    Sign, two exponent bits and the mantissa bit are put into the upper byte of a half float, where
    they stand for a number 2^14 times smaller; faster than a table, and exact, code 8 (-0)
    included.
    """
    upper = ((codes & 8) << 4) | ((codes & 7) << 1)
    return (upper.view(torch.int8).to(torch.int16) << 8).view(torch.float16).float().mul_(2.0**14)


def _ggml_e2m1(codes: Tensor) -> Tensor:
    """E2M1 as ggml's integer code book has it: code 8 is +0."""
    return e2m1(codes).add_(0.0)


def fp4_e2m1(data: Tensor) -> Tensor:
    """Two E2M1 codes per byte, the first in the low nibble."""
    word = data.to(torch.int16)
    codes = (
        (word << 4) | word
    ) & 0x0F0F  # low nibble to the lower byte, high nibble to the upper one
    return e2m1(codes.view(torch.uint8))


def mxfp4(data: Tensor) -> Tensor:
    """Fields u8 e, E2M1 q[32] (all low nibbles first); x = 2^(e - 127) q.

    e = 255 is NaN in the MX specification; ggml takes it as 2^128, and so does this decoder.
    `find_bad_scales` reports it.
    """
    # Doubled values and half the scale, because 2^128 is no f32.
    scale = look_up(half_e8m0_values(data.device), data[:, :1])
    return _ggml_e2m1(nibbles(data[:, 1:])).mul_(2).mul_(scale)


def nvfp4(data: Tensor) -> Tensor:
    """Fields u8 s[4], E2M1 q[4][16] (low nibbles first within 16); x = E4M3(s) q.

    The tensor scale that goes with the type is not applied.
    """
    scale = look_up(nvfp4_scales(data.device), data[:, :4]).unsqueeze(2)
    codes = bit_planes(data[:, 4:], (0, 4), 15, 8).flatten(2)  # [n, 4, 16]
    return _ggml_e2m1(codes).mul_(scale).flatten(1)


def fp8_e4m3(data: Tensor) -> Tensor:
    """One OCP E4M3 number per byte."""
    return look_up(e4m3_values(data.device), data)


def fp8_e5m2(data: Tensor) -> Tensor:
    """One OCP E5M2 number per byte."""
    return look_up(e5m2_values(data.device), data)


def e8m0(data: Tensor) -> Tensor:
    """One power of two per byte."""
    return look_up(e8m0_values(data.device), data)


def f32(data: Tensor) -> Tensor:
    """IEEE single precision."""
    return as_type(data, torch.float32)


def f16(data: Tensor) -> Tensor:
    """IEEE half precision."""
    return as_type(data, torch.float16).float()


def bf16(data: Tensor) -> Tensor:
    """The upper half of an f32."""
    return as_type(data, torch.bfloat16).float()


def f64(data: Tensor) -> Tensor:
    """IEEE double precision, rounded to f32."""
    return as_type(data, torch.float64).float()

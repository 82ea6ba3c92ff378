"""Encoders of the types whose scale follows from the largest value: Q8_0 and MXFP4, and of floats.

Q8_0 and, without importance, MXFP4 are ggml's rule and give its bytes. With importance MXFP4 also
tries the exponents beside the standard one.

Each function: f32 [n, block_elements] (and weights) -> uint8 [n, block_bytes].

Source: OCP Microscaling specification (the exponent rule, round to nearest); ggml's reference
quantizers for the order of float operations and ties.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.kernels.dequantize.float_blocks import e2m1
from edgedsv4.kernels.dequantize.tables import half_e8m0_values
from edgedsv4.kernels.quantize.rounding import half_bytes, keep_better, reciprocal

_E2M1_MAX_EXPONENT = 2  # 6 = 1.5 * 2^2
_E8M0_BIAS = 127
# Between the doubled values 0 1 2 3 4 6 8 12 of E2M1; a value on the line gets the smaller code.
_BOUNDARIES = (0.5, 1.5, 2.5, 3.5, 5.0, 7.0, 10.0)


def f32(x: Tensor) -> Tensor:
    """IEEE single precision."""
    return x.contiguous().view(torch.uint8)


def f16(x: Tensor) -> Tensor:
    """IEEE half precision, rounded to nearest even."""
    return half_bytes(x)


def bf16(x: Tensor) -> Tensor:
    """The upper half of an f32, rounded to nearest even."""
    return x.bfloat16().contiguous().view(torch.uint8)


def q8_0(x: Tensor) -> Tensor:
    """Fields f16 d, i8 q[32]; d = max|x| / 127, q = x / d rounded half away from zero."""
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * reciprocal(d)
    magnitude = scaled.abs()
    whole = magnitude.floor()
    q = (whole + (2 * (magnitude - whole)).floor()).copysign_(scaled)
    return torch.cat((half_bytes(d), q.to(torch.int8).view(torch.uint8)), dim=1)


def mxfp4(x: Tensor, w: Tensor | None = None) -> Tensor:
    """Fields u8 e, E2M1 q[32] (all low nibbles first); x = 2^(e - 127) q.

    The standard exponent puts the largest value between 4 and 8, so one above 6 is cut off.

    Args:
        x: f32 [n, 32].
        w: weights of the same shape; with them e - 1, e, e + 1 are compared by weighted error.
    """
    standard = _standard_exponent(x)
    exponent, codes = standard, _e2m1_codes(x, standard)
    if w is not None:
        best: tuple[Tensor, ...] = (_error(x, w, standard, codes), standard, codes)
        for step in (1, -1):
            moved = (standard + step).clamp_(0, 254)
            moved_codes = _e2m1_codes(x, moved)
            best = keep_better(best, (_error(x, w, moved, moved_codes), moved, moved_codes))
        _, exponent, codes = best
    packed = codes[:, :16] | (codes[:, 16:] << 4)
    return torch.cat((exponent.to(torch.uint8), packed), dim=1)


def _standard_exponent(x: Tensor) -> Tensor:
    """Stored exponent [n, 1]: floor(log2(max|x|)) - 2 + 127, at least 0; 0 for a block of zeros."""
    largest = x.abs().amax(1, keepdim=True)
    # frexp counts mantissas from one half, so its exponent is one above floor(log2).
    exponent = torch.frexp(largest).exponent - 1 - _E2M1_MAX_EXPONENT + _E8M0_BIAS
    return torch.where(largest > 0, exponent, 0).clamp_(0, 254)


def _half_scale(exponent: Tensor) -> Tensor:
    return half_e8m0_values(exponent.device)[exponent]


def _e2m1_codes(x: Tensor, exponent: Tensor) -> Tensor:
    """Nearest code per element, uint8 [n, 32]; what rounds to zero has no sign."""
    magnitude, step = x.abs(), _half_scale(exponent)
    code = torch.zeros_like(x, dtype=torch.uint8)
    for boundary in _BOUNDARIES:
        code += magnitude > boundary * step
    return torch.where((x < 0) & (code > 0), code | 8, code)


def _error(x: Tensor, w: Tensor, exponent: Tensor, codes: Tensor) -> Tensor:
    """Weighted squared error of blocks, [n, 1]."""
    rest = x - e2m1(codes).mul_(2).mul_(_half_scale(exponent))
    return rest.square_().mul_(w).sum(1, keepdim=True)

"""Steps that all searches share: rounding to levels and to half floats, keeping the better one."""

from __future__ import annotations

import torch
from torch import Tensor

HALF_MAX = 65504.0
"""Largest half float."""


def reciprocal(x: Tensor) -> Tensor:
    """1 / x, and 0 where that is no finite number."""
    inverse = 1 / x
    return torch.where(inverse.isfinite(), inverse, 0.0)


def round_to_half(x: Tensor) -> Tensor:
    """The nearest half float in 0..65504, as f32."""
    return x.clamp(0, HALF_MAX).half().float()


def round_up_to_half(x: Tensor) -> Tensor:
    """The smallest half float not below x, as f32; x [...] in 0..65504.

    For the step of integers with a fixed range: small weights need subnormal steps, which are far
    apart, and one that was rounded down would cut the range of values off.
    """
    nearest = x.clamp(0, HALF_MAX).half()
    bits = nearest.view(torch.int16) + (nearest.float() < x).to(torch.int16)
    return bits.view(torch.float16).float().clamp_(max=HALF_MAX)


def round_to_level(x: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """Nearest integer of x / scale in low..high: x [..., W], scale [...]; 0 where scale is 0."""
    return (x * reciprocal(scale).unsqueeze(-1)).round_().clamp_(low, high)


def keep_better(best: tuple[Tensor, ...], found: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Elementwise the candidate whose first tensor is smaller; the earlier one when equal.

    Args:
        best: what was best until now; the first tensor is compared, the others follow it.
        found: a candidate of the same shapes; a first tensor of one column decides for whole rows.
    """
    is_better = found[0] < best[0]
    return tuple(torch.where(is_better, f, b) for f, b in zip(found, best, strict=True))


def half_bytes(x: Tensor) -> Tensor:
    """Half floats as they are stored: f32 [n, k] -> uint8 [n, 2k]."""
    return x.half().contiguous().view(torch.uint8)

"""Best scales and offsets of sub-blocks with small unsigned integers: x ~ d s q - dmin m.

Two least-squares problems, solved by turns. Alone, a sub-block wants real numbers a, b with
x ~ a q - b: several step sizes are tried, each followed by a fit of a and b to the integers it
gave. Together, the sub-blocks of a block share d and dmin, and s and m are integers: s and m of
every sub-block move to the best neighbouring pair, then d and dmin are fitted to all 256 elements.
Errors are always those of the numbers that will be stored, half-precision rounding included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from edgedsv4.kernels.quantize.rounding import (
    keep_better,
    reciprocal,
    round_to_half,
    round_to_level,
    round_up_to_half,
)

# Steps tried per sub-block, as levels more or less than the range of the values has.
_EXTRA_LEVELS: Final = (-1.0, -0.67, -0.33, 0.0, 0.33, 0.67, 1.0)
_FITS_PER_STEP: Final = 2
_ROUNDS: Final = 2
_MOVES: Final = tuple((i, j) for i in (0, -1, 1) for j in (0, -1, 1))
# Below this share of its largest value the determinant of a fit is rounding noise.
_SINGULAR: Final = 1e-6


@dataclass(frozen=True, slots=True)
class AffineBlocks:
    """Stored numbers of n blocks of S sub-blocks of W elements, all as f32."""

    d: Tensor
    """[n, 1], a half float's value."""
    dmin: Tensor
    """[n, 1], a half float's value."""
    s: Tensor
    """[n, S], integers."""
    m: Tensor
    """[n, S], integers."""
    q: Tensor
    """[n, S, W], integers."""


def affine_blocks(x: Tensor, w: Tensor, top: int, scale_top: int) -> AffineBlocks:
    """Find d, dmin, s, m and q with little sum of w (x - (d s q - dmin m))^2.

    Args:
        x: values, f32 [n, S, W].
        w: weights above 0, same shape (may be expanded).
        top: largest q.
        scale_top: largest s and m.
    """
    a, b = _fit_alone(x, w, top)
    d = round_up_to_half(a.amax(1, keepdim=True) / scale_top)
    dmin = round_up_to_half(b.amax(1, keepdim=True) / scale_top)
    s = (a * reciprocal(d)).round_().clamp_(0, scale_top)
    m = (b * reciprocal(dmin)).round_().clamp_(0, scale_top)
    best: tuple[Tensor, ...] = ()
    for turn in range(_ROUNDS):
        if turn:
            d, dmin = _fit_together(x, w, top, (d, dmin, s, m))
        error, s, m = _best_neighbours(x, w, (top, scale_top), (d, dmin, s, m))
        found = (error.sum(1, keepdim=True), d, dmin, s, m)
        best = keep_better(best, found) if best else found
    _, d, dmin, s, m = best
    return AffineBlocks(d, dmin, s, m, _integers(x, d * s, dmin * m, top))


def _fit_alone(x: Tensor, w: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """Real a, b >= 0 [n, S] of every sub-block."""
    low = x.amin(-1).clamp_(max=0)
    span = x.amax(-1) - low
    best: tuple[Tensor, ...] = ()
    for extra in _EXTRA_LEVELS:
        a, b = span / (top + extra), -low
        gain = span
        for _ in range(_FITS_PER_STEP):
            a, b, gain = _solve(x, w, _integers(x, a, b, top))
        found = (-gain, a, b)
        best = keep_better(best, found) if best else found
    return best[1], best[2]


def _solve(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Least squares of x ~ a q - b with b >= 0: a, b and the error saved against x ~ 0."""
    wq = w * q
    sum_w, sum_q, sum_qq = w.sum(-1), wq.sum(-1), (wq * q).sum(-1)
    sum_x, sum_xq = (w * x).sum(-1), (wq * x).sum(-1)
    determinant = sum_w * sum_qq - sum_q * sum_q
    is_regular = determinant > _SINGULAR * sum_w * sum_qq
    inverse = torch.where(is_regular, reciprocal(determinant), 0.0)
    a = (sum_w * sum_xq - sum_q * sum_x) * inverse
    offset = torch.where(is_regular, (sum_qq * sum_x - sum_q * sum_xq) * inverse, sum_x / sum_w)
    # All values are reached from an offset of at most zero; a fit above it is bent back.
    is_above = offset > 0
    a = torch.where(is_above, sum_xq * reciprocal(sum_qq), a)
    offset = offset.clamp_(max=0)
    return a.clamp_(min=0), -offset, a * sum_xq + offset * sum_x


def _integers(x: Tensor, scale: Tensor, offset: Tensor, top: int) -> Tensor:
    """Nearest q in 0..top for scales and offsets [n, S]."""
    return round_to_level(x + offset.unsqueeze(-1), scale, 0, top)


def _error(x: Tensor, w: Tensor, scale: Tensor, offset: Tensor, top: int) -> Tensor:
    """Sum of w (x - (scale q - offset))^2 with the nearest q, [n, S]."""
    raised = x + offset.unsqueeze(-1)
    raised -= round_to_level(raised, scale, 0, top).mul_(scale.unsqueeze(-1))
    return raised.square_().mul_(w).sum(-1)


def _best_neighbours(
    x: Tensor, w: Tensor, tops: tuple[int, int], stored: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor, Tensor]:
    """(error, s, m) [n, S] of the best pair among each (s, m) and the eight around it."""
    top, scale_top = tops
    d, dmin, centre_s, centre_m = stored
    best: tuple[Tensor, ...] = ()
    for step_s, step_m in _MOVES:
        s = (centre_s + step_s).clamp_(0, scale_top)
        m = (centre_m + step_m).clamp_(0, scale_top)
        found = (_error(x, w, d * s, dmin * m, top), s, m)
        best = keep_better(best, found) if best else found
    error, s, m = best
    return error, s, m


def _fit_together(
    x: Tensor, w: Tensor, top: int, stored: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """Fit d and dmin [n, 1] to whole blocks, for the integers that are now best."""
    d, dmin, s, m = stored
    sq = _integers(x, d * s, dmin * m, top).mul_(s.unsqueeze(-1))
    wm = w * m.unsqueeze(-1)
    whole = (-2, -1)
    ss, sm = (w * sq * sq).sum(whole), (wm * sq).sum(whole)
    mm = (wm * m.unsqueeze(-1)).sum(whole)
    xs, xm = (w * sq * x).sum(whole), (wm * x).sum(whole)
    determinant = ss * mm - sm * sm
    is_regular = determinant > _SINGULAR * ss * mm
    inverse = torch.where(is_regular, reciprocal(determinant), 0.0)
    old_dmin = dmin.squeeze(1)
    new_d = torch.where(
        is_regular, (mm * xs - sm * xm) * inverse, (xs + sm * old_dmin) * reciprocal(ss)
    )
    new_dmin = torch.where(is_regular, (sm * xs - ss * xm) * inverse, old_dmin)
    return round_to_half(new_d.unsqueeze(1)), round_to_half(new_dmin.unsqueeze(1))

"""Best scales of sub-blocks with signed integers and no offset: x ~ d s q.

As in `affine_search`, with one number less: each sub-block tries several step sizes and fits the
scale to the integers; then all sub-blocks of a block share d and move to the best integer s nearby.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from torch import Tensor

from edgedsv4.kernels.quantize.rounding import (
    HALF_MAX,
    keep_better,
    reciprocal,
    round_to_level,
    round_up_to_half,
)

# Steps tried per sub-block: the level that its largest value is put on, beyond the lowest one.
_BEYOND: Final = (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0)
_FITS_PER_STEP: Final = 2
_ROUNDS: Final = 2


@dataclass(frozen=True, slots=True)
class ScaledBlocks:
    """Stored numbers of n blocks of S sub-blocks of W elements, all as f32."""

    d: Tensor
    """[n, 1], a half float's value."""
    s: Tensor
    """[n, S], integers in -128..127."""
    q: Tensor
    """[n, S, W], integers."""


def scaled_blocks(x: Tensor, w: Tensor, low: int, high: int) -> ScaledBlocks:
    """Find d, s and q with little sum of w (x - d s q)^2.

    Args:
        x: values, f32 [n, S, W].
        w: weights above 0, same shape (may be expanded).
        low: smallest q, below 0.
        high: largest q.
    """
    a = _fit_alone(x, w, low, high)
    largest = a.gather(1, a.abs().argmax(1, keepdim=True))
    d = round_up_to_half(largest.abs() / 128).copysign_(-largest)
    s = (a * reciprocal(d)).round_().clamp_(-128, 127)
    best: tuple[Tensor, ...] = ()
    for turn in range(_ROUNDS):
        if turn:
            d = _fit_together(x, w, (low, high), d, s)
        error, s = _best_neighbours(x, w, (low, high), d, s)
        found = (error.sum(1, keepdim=True), d, s)
        best = keep_better(best, found) if best else found
    _, d, s = best
    return ScaledBlocks(d, s, round_to_level(x, d * s, low, high))


def _half(x: Tensor) -> Tensor:
    return x.clamp(-HALF_MAX, HALF_MAX).half().float()


def _fit_alone(x: Tensor, w: Tensor, low: int, high: int) -> Tensor:
    """Real scale [n, S] of every sub-block."""
    extreme = x.gather(-1, x.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best: tuple[Tensor, ...] = ()
    for beyond in _BEYOND:
        a = extreme / (low + beyond)
        loss = a
        for _ in range(_FITS_PER_STEP):
            a, loss = _solve(x, w, round_to_level(x, a, low, high))
        best = keep_better(best, (loss, a)) if best else (loss, a)
    return best[1]


def _solve(x: Tensor, w: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Least squares of x ~ a q: a, and minus the error saved against x ~ 0."""
    wq = w * q
    sum_xq = (wq * x).sum(-1)
    a = sum_xq * reciprocal((wq * q).sum(-1))
    return a, -(a * sum_xq)


def _best_neighbours(
    x: Tensor, w: Tensor, ends: tuple[int, int], d: Tensor, centre: Tensor
) -> tuple[Tensor, Tensor]:
    """(error, s) [n, S] of the best integer among each s and the two beside it."""
    best: tuple[Tensor, ...] = ()
    for step in (0, -1, 1):
        s = (centre + step).clamp_(-128, 127)
        scale = d * s
        rest = x - round_to_level(x, scale, *ends).mul_(scale.unsqueeze(-1))
        found = (rest.square_().mul_(w).sum(-1), s)
        best = keep_better(best, found) if best else found
    return best[0], best[1]


def _fit_together(x: Tensor, w: Tensor, ends: tuple[int, int], d: Tensor, s: Tensor) -> Tensor:
    """Fit d [n, 1] to whole blocks, for the integers that are now best."""
    sq = round_to_level(x, d * s, *ends).mul_(s.unsqueeze(-1))
    wsq = w * sq
    fitted = (wsq * x).sum((-2, -1)) * reciprocal((wsq * sq).sum((-2, -1)))
    return _half(fitted.unsqueeze(1))

"""Pooling of raw projections into one compressed row: a softmax per channel over a window.

With one series (ratio 128), e_w = sum_j softmax_j(g_j) a_j over the m tokens of window w. With two
series (ratio 4), the softmax runs over 2m slots: series A of the previous window's tokens, then
series B of the current window's; for the first window the A slots do not exist (score -inf).
Source: DeepSeek-V4 reference code.

There is no native form of this function: `dk_compress` makes stored rows out of raw projections,
from the position bias to the codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def pool_windows(
    values: Tensor,
    gates: Tensor,
    *,
    has_overlap: bool,
    previous: bool,
    backend: Backend = "auto",
) -> Tensor:
    """Compress whole windows.

    Args:
        values: [N, m, s * c], raw projections of N consecutive windows; s = 2 with overlap (A then
            B), else 1.
        gates: same shape, position bias included.
        has_overlap: two series, each window also pools the A series of the one before it.
        previous: the first of the N windows is only the predecessor of the second and gives no row
            itself; without it the first window is the first of the timeline.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [N, c] (N - 1 rows with `previous`), accumulator dtype.

    Raises:
        ShapeError: if the shapes disagree, or a predecessor is given without overlap.
    """
    resolve_backend(backend, operation="compress")
    if values.shape != gates.shape or values.dim() != 3:
        raise ShapeError(f"compress: values {list(values.shape)}, gates {list(gates.shape)}")
    if not has_overlap:
        if previous:
            raise ShapeError("compress: a predecessor window only counts with overlap")
        return _pool(values, gates)
    if values.shape[-1] % 2:
        raise ShapeError(f"compress: two series need an even width, found {values.shape[-1]}")
    return _pool(*_overlapped(values, gates, previous=previous))


def _overlapped(values: Tensor, gates: Tensor, *, previous: bool) -> tuple[Tensor, Tensor]:
    """Slots of each window: A of the window before, B of the window; [N, 2m, c]."""
    first_values, second_values = values.chunk(2, dim=-1)
    first_gates, second_gates = gates.chunk(2, dim=-1)
    if previous:
        before_values, before_gates = first_values[:-1], first_gates[:-1]
        second_values, second_gates = second_values[1:], second_gates[1:]
    else:
        nothing = torch.zeros_like(first_values[:1])
        before_values = torch.cat((nothing, first_values[:-1]))
        before_gates = torch.cat((nothing - torch.inf, first_gates[:-1]))
    slots = torch.cat((before_values, second_values), dim=1)
    return slots, torch.cat((before_gates, second_gates), dim=1)


def _pool(values: Tensor, gates: Tensor) -> Tensor:
    wide = accumulator(values.dtype)
    return (torch.softmax(gates.to(wide), dim=1) * values.to(wide)).sum(dim=1)

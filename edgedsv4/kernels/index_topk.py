"""The k best visible rows of each query: larger score first, ties to the lower row.

-0.0 equals 0.0, NaN counts as -inf. Ties are common, since the relu of the scores makes exact
zeros; the public implementations leave them open, so the rule is ours and every backend follows it.

There is no native form of this function: `dk_index_select` scores and selects in one, and returns
rows in ascending order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def index_topk(
    scores: Tensor, row_ids: Tensor, visible: Tensor, k: int, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Select rows.

    Args:
        scores: [T, n] of the candidates.
        row_ids: [n] or [T, n] int64, row of each candidate, ascending where scores tie; -1 is no
            candidate.
        visible: [T] int64, a query may see rows below this.
        k: rows to keep at most.
        backend: which implementation; `auto` takes the best one.

    Returns:
        ids [T, min(k, n)] int64, best first, -1 where fewer are visible, and their scores (-inf
        there).

    Raises:
        ShapeError: if the shapes disagree.
    """
    resolve_backend(backend, operation="index_topk")
    if row_ids.shape[-1] != scores.shape[-1] or visible.shape != scores.shape[:1]:
        raise ShapeError(
            f"index_topk: scores {list(scores.shape)}, rows {list(row_ids.shape)},"
            f" visible {list(visible.shape)}"
        )
    ids = row_ids.expand_as(scores)
    hidden = (ids < 0) | (ids >= visible[:, None]) | torch.isnan(scores)
    masked = (scores + 0.0).masked_fill(hidden, -torch.inf)  # + 0.0 turns -0.0 into 0.0
    best, order = torch.sort(masked, dim=-1, descending=True, stable=True)
    best, order = best[:, :k], order[:, :k]
    return ids.gather(-1, order).masked_fill(best == -torch.inf, -1), best

"""Scores of the lightning indexer: S[t, w] = sum_h weights[t, h] * relu(q[t, h] . keys[w]).

The relu comes before the head weights, and the sum is float32. Source: DeepSeek-V4 reference code.
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


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Score every index key against every query.

    Args:
        q: rotated queries, [T, heads, dim], any float dtype.
        keys: index keys, [W, dim].
        weights: head weights, scale factors applied, [T, heads]; signs are free.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, W], accumulator dtype. Causality is not applied here; `index_topk` masks what a token
        may not see.

    Raises:
        ShapeError: if T, heads or dims disagree.
    """
    resolve_backend(backend, operation="index_scores")
    if q.shape[:2] != weights.shape or q.shape[-1] != keys.shape[-1]:
        raise ShapeError(
            f"index_scores: q {list(q.shape)}, keys {list(keys.shape)},"
            f" weights {list(weights.shape)}"
        )
    return index_scores_reference(q, keys, weights)


def index_scores_reference(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The formula of the module docstring."""
    wide = accumulator(q.dtype)
    dots = torch.relu(q.to(wide) @ keys.to(wide).T)
    return torch.matmul(weights.to(wide)[:, None, :], dots).squeeze(1)

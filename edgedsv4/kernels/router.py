"""Expert routing: the k experts with the largest p + bias, p = sqrt(softplus(logits)).

Weights are p / sum(p of the chosen) * scale. Equal selection scores go to the lower expert id. Hash
layers skip the selection and take their ids from a table. Source: DeepSeek-V4 reference code; the
tie rule is ours.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend

SUM_GUARD = 1e-20
"""Added to the sum of the chosen scores, so that a row of zeros divides to zero."""


def router_scores(logits: Tensor, *, backend: Backend = "auto") -> Tensor:
    """sqrt(softplus(logits)).

    Args:
        logits: [T, E] float32 or float64.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, E], same dtype, >= 0.
    """
    resolve_backend(backend, operation="router")
    wide = logits.to(accumulator(logits.dtype))
    return functional.softplus(wide).sqrt()


def select_experts(scores: Tensor, k: int, *, backend: Backend = "auto") -> Tensor:
    """Ids of the k largest scores of each row, in ascending order of id.

    Args:
        scores: [T, E], selection scores (bias included).
        k: experts per token, at most E.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, k] int64.

    Raises:
        ShapeError: if k is more than E.
    """
    resolve_backend(backend, operation="router")
    if k > scores.shape[-1]:
        raise ShapeError(f"router: {k} experts asked for, {scores.shape[-1]} exist")
    order = torch.sort(scores, dim=-1, descending=True, stable=True).indices
    return order[..., :k].sort(dim=-1).values


def routing_weights(
    scores: Tensor, ids: Tensor, scale: float, *, backend: Backend = "auto"
) -> Tensor:
    """Normalised weights of the chosen experts.

    Args:
        scores: [T, E], unbiased.
        ids: [T, k] int64.
        scale: routed scaling factor.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, k], dtype of `scores`.
    """
    resolve_backend(backend, operation="router")
    chosen = scores.gather(-1, ids)
    return chosen / (chosen.sum(dim=-1, keepdim=True) + SUM_GUARD) * scale

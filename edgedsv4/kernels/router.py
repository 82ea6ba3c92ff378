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
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here
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
    return rank_experts(scores, k, backend=backend).sort(dim=-1).values


def rank_experts(scores: Tensor, most: int, *, backend: Backend = "auto") -> Tensor:
    """Ids of the largest scores of each row, the largest first; equal ones by id.

    Args:
        scores: [T, E], selection scores (bias included).
        most: how many, at most E.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, most] int64.

    Raises:
        ShapeError: if `most` is more than E.
    """
    resolve_backend(backend, operation="router")
    if most > scores.shape[-1]:
        raise ShapeError(f"router: {most} experts asked for, {scores.shape[-1]} exist")
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[..., :most]


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


def route(
    logits: Tensor, bias: Tensor | None, k: int, scale: float, *, backend: Backend = "auto"
) -> tuple[Tensor, Tensor]:
    """Scores, selection and weights in one: the chosen experts and how much each counts.

    Args:
        logits: [T, E] float32 or float64.
        bias: [E] of the same dtype, added for the selection alone; None for none.
        k: experts per token, at most E.
        scale: routed scaling factor.
        backend: which implementation; `auto` takes the best one.

    Returns:
        ids [T, k] int64, ascending, and weights [T, k] of the dtype of `logits`.

    Raises:
        ShapeError: if k is more than E, or the bias is not [E].
    """
    chosen = resolve_backend(backend, available_on(logits, bias), operation="router")
    experts = logits.shape[-1]
    if not 1 <= k <= experts:
        raise ShapeError(f"router: {k} experts asked for, {experts} exist")
    if bias is not None and bias.shape != (experts,):
        raise ShapeError(f"router: bias is {list(bias.shape)}, expected [{experts}]")
    if chosen == "native":
        return _route_native(logits.contiguous(), bias, k, scale)
    return route_reference(logits, bias, k, scale)


def route_reference(
    logits: Tensor, bias: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    """The three steps one after another."""
    scores = router_scores(logits, backend="reference")
    selection = scores if bias is None else scores + bias
    ids = select_experts(selection, k, backend="reference")
    return ids, routing_weights(scores, ids, scale, backend="reference")


def _route_native(
    logits: Tensor, bias: Tensor | None, k: int, scale: float
) -> tuple[Tensor, Tensor]:
    lib, ffi = library()
    run = run_here()
    bias = None if bias is None else bias.contiguous()
    tokens, experts = logits.shape
    ids = torch.empty(tokens, k, dtype=torch.int32)
    weights = torch.empty(tokens, k)
    outputs = (pointer(ids), pointer(weights))
    sizes = (tokens, experts, k, scale)
    status = lib.dk_route(
        run.cdata, *outputs, pointer(logits), pointer(bias), ffi.NULL, ffi.NULL, *sizes
    )
    run.check(status)
    return ids.long(), weights

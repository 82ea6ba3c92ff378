"""Mixture of experts in its training form: three ways to run all experts of a layer at once.

`grouped` sorts the slots by expert and multiplies group by group (bfloat16 on a GPU), `dense` runs
every expert on every token and weights what was not chosen with zero, `loop` goes through the
experts one by one and waits for the device to learn their sizes. All give the same sum; the first
two never wait. The permutations have their own backward pass, a gather by the inverse order,
because the generic one adds atomically: slower, and not the same from run to run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from edgedsv4.kernels.router import router_scores, routing_weights, select_experts
from edgedsv4.kernels.swiglu import swiglu

ExpertPath = Literal["grouped", "dense", "loop"]


@dataclass(frozen=True)
class Routing:
    """Which experts each token uses."""

    scores: Tensor
    """[T, E] float32, unbiased."""
    ids: Tensor
    """[T, k] int64."""
    factors: Tensor
    """[T, k] float32, normalised and scaled."""
    chosen: Tensor
    """[T, E] float32, 1 where a token uses the expert."""


@dataclass(frozen=True)
class ExpertStack:
    """The routed experts of one layer."""

    w1: Tensor
    """[E, F, D]."""
    w3: Tensor
    """[E, F, D]."""
    w2: Tensor
    """[E, D, F]."""
    limit: float
    """Clamp of the hidden layer."""


def route(x: Tensor, router: Tensor, selection: Tensor, k: int, scale: float) -> Routing:
    """Score the experts and pick k of them.

    Args:
        x: [T, D].
        router: [E, D] float32.
        selection: a bias [E] float32 for the choice, or the experts themselves [T, k] int64.
        k: experts per token.
        scale: factor on the normalised weights.
    """
    scores = router_scores(functional.linear(x.float(), router))
    is_given = selection.dim() == 2
    ids = selection if is_given else select_experts(scores.detach() + selection, k)
    chosen = torch.zeros_like(scores, requires_grad=False).scatter(1, ids, 1.0)
    return Routing(scores, ids, routing_weights(scores, ids, scale), chosen)


def run_experts(
    x: Tensor, routing: Routing, stack: ExpertStack, path: ExpertPath, dtype: torch.dtype
) -> Tensor:
    """Weighted sum of each token's experts.

    Args:
        x: [T, D] float32.
        routing: of these tokens.
        stack: the experts.
        path: how.
        dtype: in which the products run.

    Returns:
        [T, D] float32.
    """
    x = x.to(dtype)
    if path == "grouped":
        return grouped_experts(x, routing.ids, routing.factors, stack)
    if path == "dense":
        gates = torch.zeros_like(routing.scores).scatter(1, routing.ids, routing.factors)
        return dense_experts(x, gates, stack)
    return looped_experts(x, routing.ids, routing.factors, stack)


def grouped_experts(x: Tensor, ids: Tensor, factors: Tensor, stack: ExpertStack) -> Tensor:
    """Sort slots by expert, multiply each group by its expert's matrices."""
    count, k = ids.shape
    flat = ids.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.argsort(order)
    experts = torch.arange(stack.w1.shape[0], device=ids.device)
    ends = (flat[:, None] == experts).sum(dim=0).cumsum(dim=0).to(torch.int32)
    slots = x[:, None, :].expand(-1, k, -1).reshape(count * k, -1)
    slots = permuted(slots, order, inverse)
    gate = _grouped_product(slots, stack.w1, ends)
    up = _grouped_product(slots, stack.w3, ends)
    outputs = _grouped_product(swiglu(gate, up, stack.limit), stack.w2, ends)
    outputs = permuted(outputs, inverse, order).view(count, k, -1)
    return (factors[..., None] * outputs.float()).sum(dim=1)


def _grouped_product(rows: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    matrices = weights.to(rows.dtype).transpose(-2, -1)
    # The public name came with torch 2.10; before, the same product had a private one.
    multiply = getattr(functional, "grouped_mm", None) or torch._grouped_mm
    product: Tensor = multiply(rows, matrices, offs=ends)
    return product


def dense_experts(x: Tensor, gates: Tensor, stack: ExpertStack) -> Tensor:
    """Every expert on every token, three large products; `gates` [T, E] weighs the hidden rows."""
    experts, width, _ = stack.w1.shape
    gate = functional.linear(x, stack.w1.flatten(0, 1).to(x.dtype))
    up = functional.linear(x, stack.w3.flatten(0, 1).to(x.dtype))
    hidden = swiglu(gate, up, stack.limit).view(-1, experts, width)
    hidden = (hidden.float() * gates[..., None]).to(x.dtype).flatten(1)
    down = stack.w2.permute(0, 2, 1).flatten(0, 1).to(x.dtype)  # [E * F, D]
    return (hidden @ down).float()


def looped_experts(x: Tensor, ids: Tensor, factors: Tensor, stack: ExpertStack) -> Tensor:
    """Expert by expert over its own tokens."""
    total = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(stack.w1.shape[0]):
        tokens, slots = (ids == expert).nonzero(as_tuple=True)
        rows = x[tokens]
        gate = functional.linear(rows, stack.w1[expert].to(x.dtype))
        up = functional.linear(rows, stack.w3[expert].to(x.dtype))
        hidden = swiglu(gate, up, stack.limit)
        outputs = functional.linear(hidden, stack.w2[expert].to(x.dtype)).float()
        total = total.index_add(0, tokens, outputs * factors[tokens, slots, None])
    return total


class _Permute(torch.autograd.Function):
    """rows[order], whose backward pass is gradient[inverse]."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        """Gather."""
        ctx.save_for_backward(inverse)
        return rows[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Gather back."""
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


def permuted(rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """rows[order], for an `order` that is a permutation with this inverse."""
    result: Tensor = _Permute.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return result

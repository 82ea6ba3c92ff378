"""Decides how the experts are run, by trying: a grouped product must agree with the dense one."""

from __future__ import annotations

import logging
from typing import cast

import torch
from torch import Tensor

from pocket.training_moe import ExpertPath, ExpertStack, dense_experts, grouped_experts

logger = logging.getLogger(__name__)


def choose_expert_path(wanted: str, device: torch.device) -> ExpertPath:
    """The way to run experts here.

    Args:
        wanted: a path, or `auto`: on a CPU expert by expert; on a GPU grouped if that works and
            agrees with the dense form, gradients included, else dense.
        device: of the training.
    """
    if wanted != "auto":
        return cast("ExpertPath", wanted)
    if device.type != "cuda":
        return "loop"
    try:
        error = grouped_error(device)
    except (RuntimeError, NotImplementedError, AttributeError):
        logger.warning("grouped expert products do not run here; dense ones do", exc_info=True)
        return "dense"
    if error < 0.02:
        return "grouped"
    logger.warning("grouped expert products are off by %.3f; dense ones are used", error)
    return "dense"


def grouped_error(device: torch.device, dtype: torch.dtype = torch.bfloat16) -> float:
    """Largest relative error of grouped outputs and gradients against dense ones."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device)

    tokens, experts, width, k = 500, 8, 128, 2
    ids = torch.rand((tokens, experts), generator=generator).argsort(dim=1)[:, :k].to(device)
    ids[:, 0] %= experts - 1  # an expert less in one slot: uneven groups
    ids[:, 1] = (ids[:, 0] + 1 + ids[:, 1] % (experts - 1)) % experts
    factors = draw(tokens, k).abs()
    values = [draw(tokens, width), *(draw(experts, width, width) * 0.1 for _ in range(3))]
    results = []
    for path in ("grouped", "dense"):
        x, w1, w3, w2 = (value.clone().requires_grad_() for value in values)
        stack = ExpertStack(w1, w3, w2, 10.0)
        if path == "grouped":
            output = grouped_experts(x.to(dtype), ids, factors, stack)
        else:
            gates = torch.zeros(tokens, experts, device=device).scatter(1, ids, factors)
            output = dense_experts(x.to(dtype), gates, stack)
        output.square().mean().backward()  # type: ignore[no-untyped-call]
        results.append([output.detach(), x.grad, w1.grad, w3.grad, w2.grad])
    errors = [_relative(got, want) for got, want in zip(*results, strict=True)]
    return max(errors)


def _relative(got: Tensor | None, want: Tensor | None) -> float:
    if got is None or want is None:
        return float("inf")
    return float((got - want).norm() / want.norm().clamp(min=1e-30))

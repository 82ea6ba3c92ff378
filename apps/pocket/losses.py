"""The parts of the training loss, each as a sum and the weight it must be divided by.

Language model and MTP: cross entropy in float32, per target weight. Indexer: KL divergence from the
attention's own distribution over compressed rows to the indexer's softmax, on detached inputs.
Router: the sequence-wise balance loss. Source: DeepSeek-V3 report (MTP, balance loss), DeepSeek-
V3.2 report (indexer loss).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MIN_MASS = 1e-6
"""Rows whose compressed attention mass is below this say nothing about the selection."""
HIDDEN = -1e30
"""Score of a row that is not allowed: finite, so that a query that sees none gives no NaN."""


def weighted_cross_entropy(logits: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight * cross entropy.

    Args:
        logits: [T, V] float32.
        targets: [T] int64.
        weights: [T] float32; 0 leaves a token out.

    Returns:
        Scalar.
    """
    losses = functional.cross_entropy(logits, targets, reduction="none")
    return (losses * weights).sum()


def index_divergence(mass: Tensor, scores: Tensor, allowed: Tensor) -> tuple[Tensor, Tensor]:
    """KL(p || softmax(scores)) summed over queries, and the number of queries.

    Args:
        mass: [..., n] float32, attention probabilities on compressed rows summed over heads;
            treated as constant.
        scores: [..., n] float32, the indexer's.
        allowed: [..., n] bool, rows that take part.

    Returns:
        (sum, count) scalars. Queries with fewer than two allowed rows or hardly any mass are left
        out.
    """
    weight = mass.detach().masked_fill(~allowed, 0.0)
    total = weight.sum(dim=-1, keepdim=True)
    counts = (allowed.sum(dim=-1) >= 2) & (total.squeeze(-1) >= MIN_MASS)
    target = weight / total.clamp(min=MIN_MASS)
    predicted = torch.log_softmax(scores.masked_fill(~allowed, HIDDEN), dim=-1)
    divergence = (torch.xlogy(target, target) - target * predicted).sum(dim=-1)
    return (divergence * counts).sum(), counts.sum()


def sequence_balance(scores: Tensor, chosen: Tensor, sequences: int) -> Tensor:
    """Sum over sequences of sum_e f_e P_e, 1 for an even load.

    f_e is the share of a sequence's slots that expert e got, times the number of experts; P_e the
    mean of its normalised scores.

    Args:
        scores: [B * S, E] float32, unbiased.
        chosen: [B * S, E], 1 where a token uses the expert.
        sequences: B.

    Returns:
        Scalar.
    """
    experts = scores.shape[-1]
    shares = (scores / scores.sum(dim=-1, keepdim=True)).view(sequences, -1, experts).mean(dim=1)
    loads = chosen.detach().to(shares.dtype).view(sequences, -1, experts).mean(dim=1)
    loads = loads / loads.sum(dim=-1, keepdim=True) * experts
    return (loads * shares).sum()

"""Parts of the training loss."""

from __future__ import annotations

import torch
from pocket.losses import index_divergence, sequence_balance, weighted_cross_entropy


def test_targets_of_weight_zero_do_not_count() -> None:
    logits = torch.randn(5, 7, generator=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, 2, 3, 4, 5])
    weights = torch.tensor([1.0, 0.0, 0.5, 0.0, 0.0])
    each = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    loss = weighted_cross_entropy(logits, targets, weights)
    assert torch.allclose(loss, each[0] + 0.5 * each[2])


def test_divergence_is_zero_when_the_scores_match_the_mass() -> None:
    mass = torch.tensor([[0.2, 0.1, 0.4, 0.0]])
    allowed = torch.tensor([[True, True, True, False]])
    scores = torch.cat((mass[:, :3].log() + 3, torch.tensor([[50.0]])), dim=1)
    divergence, rows = index_divergence(mass, scores, allowed)
    assert abs(divergence) < 1e-6
    assert rows == 1


def test_divergence_is_that_of_the_distributions() -> None:
    mass = torch.tensor([[0.3, 0.1]])
    divergence, _ = index_divergence(mass, torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool))
    p = torch.tensor([0.75, 0.25])
    assert torch.allclose(divergence, (p * (p / 0.5).log()).sum())


def test_queries_that_say_nothing_are_left_out() -> None:
    mass = torch.tensor([[0.5, 0.5], [0.5, 0.5], [1e-8, 1e-8]])
    allowed = torch.tensor([[True, False], [False, False], [True, True]])
    scores = torch.zeros(3, 2, requires_grad=True)
    divergence, rows = index_divergence(mass, scores, allowed)
    divergence.backward()
    assert rows == 0
    assert divergence == 0
    assert scores.grad is not None
    assert not scores.grad.any()


def test_divergence_has_no_gradient_to_the_mass() -> None:
    mass = torch.rand(2, 3, requires_grad=True)
    scores = torch.rand(2, 3, requires_grad=True)
    divergence, _ = index_divergence(mass, scores, torch.ones(2, 3, dtype=torch.bool))
    divergence.backward()
    assert mass.grad is None


def test_balance_is_one_for_an_even_load_and_more_for_a_collapse() -> None:
    chosen = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 0.0, 1.0, 1.0]] * 4)
    even = sequence_balance(torch.ones(8, 4), chosen, 2)
    collapsed = chosen[:1].expand(8, -1)
    scores = collapsed * 0.9 + 0.1
    assert torch.allclose(even, torch.tensor(2.0))
    assert sequence_balance(scores, collapsed, 2) > 3.5

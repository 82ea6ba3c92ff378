"""The optimizer over flat tensors."""

from __future__ import annotations

import pytest
import torch
from pocket.optimizer import Optimizer, OptimizerOptions, orthogonalised

CPU = torch.device("cpu")
OPTIONS = OptimizerOptions(clip=1e9, weight_decay=0.0)


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weights() -> dict[str, torch.Tensor]:
    return {
        "embed.weight": draw(10, 4),
        "layers.0.attn.wq_b.weight": draw(8, 4, seed=1),
        "layers.0.attn.wo_a.weight": draw(8, 4, seed=2),
        "layers.0.ffn.experts.w1": draw(3, 8, 4, seed=3),
        "layers.0.ffn.gate.bias": torch.zeros(3),
        "norm.weight": torch.ones(4),
    }


def give_gradients(optimizer: Optimizer, seed: int) -> None:
    optimizer.gradient.copy_(draw(optimizer.gradient.numel(), seed=seed))


@pytest.mark.parametrize("shape", [(2, 16, 16), (3, 24, 8), (1, 8, 24)])
def test_singular_values_come_near_one(shape: tuple[int, ...]) -> None:
    values = torch.linalg.svdvals(orthogonalised(draw(*shape)))
    assert values.min() > 0.4
    assert values.max() < 1.4


def test_weights_become_views_with_the_same_values() -> None:
    before = weights()
    optimizer = Optimizer(before, 2, CPU)
    assert all(torch.equal(optimizer.weights[name], value) for name, value in before.items())


def test_other_weights_follow_adamw() -> None:
    optimizer = Optimizer(weights(), 2, CPU, OPTIONS)
    twin = torch.nn.Parameter(weights()["embed.weight"])
    reference = torch.optim.AdamW([twin], lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for seed in range(3):
        give_gradients(optimizer, seed)
        gradient = optimizer.weights["embed.weight"].grad
        assert gradient is not None
        twin.grad = gradient.clone()
        optimizer.step(0.01)
        reference.step()
    assert torch.allclose(optimizer.weights["embed.weight"], twin, atol=1e-6)


def test_every_expert_is_orthogonalised_by_itself() -> None:
    optimizer = Optimizer(weights(), 2, CPU, OPTIONS)
    stack = optimizer.weights["layers.0.ffn.experts.w1"]
    before = stack.detach().clone()
    assert stack.grad is not None
    stack.grad[1] = draw(8, 4, seed=8)
    optimizer.step(0.1)
    changed = (stack.detach() != before).flatten(1).any(dim=1)
    assert changed.tolist() == [False, True, False]
    update = (before[1] - stack.detach()[1]) / (0.1 * 0.2 * 8**0.5)
    assert torch.linalg.svdvals(update).min() > 0.4


def test_output_groups_are_orthogonalised_by_themselves() -> None:
    optimizer = Optimizer(weights(), 2, CPU, OPTIONS)
    matrix = optimizer.weights["layers.0.attn.wo_a.weight"]
    before = matrix.detach().clone()
    assert matrix.grad is not None
    matrix.grad[:4] = draw(4, 4, seed=8)
    optimizer.step(0.1)
    assert torch.equal(matrix.detach()[4:], before[4:])


def test_gradients_are_clipped_by_their_common_norm() -> None:
    big, small = (Optimizer(weights(), 2, CPU, OptimizerOptions(clip=1.0)) for _ in range(2))
    give_gradients(big, 1)
    give_gradients(small, 1)
    small.gradient /= small.gradient.norm()
    big.step(0.01)
    small.step(0.01)
    assert torch.allclose(big.flat, small.flat, atol=1e-6)


def test_step_with_a_nan_changes_nothing_and_is_counted() -> None:
    optimizer = Optimizer(weights(), 2, CPU)
    give_gradients(optimizer, 1)
    optimizer.step(0.01)
    before = {name: value.clone() for name, value in optimizer.state().items() if name != "tables"}
    optimizer.gradient[3] = torch.nan
    optimizer.step(0.01)
    assert optimizer.skipped == 1
    after = optimizer.state()
    assert all(torch.equal(before[n], after[n]) for n in before if n != "skipped")


def test_state_continues_where_it_was() -> None:
    first, second = Optimizer(weights(), 2, CPU), Optimizer(weights(), 2, CPU)
    give_gradients(first, 1)
    first.step(0.01)
    second.load_state(first.state())
    for optimizer in (first, second):
        give_gradients(optimizer, 2)
        optimizer.step(0.01)
    assert torch.equal(first.flat, second.flat)

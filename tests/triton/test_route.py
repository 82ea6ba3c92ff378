"""The routing launch against its definition."""

from __future__ import annotations

import pytest
import torch
from numeric import relative_error
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.route import route
from edgedsv4.kernels.router import route_reference, router_scores, routing_weights

SCALE = 1.5


def run(
    logits: Tensor,
    bias: Tensor | None,
    k: int,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    ids = torch.full((logits.shape[0], k), -7, dtype=torch.int32, device=DEVICE)
    weights = torch.full((logits.shape[0], k), torch.nan, device=DEVICE)
    route(ids, weights, logits, bias, scale=SCALE, table=table, token_ids=token_ids)
    return ids, weights


def draw(tokens: int, experts: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = 4 * torch.randn(tokens, experts, generator=generator)
    return logits.to(DEVICE), torch.randn(experts, generator=generator).to(DEVICE)


SIZES = [(1, 256, 6), (1, 8, 2), (1, 5, 5), (3, 33, 1), (9, 256, 6), (5, 384, 8), (1, 512, 6)]
if DEVICE != "cpu":
    SIZES += [(4096, 256, 6)]


@pytest.mark.parametrize(("tokens", "experts", "k"), SIZES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_best_experts_in_order_of_id(tokens: int, experts: int, k: int, has_bias: bool) -> None:
    logits, bias = draw(tokens, experts)
    ids, weights = run(logits, bias if has_bias else None, k)
    wide = bias.double() if has_bias else torch.zeros_like(bias).double()
    expected = route_reference(logits.double(), wide, k, SCALE)
    ranked = (router_scores(logits.double()) + wide).sort(dim=-1, descending=True).values
    # Where the last one chosen and the next are as good as equal, either may come.
    is_clear = (ranked[:, k - 1] - ranked[:, min(k, experts - 1)] > 1e-6) | (k == experts)
    assert is_clear.sum() >= 0.99 * tokens
    assert torch.equal(ids.long()[is_clear], expected[0][is_clear])
    assert relative_error(weights[is_clear], expected[1][is_clear]) < 1e-6


def test_equal_scores_go_to_the_lower_id() -> None:
    logits = torch.zeros(1, 40, device=DEVICE)
    logits[0, 30] = 1.0
    ids, weights = run(logits, None, 4)
    assert ids.tolist() == [[0, 1, 2, 30]]
    bias = torch.zeros(40, device=DEVICE)
    bias[7:] = -3.0
    bias[30] = -100.0
    ids, weights = run(logits, bias, 4)
    assert ids.tolist() == [[0, 1, 2, 3]]
    assert relative_error(weights, torch.full((1, 4), SCALE / 4)) < 1e-6


def test_scores_are_right_for_large_and_small_logits() -> None:
    logits = torch.linspace(-60, 60, 16, device=DEVICE)[None]
    ids, weights = run(logits, None, 16)
    scores = router_scores(logits.double())
    expected = routing_weights(scores, ids.long(), SCALE)
    assert ids.tolist() == [list(range(16))]
    assert ((weights - expected).abs() <= 4e-6 * expected).all()


@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_table_names_the_experts_in_its_order(tokens: int, dtype: torch.dtype) -> None:
    logits, _ = draw(tokens, 24)
    generator = torch.Generator().manual_seed(2)
    table = torch.stack([torch.randperm(24, generator=generator)[:3] for _ in range(50)])
    token_ids = torch.randint(50, (tokens,), generator=generator).to(DEVICE)
    ids, weights = run(logits, None, 3, table.to(dtype).to(DEVICE), token_ids)
    expected = table.to(DEVICE)[token_ids]
    assert torch.equal(ids.long(), expected)
    right = routing_weights(router_scores(logits.double()), expected, SCALE)
    assert relative_error(weights, right) < 1e-6


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_weights(bad: float) -> None:
    logits, bias = draw(2, 20)
    logits[1, 13] = bad
    ids, weights = run(logits, bias, 4)
    assert 13 in ids[1].tolist()
    assert torch.isfinite(weights[0]).all()
    assert not torch.isfinite(weights[1]).all()


def test_shapes_that_disagree_are_refused() -> None:
    logits, _ = draw(2, 8)
    with pytest.raises(ShapeError, match="bias"):
        run(logits, torch.zeros(7, device=DEVICE), 2)
    with pytest.raises(ShapeError, match="ids"):
        run(logits, None, 9)
    with pytest.raises(ShapeError, match="table"):
        run(logits, None, 3, torch.zeros(5, 2, dtype=torch.int32, device=DEVICE))

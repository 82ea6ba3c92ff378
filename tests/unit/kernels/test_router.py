"""Routing: scores, selection with its tie rule, normalised weights."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.router import (
    rank_experts,
    router_scores,
    routing_weights,
    select_experts,
)


def test_scores_are_the_root_of_softplus() -> None:
    logits = torch.tensor([[-30.0, -1.0, 0.0, 2.0, 19.0, 25.0, 60.0]])
    expected = [math.sqrt(max(v, 0) + math.log1p(math.exp(-abs(v)))) for v in logits[0].tolist()]
    assert_close("scores", router_scores(logits), torch.tensor([expected], dtype=torch.float64))


def test_selects_the_largest_and_lists_them_by_id() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.8], [4.0, 3.0, 2.0, 1.0]])
    assert select_experts(scores, 2).tolist() == [[1, 3], [0, 1]]


def test_equal_scores_go_to_the_lower_id() -> None:
    scores = torch.zeros(1, 300)
    scores[0, 250] = 1.0
    assert select_experts(scores, 3).tolist() == [[0, 1, 250]]


def test_ranks_the_largest_first_and_equal_ones_by_id() -> None:
    scores = torch.tensor([[0.1, 0.9, 0.3, 0.9], [1.0, 2.0, 3.0, 4.0]])
    assert rank_experts(scores, 3).tolist() == [[1, 3, 2], [3, 2, 1]]


def test_weights_sum_to_the_scale_over_the_chosen() -> None:
    scores = torch.tensor([[1.0, 2.0, 5.0, 2.0]])
    got = routing_weights(scores, torch.tensor([[1, 3]]), 2.5)
    assert_close("weights", got, torch.tensor([[1.25, 1.25]]))


def test_an_expert_listed_twice_counts_twice() -> None:
    scores = torch.tensor([[1.0, 2.0]])
    got = routing_weights(scores, torch.tensor([[1, 1, 0]]), 1.0)
    assert_close("weights", got, torch.tensor([[0.4, 0.4, 0.2]]))


def test_scores_of_zero_do_not_divide_by_zero() -> None:
    got = routing_weights(torch.zeros(1, 4), torch.tensor([[0, 1]]), 1.5)
    assert got.tolist() == [[0.0, 0.0]]


def test_more_experts_than_exist_are_refused() -> None:
    with pytest.raises(ShapeError, match="5 experts asked for, 4 exist"):
        select_experts(torch.zeros(1, 4), 5)

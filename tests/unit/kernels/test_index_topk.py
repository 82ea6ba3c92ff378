"""Selection of compressed rows: order, ties, visibility, NaN."""

from __future__ import annotations

import math

import pytest
import torch

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.index_topk import index_topk


def select(scores: list[float], k: int, visible: int | None = None) -> list[int]:
    count = len(scores)
    ids, _ = index_topk(
        torch.tensor([scores]),
        torch.arange(count),
        torch.tensor([count if visible is None else visible]),
        k,
    )
    return ids[0].tolist()


def test_larger_scores_come_first() -> None:
    assert select([0.5, 3.0, -1.0, 2.0], 3) == [1, 3, 0]


def test_equal_scores_go_to_the_lower_row() -> None:
    assert select([1.0, 0.0, 0.0, 0.0, 2.0], 3) == [4, 0, 1]


def test_negative_zero_ties_with_zero() -> None:
    assert select([-0.0, 0.0, -0.0, 0.0], 2) == [0, 1]


def test_nan_is_never_selected() -> None:
    assert select([math.nan, -5.0, math.nan], 2) == [1, -1]


def test_rows_past_the_visible_ones_are_never_selected() -> None:
    assert select([1.0, 2.0, 9.0, 9.0], 3, visible=2) == [1, 0, -1]


def test_a_query_that_sees_nothing_selects_nothing() -> None:
    assert select([1.0, 2.0], 2, visible=0) == [-1, -1]


def test_fewer_candidates_than_asked_for() -> None:
    assert select([1.0], 4) == [0]


def test_ties_among_many_rows_follow_the_rule() -> None:
    generator = torch.Generator().manual_seed(9)
    scores = torch.randint(0, 5, (7, 1000), generator=generator).float()
    ids, best = index_topk(scores, torch.arange(1000), torch.full((7,), 1000), 64)
    for row, chosen in zip(scores.tolist(), ids.tolist(), strict=True):
        assert chosen == sorted(range(1000), key=lambda w: (-row[w], w))[:64]
    assert torch.equal(best, scores.gather(-1, ids))


def test_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="index_topk"):
        index_topk(torch.ones(2, 3), torch.arange(4), torch.tensor([3, 3]), 1)

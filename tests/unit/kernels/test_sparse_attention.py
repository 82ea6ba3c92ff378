"""Attention with a sink against scalar loops."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.sparse_attention import sparse_attention


def literal(
    q: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, sink: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros(q.shape, dtype=torch.float64)
    for t in range(q.shape[0]):
        for h in range(q.shape[1]):
            attended = [int(i) for i in ids[t] if i >= 0]
            scores = [
                float(q[t, h].double() @ rows[i].double()) / math.sqrt(q.shape[2]) for i in attended
            ]
            total = sum(math.exp(s) for s in scores) + math.exp(float(sink[h]))
            for i, s in zip(attended, scores, strict=True):
                out[t, h] += math.exp(s) / total * rows[i].double()
    return out


def draw(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    q = torch.randn(5, 3, 7, generator=generator).to(dtype)
    rows = torch.randn(13, 7, generator=generator).to(dtype)
    ids = torch.randint(-1, 13, (5, 9), generator=generator)
    ids[2] = -1
    return q, rows, ids, torch.randn(3, generator=generator)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_matches_scalar_loops(dtype: torch.dtype) -> None:
    q, rows, ids, sink = draw(dtype)
    assert_close("outputs", sparse_attention(q, rows, ids, sink), literal(q, rows, ids, sink))


def test_a_query_without_rows_gives_zero() -> None:
    q, rows, ids, sink = draw(torch.float32)
    assert sparse_attention(q, rows, ids, sink)[2].eq(0).all()


def test_the_sink_takes_mass_and_adds_no_value() -> None:
    q, rows = torch.zeros(1, 1, 4), torch.ones(1, 4)
    got = sparse_attention(q, rows, torch.tensor([[0]]), torch.tensor([math.log(3.0)]))
    assert_close("outputs", got, torch.full((1, 1, 4), 0.25))


def test_a_row_listed_twice_counts_twice() -> None:
    q, rows, sink = (
        torch.zeros(1, 1, 2),
        torch.tensor([[1.0, 0.0], [0.0, 1.0]]),
        torch.tensor([-50.0]),
    )
    got = sparse_attention(q, rows, torch.tensor([[0, 0, 1]]), sink)
    assert_close("outputs", got, torch.tensor([[[2 / 3, 1 / 3]]]))


def test_rows_that_are_not_attended_may_hold_anything() -> None:
    q, rows, ids, sink = draw(torch.float32)
    ids[:, 0] = -1
    poisoned = rows.clone()
    unused = sorted(set(range(13)) - set(ids.flatten().tolist()) | {0})
    clean = ids.masked_fill(torch.isin(ids, torch.tensor(unused)), -1)
    poisoned[unused] = math.nan
    expected = sparse_attention(q, rows, clean, sink)
    assert torch.equal(sparse_attention(q, poisoned, clean, sink), expected)


def test_huge_scores_do_not_overflow() -> None:
    q, rows = torch.full((1, 1, 4), 1e4), torch.full((2, 4), 1e4)
    got = sparse_attention(q, rows, torch.tensor([[0, 1]]), torch.zeros(1))
    assert_close("outputs", got, torch.full((1, 1, 4), 1e4))


def test_no_rows_at_all_give_zero() -> None:
    got = sparse_attention(
        torch.ones(2, 1, 4), torch.empty(0, 4), torch.full((2, 3), -1), torch.zeros(1)
    )
    assert got.eq(0).all()


def test_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="sparse_attention"):
        sparse_attention(
            torch.ones(2, 3, 4), torch.ones(5, 4), torch.zeros(1, 1).long(), torch.ones(3)
        )

"""Selection of rows: order, ties, what is never taken, and more rows than a block holds."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import CapacityError, ShapeError
from edgedsv4.kernels.gpu.index_select import select_rows, select_scratch_ints
from edgedsv4.kernels.index_topk import index_topk

RATIO = 4


def select(
    scores: torch.Tensor, k: int, position: int, *, first: int = 0, ratio: int = RATIO
) -> tuple[torch.Tensor, int]:
    """Selected rows [T, k] and the flag of scores that are not finite."""
    tokens, capacity = scores.shape
    selected = torch.full((tokens, k), -7, dtype=torch.int32, device=DEVICE)
    scratch = torch.full((select_scratch_ints(tokens, capacity, k),), 123456789, dtype=torch.int32)
    bad = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    where = torch.tensor([position], dtype=torch.int32, device=DEVICE)
    select_rows(
        selected, scores.to(DEVICE), where, scratch.to(DEVICE), bad, ratio=ratio, first=first
    )
    return selected.cpu(), int(bad)


def expected(scores: torch.Tensor, k: int, seen: list[int]) -> torch.Tensor:
    """The same by the definition."""
    rows = torch.arange(scores.shape[1])
    best, _ = index_topk(scores, rows, torch.tensor(seen), k)
    lines = []
    for ids, count in zip(best.tolist(), seen, strict=True):
        chosen = list(range(count)) if count <= k else sorted(i for i in ids if i >= 0)
        lines.append(chosen + [-1] * (k - len(chosen)))
    return torch.tensor(lines, dtype=torch.int32)


def check(scores: torch.Tensor, k: int) -> int:
    """Select for tokens that all see every row; the flag."""
    tokens, count = scores.shape
    selected, bad = select(scores, k, RATIO * count, ratio=RATIO)
    assert torch.equal(selected, expected(scores, k, [count] * tokens))
    return bad


@pytest.mark.parametrize("count", [1, 7, 8, 9, 64, 127, 128, 129, 700, 2050])
def test_random_scores(count: int) -> None:
    generator = torch.Generator().manual_seed(count)
    assert check(torch.randn(2, count, generator=generator), 8) == 0


@pytest.mark.parametrize("k", [1, 3, 32, 100])
def test_any_number_of_rows(k: int) -> None:
    generator = torch.Generator().manual_seed(k)
    check(torch.randn(1, 900, generator=generator), k)


@pytest.mark.parametrize("value", [0.0, -0.0, 1.5, -3.0, 1e-45, 3.4e38])
def test_equal_scores_go_to_the_lower_rows(value: float) -> None:
    check(torch.full((1, 600), value), 16)


def test_many_ties() -> None:
    generator = torch.Generator().manual_seed(4)
    scores = torch.randn(3, 1500, generator=generator).relu()
    scores[1] = torch.randint(-2, 2, (1500,), generator=generator).float()
    scores[2] = torch.where(torch.rand(1500, generator=generator) < 0.5, 0.0, -0.0)
    check(scores, 20)


def test_denormals_are_told_apart() -> None:
    bits = torch.randperm(700, generator=torch.Generator().manual_seed(5)).to(torch.int32)
    scores = bits.view(torch.float32)
    check(torch.stack((scores, -scores)), 16)


def test_neighbours_at_every_magnitude() -> None:
    generator = torch.Generator().manual_seed(6)
    bits = torch.randint(-(2**31), 2**31 - 1, (1, 1200), generator=generator).to(torch.int32)
    scores = bits.view(torch.float32)
    check(torch.where(scores.isfinite(), scores, 0.0), 24)


@pytest.mark.parametrize("value", [math.nan, -math.nan, -math.inf])
def test_what_is_not_a_number_is_never_taken(value: float) -> None:
    scores = torch.full((3, 500), value)
    scores[1, 70:76] = torch.tensor([3.0, -1.0, 0.0, -0.0, -3.4e38, 1e-45])
    scores[2, ::2] = torch.randn(250, generator=torch.Generator().manual_seed(7))
    assert check(scores, 12) == 1


@pytest.mark.parametrize("value", [math.inf, math.nan, -math.nan, -math.inf])
def test_one_score_that_is_not_finite_is_reported(value: float) -> None:
    scores = torch.randn(1, 300, generator=torch.Generator().manual_seed(8))
    scores[0, 290] = value
    assert check(scores, 12) == 1


def test_more_infinities_than_are_taken() -> None:
    scores = torch.zeros(1, 400)
    scores[0, 5::7] = math.inf
    assert check(scores, 12) == 1


def test_a_score_that_is_not_seen_counts_for_nothing() -> None:
    scores = torch.full((1, 400), math.nan)
    scores[0, :150] = torch.randn(150, generator=torch.Generator().manual_seed(9))
    selected, bad = select(scores, 12, RATIO * 150 - 1)
    assert bad == 0
    assert torch.equal(selected, expected(scores, 12, [150]))


def test_a_token_that_sees_few_rows_takes_all_and_reads_no_score() -> None:
    selected, bad = select(torch.full((1, 400), math.nan), 12, RATIO * 12 - 1)
    assert (selected[0].tolist(), bad) == (list(range(12)), 0)
    selected, _ = select(torch.full((1, 400), math.nan), 12, RATIO * 5 + 2)
    assert selected[0].tolist() == [*range(5), *([-1] * 7)]
    selected, _ = select(torch.full((1, 400), math.nan), 12, 0)
    assert selected[0].tolist() == [-1] * 12


@pytest.mark.parametrize("position", [RATIO * 11, RATIO * 130 - 6])
def test_each_token_of_a_chunk_sees_its_own_rows(position: int) -> None:
    scores = torch.randn(9, 140, generator=torch.Generator().manual_seed(10))
    seen = [(position + t + 1) // RATIO for t in range(9)]
    selected, _ = select(scores, 12, position)
    assert torch.equal(selected, expected(scores, 12, seen))
    part, _ = select(scores[3:], 12, position, first=3)
    assert torch.equal(part, selected[3:])


def test_scratch_grows_with_the_capacity() -> None:
    assert select_scratch_ints(1, 4096, 512) == 0
    assert select_scratch_ints(1, 262_144, 512) == 2 * 512 * (64 + 8)
    assert select_scratch_ints(3, 262_144, 1024) == 6 * 1024 * (32 + 4)


def test_a_small_scratch_and_other_shapes_are_refused() -> None:
    selected, scores = torch.empty(1, 4, dtype=torch.int32), torch.empty(1, 4000)
    flag = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(CapacityError, match="scratch of select_rows"):
        select_rows(selected, scores, flag, flag[:0], flag, ratio=RATIO)
    with pytest.raises(ShapeError, match="select_rows"):
        select_rows(selected, scores[:0], flag, flag[:0], flag, ratio=RATIO)


@pytest.mark.parametrize("k", [512, 1024])
@pytest.mark.parametrize("count", [1025, 4096, 16_384, 100_000, 262_144])
def test_full_size(k: int, count: int) -> None:
    if DEVICE == "cpu":
        pytest.skip("takes a GPU")
    scores = torch.randn(2, count, generator=torch.Generator().manual_seed(k + count))
    scores[1] = scores[1].relu() * (scores[1] > 3)
    check(scores, k)

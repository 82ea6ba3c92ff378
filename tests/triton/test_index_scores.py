"""Index scores from keys as they are stored."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from numeric import assert_close
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.index_scores import score_keys, tokens_per_tile
from edgedsv4.kernels.index_scores import index_scores_reference
from edgedsv4.kernels.kv_quant import dequantize_index_keys, quantize_index_keys

RATIO = 4


class Problem:
    """Random queries, head weights and stored keys, and the scores of every row."""

    def __init__(self, tokens: int, rows: int, heads: int, dim: int, profile: str) -> None:
        generator = torch.Generator().manual_seed(tokens + rows + heads + dim)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator)

        self.weights = normal(tokens, heads)
        queries = normal(tokens * heads, dim) * torch.exp2(3 * normal(tokens * heads, 1))
        keys = normal(rows, dim) * torch.exp2(3 * normal(rows, 1))
        self.keys: tuple[torch.Tensor, ...] = (keys,)
        if profile == "default":
            codes = quantize_index_keys(queries, backend="reference")
            queries = dequantize_index_keys(*codes, torch.float32, backend="reference")
            self.keys = quantize_index_keys(keys, backend="reference")
            keys = dequantize_index_keys(*self.keys, torch.float32, backend="reference")
        self.queries = queries.view(tokens, heads, dim)
        self.reference = index_scores_reference(
            self.queries.double(), keys.double(), self.weights.double()
        )

    def scores(self, position: int, topk: int, capacity: int, **options: Any) -> torch.Tensor:
        scores = torch.full((self.weights.shape[0], capacity), torch.nan, device=DEVICE)
        score_keys(
            scores,
            self.queries.to(DEVICE),
            self.weights.to(DEVICE),
            tuple(part.to(DEVICE) for part in self.keys),
            torch.tensor([position], dtype=torch.int32, device=DEVICE),
            ratio=RATIO,
            topk=topk,
            **options,
        )
        return scores.cpu()


@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize(
    ("rows", "heads", "dim"), [(1, 4, 32), (131, 4, 32), (70, 64, 128), (33, 3, 48), (40, 20, 96)]
)
def test_one_token_scores_what_it_sees(profile: str, rows: int, heads: int, dim: int) -> None:
    problem = Problem(1, rows, heads, dim, profile)
    scores = problem.scores(RATIO * rows - 1, 0, rows + 5)
    assert_close("scores", scores[:, :rows], problem.reference)
    assert scores[:, rows:].isnan().all()


@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize(("tokens", "family"), [(2, ""), (7, ""), (7, "sm_90")])
def test_each_token_of_a_chunk_scores_what_it_sees(profile: str, tokens: int, family: str) -> None:
    problem = Problem(tokens, 40, 4, 32, profile)
    position = 4 * 38
    scores = problem.scores(position, 3, 40, family=family)
    for t in range(tokens):
        seen = (position + t + 1) // RATIO
        assert_close(f"token {t}", scores[t, :seen], problem.reference[t, :seen])


@pytest.mark.parametrize("profile", ["default", "exact"])
def test_a_part_of_a_chunk_is_scored_by_its_first_token(profile: str) -> None:
    problem = Problem(3, 40, 4, 32, profile)
    scores = problem.scores(7, 3, 40, first=4 * 20 - 8)
    assert_close("scores", scores[0, :20], problem.reference[0, :20])
    assert scores[:, 21:].isnan().all()


@pytest.mark.parametrize("profile", ["default", "exact"])
def test_a_token_that_takes_all_rows_is_not_scored(profile: str) -> None:
    assert Problem(1, 16, 4, 32, profile).scores(4 * 16 - 1, 16, 16).isnan().all()


def test_queries_may_be_bfloat16() -> None:
    problem = Problem(2, 40, 4, 32, "default")
    wide = problem.scores(4 * 40 - 2, 0, 40)
    problem.queries = problem.queries.bfloat16()
    assert torch.equal(problem.scores(4 * 40 - 2, 0, 40), wide)


def test_scales_may_be_small_and_large() -> None:
    problem = Problem(1, 3, 4, 32, "default")
    codes, scales = problem.keys
    for row, byte in enumerate((2, 127, 240)):
        scales[row] = byte
    keys = dequantize_index_keys(codes, scales, torch.float32, backend="reference")
    reference = index_scores_reference(problem.queries, keys, problem.weights)
    scores = problem.scores(11, 0, 3)
    for row in range(3):
        assert_close(f"row {row}", scores[:, row], reference[:, row])


@pytest.mark.parametrize("profile", ["default", "exact"])
def test_nan_and_infinity_reach_the_scores(profile: str) -> None:
    problem = Problem(2, 20, 4, 32, profile)
    problem.weights[0, 1] = torch.nan
    if profile == "default":
        problem.keys[1][5] = 255
    else:
        problem.keys[0][5, 3] = torch.nan
    scores = problem.scores(4 * 20 - 1, 0, 20)
    assert scores[0].isnan().all()
    assert scores[1].isnan().nonzero().flatten().tolist() == [5]


def test_tiles_of_tokens_fit_the_budget() -> None:
    assert tokens_per_tile(4096, 1024, 4 << 20) == 1024
    assert tokens_per_tile(100, 1000, 4 << 20) == 100
    assert tokens_per_tile(4096, 1000, 80_001) == 16
    assert tokens_per_tile(4096, 1 << 20, 1) == 1


def test_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="score_keys"):
        score_keys(
            torch.empty(1, 4),
            torch.empty(1, 4, 32),
            torch.empty(1, 3),
            (torch.empty(4, 32),),
            torch.zeros(1, dtype=torch.int32),
            ratio=RATIO,
            topk=1,
        )


@pytest.mark.parametrize(("dim", "match"), [(36, "multiple of 8"), (32, "contiguous")])
def test_keys_that_cannot_be_read_are_refused(dim: int, match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        score_keys(
            torch.empty(1, 4),
            torch.empty(1, 4, dim),
            torch.empty(1, 4),
            (torch.empty(4, dim, dtype=torch.uint8)[:, : dim // 2],) * 2,
            torch.zeros(1, dtype=torch.int32),
            ratio=RATIO,
            topk=1,
        )


@pytest.mark.parametrize("family", ["", "sm_89", "sm_90"])
@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize(("tokens", "rows"), [(1, 30_001), (37, 3001)])
def test_full_size(profile: str, tokens: int, rows: int, family: str) -> None:
    if DEVICE == "cpu":
        pytest.skip("takes a GPU")
    problem = Problem(tokens, rows, 64, 128, profile)
    scores = problem.scores(RATIO * rows - 1, 512, rows, family=family)
    assert_close("scores", scores, problem.reference)

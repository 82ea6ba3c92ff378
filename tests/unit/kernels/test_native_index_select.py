"""Scoring and selection of index keys in C against the references."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from guarded import Guarded
from native_rows import F32, FP4, StoredRows
from numeric import assert_close, assert_same_bits
from torch import Tensor

from edgedsv4.kernels.index_scores import index_scores, index_scores_reference
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.native.library import NativeRun, library, pointer

lib, ffi = library()
pytestmark = pytest.mark.usefixtures("isa")


@dataclass
class Case:
    """Queries, head weights and keys of the last `tokens` positions below `stop`."""

    heads: int
    dim: int
    kind: int
    stop: int
    tokens: int
    ratio: int = 4
    top: int = 10

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.stop + self.dim)
        self.start, self.count = self.stop - self.tokens, self.stop // self.ratio
        self.keys = StoredRows(self.count + 2, self.dim, self.kind)
        self.keys.store(0, torch.randn(self.count, self.dim, generator=generator))
        self.weights = torch.randn(self.tokens, self.heads, generator=generator)
        self.q = torch.randn(self.tokens, self.heads, self.dim, generator=generator)
        if self.kind == FP4:
            run, rows = NativeRun(), self.tokens * self.heads
            run.check(lib.dk_round_fp4(run.cdata, pointer(self.q), rows, self.dim))

    def select(
        self,
        first: int = 0,
        tokens: int | None = None,
        *,
        threads: int = 1,
        has_scores: bool = True,
    ) -> tuple[Tensor, Tensor, int]:
        """Ids [T, top], scores [T, keys] and run.bad of the C kernel for some of the tokens."""
        tokens = self.tokens - first if tokens is None else tokens
        start, part = self.start + first, slice(first, first + tokens)
        count = (start + tokens) // self.ratio
        nbytes = lib.dk_index_scratch_bytes(count, self.heads, self.dim, threads)
        scratch = Guarded(nbytes, dtype=torch.uint8)
        ids = Guarded(tokens, self.top, dtype=torch.int32)
        scores, run = Guarded(tokens, count), NativeRun(threads)
        status = lib.dk_index_select(
            run.cdata,
            pointer(ids.tensor),
            pointer(scores.tensor) if has_scores else ffi.NULL,
            pointer(self.q[part]),
            pointer(self.weights[part]),
            self.keys.record,
            start,
            tokens,
            self.heads,
            self.dim,
            self.ratio,
            self.top,
            ffi.cast("void *", scratch.tensor.data_ptr()),
        )
        run.check(status)
        scratch.check()
        return ids.check(), scores.check(), run.cdata.bad

    @property
    def visible(self) -> Tensor:
        return (torch.arange(self.start, self.stop) + 1) // self.ratio

    def chosen(self, scores: Tensor) -> Tensor:
        """Ids that belong to scores, by the reference."""
        ids, _ = index_topk(scores, torch.arange(scores.shape[1]), self.visible, self.top)
        ids = torch.where(ids < 0, 1 << 30, ids).sort(dim=-1).values
        ids = torch.nn.functional.pad(ids, (0, self.top - ids.shape[1]), value=1 << 30)
        return torch.where(ids == 1 << 30, -1, ids).int()


CASES = [
    Case(8, 128, FP4, 1007, 7),
    Case(3, 64, FP4, 330, 130),
    Case(65, 32, FP4, 131, 2, top=1),
    Case(1, 256, FP4, 2100, 1, top=300),
    Case(3, 16, FP4, 109, 9),
    Case(5, 128, FP4, 130, 130, ratio=1, top=20),
    Case(8, 128, F32, 1007, 7),
    Case(65, 40, F32, 330, 130),
    Case(1, 1, F32, 60, 3, ratio=3),
    Case(2, 8, F32, 5, 5, ratio=1, top=7),
]


def name(case: Case) -> str:
    """For the ids of the tests."""
    kind = "fp4" if case.kind == FP4 else "f32"
    return f"{case.heads}x{case.dim} {kind} {case.tokens} of {case.stop}"


@pytest.mark.parametrize("case", CASES, ids=name)
def test_scores_match_the_reference(case: Case) -> None:
    _, scores, bad = case.select(threads=2)
    expected = index_scores_reference(
        case.q.double(), case.keys.values()[: case.count].double(), case.weights.double()
    )
    hidden = torch.arange(case.count) >= case.visible[:, None]
    assert scores[hidden].eq(-math.inf).all()
    assert_close("scores", scores[~hidden], expected[~hidden], 1e-6)
    assert bad == 0


@pytest.mark.parametrize("case", CASES, ids=name)
def test_the_best_visible_rows_are_selected_in_ascending_order(case: Case) -> None:
    ids, scores, _ = case.select(threads=2)
    assert torch.equal(ids, case.chosen(scores))


@pytest.mark.parametrize("case", CASES, ids=name)
def test_scores_are_optional(case: Case) -> None:
    assert torch.equal(case.select(has_scores=False)[0], case.select()[0])


@pytest.mark.parametrize("case", CASES[:7], ids=name)
def test_a_token_depends_on_neither_its_chunk_nor_threads(case: Case) -> None:
    ids, scores, _ = case.select()
    for threads in (2, 5):
        again = case.select(threads=threads)
        assert_same_bits("ids", again[0], ids)
        assert_same_bits("scores", again[1], scores)
    for first in {0, case.tokens // 2, case.tokens - 1}:
        alone = case.select(first, 1)
        assert_same_bits("ids", alone[0], ids[first : first + 1])
        assert_same_bits("scores", alone[1], scores[first : first + 1, : alone[1].shape[1]])


@pytest.mark.parametrize("kind", [FP4, F32])
def test_equal_scores_go_to_the_lower_row(kind: int) -> None:
    case = Case(2, 32, kind, 400, 9, ratio=2, top=50)
    few = torch.randint(-1, 2, (case.count, 32), generator=torch.Generator().manual_seed(3))
    case.keys.store(0, few * (torch.arange(32) < 2).float())  # nine different keys
    ids, scores, _ = case.select()
    assert scores[0, :150].unique().numel() < 15
    assert torch.equal(ids, case.chosen(scores))


@pytest.mark.parametrize("kind", [FP4, F32])
@pytest.mark.parametrize("weight", [0.0, -0.0])
def test_all_zero_scores_select_the_lowest_rows(kind: int, weight: float) -> None:
    case = Case(3, 32, kind, 403, 4)
    case.weights.fill_(weight)
    case.weights[:, 0] = -weight
    ids, _, _ = case.select()
    assert ids.tolist() == [list(range(10))] * 4


def test_a_token_that_sees_few_rows_takes_them_all() -> None:
    case = Case(2, 32, F32, 20, 20)
    ids, _, _ = case.select(has_scores=False)
    for position, row in enumerate(ids.tolist()):
        visible = (position + 1) // 4
        assert row == [*range(visible), *[-1] * (10 - visible)]


@pytest.mark.parametrize("kind", [FP4, F32])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_head_weight_is_reported(kind: int, bad: float) -> None:
    case = Case(3, 64, kind, 400, 6)
    case.weights[4, 1] = bad
    ids, scores, found = case.select()
    assert found != 0
    assert torch.equal(ids, case.chosen(scores))
    if math.isnan(bad):
        assert scores[4].isnan().sum() >= 99
        assert ids[4].eq(-1).all()


@pytest.mark.parametrize("kind", [FP4, F32])
def test_a_bad_query_is_reported_and_makes_its_scores_nan(kind: int) -> None:
    case = Case(3, 64, kind, 400, 6)
    case.q[2, 1, 40] = math.nan
    ids, scores, found = case.select()
    assert found != 0
    assert ids[2].eq(-1).all()
    assert scores[[0, 1, 3]][:, :90].isfinite().all()


@pytest.mark.parametrize(("kind", "dim"), [(F32, 64), (FP4, 64), (FP4, 128)])
def test_a_key_that_is_nan_is_never_selected(kind: int, dim: int) -> None:
    case = Case(3, dim, kind, 400, 6)
    data, scales = case.keys.parts
    if kind == F32:
        data.view(torch.float32)[40, 3] = math.nan
    else:
        scales[40, 1] = 0xFF
    ids, scores, _ = case.select()
    assert scores[:, 40].isnan().all()
    assert not ids.eq(40).any()
    assert torch.equal(ids, case.chosen(scores))


def test_infinite_scores_come_first_and_minus_infinity_is_not_taken() -> None:
    case = Case(1, 8, F32, 80, 1, top=15)
    keys = case.keys.values()
    keys[:] = 1.0
    keys[7] = 3e38
    case.q[:] = 2.0
    case.weights[:] = 1.0
    case.top = 1
    assert case.select()[0].tolist() == [[7]]
    case.weights[:] = -1.0
    case.top = 20
    ids, _, _ = case.select()
    assert ids.tolist() == [[i for i in range(20) if i != 7] + [-1]]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 1), (3, 17), (7, 700), (40, 65)])
def test_the_public_function_scores_all_keys(tokens: int, rows: int) -> None:
    generator = torch.Generator().manual_seed(rows)
    q = torch.randn(tokens, 5, 24, generator=generator)
    keys = torch.randn(rows, 24, generator=generator)
    weights = torch.randn(tokens, 5, generator=generator)
    got = index_scores(q, keys, weights, backend="native")
    expected = index_scores_reference(q.double(), keys.double(), weights.double())
    assert_close("scores", got, expected, 1e-6)

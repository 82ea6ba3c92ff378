"""Log probabilities and per-token likelihoods for embedders, against plain float64 formulas."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from runtime_fakes import FakeModel, expected_logits, fake_parts

import edgedsv4
from edgedsv4.errors import BusyError, ConfigError, ContextFullError, NumericError
from edgedsv4.runtime.scoring import score_continuation, token_nlls, top_logprobs
from edgedsv4.runtime.session import Session

IDS = [(7 * i + i // 3) % 11 for i in range(120)]


def exact(row: np.ndarray) -> list[float]:
    """Log probabilities with exact sums."""
    values = [float(value) for value in row]
    largest = max(values)
    total = math.fsum(math.exp(value - largest) for value in values)
    return [value - largest - math.log(total) for value in values]


def expected_nlls(token_ids: Sequence[int], first: int) -> list[float]:
    return [-exact(expected_logits(token_ids[:i]))[token_ids[i]] for i in range(first, len(IDS))]


@pytest.fixture
def session() -> Session:
    return Session(fake_parts(FakeModel(), prefill_chunk=50), capacity=300)


@pytest.mark.parametrize("size", [1, 5, 1000])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_top_logprobs_are_the_largest_in_order(size: int, dtype: type) -> None:
    row = np.random.default_rng(size).normal(0, 5, size).astype(dtype)
    every = exact(row)
    order = sorted(range(size), key=lambda i: (-row[i], i))
    for n in {0, 1, min(7, size), size}:
        ids, logprobs = top_logprobs(row, n)
        assert ids.tolist() == order[:n]
        np.testing.assert_allclose(logprobs, [every[i] for i in order[:n]], rtol=1e-13, atol=1e-14)
        assert (ids.dtype, logprobs.dtype) == (np.int64, np.float64)


def test_equal_logits_go_by_the_lower_id() -> None:
    row = np.array([1.0, 2.0, 1.0, 2.0, 1.0], np.float32)
    assert top_logprobs(row, 4)[0].tolist() == [1, 3, 0, 2]


def test_logprobs_of_far_apart_logits_are_stable() -> None:
    ids, logprobs = top_logprobs(np.array([3e38, -3e38, -math.inf], np.float32), 3)
    assert ids.tolist() == [0, 1, 2]
    assert logprobs[0] == 0
    assert logprobs[1] == float(np.float32(-3e38)) - float(np.float32(3e38))
    assert logprobs[2] == -math.inf


def test_top_logprobs_are_public() -> None:
    assert edgedsv4.top_logprobs is top_logprobs


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_logit_has_no_logprobs(bad: float) -> None:
    with pytest.raises(NumericError, match="token 1 "):
        top_logprobs(np.array([0.0, bad, 1.0], np.float32), 1)


def test_row_of_bans_has_no_logprobs() -> None:
    with pytest.raises(NumericError, match="every logit"):
        top_logprobs(np.full(3, -math.inf, np.float32), 1)


@pytest.mark.parametrize("n", [-1, 4])
def test_count_outside_the_vocabulary_is_refused(n: int) -> None:
    with pytest.raises(ConfigError, match=rf"0\.\.3, found {n}"):
        top_logprobs(np.zeros(3, np.float32), n)
    with pytest.raises(ConfigError, match="logits"):
        top_logprobs(np.zeros((1, 3), np.float32), 1)


def test_score_of_an_empty_timeline_begins_with_nan(session: Session) -> None:
    nlls = session.score(IDS)
    assert nlls.dtype == np.float64
    assert math.isnan(nlls[0])
    np.testing.assert_allclose(nlls[1:], expected_nlls(IDS, 1), rtol=1e-12)
    assert session.token_ids == tuple(IDS)


@pytest.mark.parametrize("known", [1, 49, 50, 51, 119])
def test_score_goes_on_from_the_timeline(session: Session, known: int) -> None:
    session.evaluate(IDS[:known])
    np.testing.assert_allclose(session.score(IDS[known:]), expected_nlls(IDS, known), rtol=1e-12)
    np.testing.assert_array_equal(session.logits(), expected_logits(IDS))


def test_score_in_parts_is_the_score_of_the_whole(session: Session) -> None:
    parts = [session.score(IDS[:1]), session.score(IDS[1:70]), session.score(IDS[70:])]
    again = Session(fake_parts(FakeModel(), prefill_chunk=7), capacity=120).score(IDS)
    np.testing.assert_array_equal(np.concatenate(parts), again)


def test_score_after_a_rewind_knows_what_came_before(session: Session) -> None:
    session.score(IDS)
    session.rewind(30)
    np.testing.assert_allclose(session.score(IDS[90:]), expected_nlls(IDS, 90), rtol=1e-12)


def test_score_of_nothing_is_nothing(session: Session) -> None:
    assert session.score([]).size == 0
    assert session.length == 0


def test_score_tells_its_progress(session: Session) -> None:
    told: list[tuple[int, int]] = []
    session.score(IDS, on_progress=lambda done, total: told.append((done, total)))
    assert told == [(50, 120), (100, 120), (120, 120)]


def test_score_that_cannot_fit_changes_nothing(session: Session) -> None:
    session.evaluate(IDS[:5])
    with pytest.raises(ContextFullError):
        session.score([1] * 296)
    with pytest.raises(ConfigError):
        session.score([1, 11])
    assert session.token_ids == tuple(IDS[:5])


def test_score_holds_the_session_for_all_its_chunks(session: Session) -> None:
    def interrupt(_done: int, _total: int) -> None:
        with pytest.raises(BusyError):
            session.evaluate([1])

    session.score(IDS, on_progress=interrupt)
    assert session.length == len(IDS)


def test_score_asks_for_one_chunk_of_rows_at_a_time() -> None:
    asked: list[int] = []

    def evaluate(part: Sequence[int]) -> np.ndarray:
        asked.append(len(part))
        return np.zeros((len(part), 11), np.float32)

    nlls = score_continuation(evaluate, IDS, before=None, chunk=32)
    assert asked == [32, 32, 32, 24]
    np.testing.assert_allclose(nlls[1:], math.log(11))


def test_infinite_logit_has_no_likelihood() -> None:
    rows = np.zeros((1, 11), np.float32)
    rows[0, 3] = math.inf
    with pytest.raises(NumericError):
        score_continuation(lambda _part: rows, [1], before=None, chunk=8)
    with pytest.raises(NumericError):
        score_continuation(lambda _part: rows, [1], before=rows[0], chunk=8)


def test_nlls_of_many_rows_are_computed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = np.random.default_rng(2).normal(0, 3, (10, 40)).astype(np.float32)
    targets = [(3 * i) % 40 for i in range(10)]
    whole = token_nlls(rows, targets)
    monkeypatch.setattr("edgedsv4.runtime.scoring._BLOCK_ELEMENTS", 120)
    np.testing.assert_array_equal(token_nlls(rows, targets), whole)
    np.testing.assert_allclose(whole, [-exact(r)[t] for r, t in zip(rows, targets, strict=True)])

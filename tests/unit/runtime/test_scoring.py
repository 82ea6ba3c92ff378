"""Likelihood, divergence and saved logits of texts, with a model whose logits are a table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from array import array
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import numpy as np
import pytest

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError, NumericError
from edgedsv4.runtime.scoring import (
    Score,
    log_softmax,
    save_all_logits,
    score_text,
    text_windows,
)

VOCAB = 11
TABLE = np.random.default_rng(3).normal(size=(VOCAB, VOCAB)).astype(np.float32) * 2
BOS = 10


class TableSession:
    """The logits after a token are that token's row of the table."""

    def __init__(self, table: np.ndarray, capacity: int) -> None:
        self.table = table
        self.capacity = capacity
        self.ids: list[int] = []

    def __enter__(self) -> TableSession:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.ids = []

    def evaluate(self, token_ids: Sequence[int], *, logits: str, chunk: int) -> np.ndarray:
        assert logits == "all"
        assert len(token_ids) <= chunk
        self.ids += token_ids
        assert len(self.ids) <= self.capacity
        return self.table[list(token_ids)]


class DigitTokenizer:
    bos_id: int | None = BOS

    def encode(self, text: str) -> list[int]:
        return [int(ch) for ch in text]


@dataclasses.dataclass
class TableConfig:
    vocab_size: int = VOCAB


class TableEngine:
    def __init__(self, table: np.ndarray = TABLE, chunk: int = 4) -> None:
        self.table = table
        self.config = TableConfig(table.shape[1])
        self.options = EngineOptions(prefill_chunk=chunk)
        self.tokenizer = DigitTokenizer()

    def new_session(self, *, context: int | None = None) -> TableSession:
        return TableSession(self.table, context or 1 << 20)


def score(text: str, engine: TableEngine | None = None, window: int = 6, **paths: Path) -> Score:
    return score_text(engine or TableEngine(), text, window=window, **paths)  # type: ignore[arg-type]


def test_windows_open_with_bos_and_cover_every_token() -> None:
    assert text_windows([1, 2, 3, 4, 5], 9, 3) == [[9, 1, 2], [9, 3, 4], [9, 5]]


def test_windows_without_bos_leave_single_tokens_out() -> None:
    assert text_windows([1, 2, 3, 4, 5], None, 2) == [[1, 2], [3, 4]]


@pytest.mark.parametrize(("ids", "bos"), [([], 9), ([], None), ([1], None)])
def test_text_with_nothing_to_score_is_refused(ids: list[int], bos: int | None) -> None:
    with pytest.raises(ConfigError, match="at least two"):
        text_windows(ids, bos, 4)


def test_log_softmax_sums_to_one_for_large_logits() -> None:
    rows = log_softmax(np.array([[1e4, 1e4 - 1, 0.0]], dtype=np.float32))
    assert np.exp(rows.astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_uniform_model_has_the_vocabulary_as_perplexity() -> None:
    found = score("0123456789", TableEngine(np.zeros_like(TABLE)))
    assert found.perplexity == pytest.approx(VOCAB)
    assert found.nll_error == pytest.approx(0, abs=1e-6)


def test_likelihood_is_the_sum_over_every_text_token() -> None:
    text = "3141592"
    log_probs = TABLE.astype(np.float64)
    log_probs -= np.log(np.exp(log_probs).sum(axis=1, keepdims=True))
    ids = [int(ch) for ch in text]
    windows = [[BOS, *ids[:5]], [BOS, *ids[5:]]]
    expected = -sum(log_probs[a, b] for w in windows for a, b in itertools.pairwise(w))
    found = score(text)
    assert (found.tokens, found.nll_sum) == (7, pytest.approx(expected, rel=1e-6))


@pytest.mark.parametrize("chunk", [1, 2, 3, 64])
def test_score_does_not_depend_on_the_chunk(chunk: int) -> None:
    assert score("31415926", TableEngine(chunk=chunk)).to_json() == score("31415926").to_json()


def test_model_agrees_with_its_own_saved_logits(tmp_path: Path) -> None:
    saved = tmp_path / "a.npz"
    score("31415926535", save=saved)
    figures = score("31415926535", base=saved).to_json()
    assert (figures["kl_mean"], figures["kl_max"], figures["top1_agreement"]) == (0.0, 0.0, 1.0)


def test_divergence_is_from_the_saved_to_the_new(tmp_path: Path) -> None:
    saved = tmp_path / "a.npz"
    score("3", save=saved)
    other = TABLE[:, ::-1].copy()
    found = score("3", TableEngine(other), base=saved).to_json()
    p, q = (log_softmax(t[BOS : BOS + 1]).astype(np.float64)[0] for t in (TABLE, other))
    assert found["kl_mean"] == pytest.approx(float((np.exp(p) * (p - q)).sum()), rel=1e-6)
    assert found["top1_agreement"] == 0.0


@pytest.mark.parametrize(
    ("text", "window", "message"),
    [
        ("3141", 6, r"another text: token 4 differs \(5 tokens saved, 4 now\)"),
        ("31425", 6, "another text: token 3 differs"),
        ("31415", 5, "window 6, this run 5"),
    ],
)
def test_saved_logits_of_another_run_are_refused(
    tmp_path: Path, text: str, window: int, message: str
) -> None:
    score("31415", save=tmp_path / "a.npz")
    with pytest.raises(ConfigError, match=message):
        score(text, window=window, base=tmp_path / "a.npz")


def test_saved_logits_of_another_vocabulary_are_refused(tmp_path: Path) -> None:
    score("31415", save=tmp_path / "a.npz")
    with pytest.raises(ConfigError, match="vocab_size 11, this run 13"):
        score("31415", TableEngine(np.zeros((11, 13), np.float32)), base=tmp_path / "a.npz")


def test_window_of_one_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 2"):
        score("31", window=1)


def test_nan_logit_is_an_error_and_saves_nothing(tmp_path: Path) -> None:
    table = TABLE.copy()
    table[4, 4] = math.nan
    with pytest.raises(NumericError, match="not finite"):
        score("31415", TableEngine(table), save=tmp_path / "a.npz")
    assert list(tmp_path.iterdir()) == []


def test_saved_positions_are_the_logits_of_every_token(tmp_path: Path) -> None:
    ids = [3, 1, 4, 1, 5, 9]
    shape = save_all_logits(TableEngine(), ids, tmp_path / "x.npy")  # type: ignore[arg-type]
    assert shape == (6, VOCAB)
    assert np.array_equal(np.load(tmp_path / "x.npy"), TABLE[ids])


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "no tokens"),
        ([3, 11], "token 1 is 11"),
        ([-1], "token 0 is -1"),
        ([3, 1 << 70], "token 1 is 1180591620717411303424"),
        (array("i", [3, -5]), "token 1 is -5"),
    ],
    ids=str,
)
def test_ids_outside_the_vocabulary_are_refused(
    tmp_path: Path, ids: Sequence[int], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        save_all_logits(TableEngine(), ids, tmp_path / "x.npy")  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []

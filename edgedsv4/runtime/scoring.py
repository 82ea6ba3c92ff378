"""How well a model predicts given tokens: likelihoods, logits to a file, distance to other logits.

Rows are consumed chunk by chunk, so memory is bounded by the chunk and not by the text. All
sums are float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, NumericError
from edgedsv4.formats.logit_file import LogitHeader, read_logits, write_logits
from edgedsv4.formats.whole_file import whole_file

if TYPE_CHECKING:
    from edgedsv4.runtime.engine import Engine

_BLOCK_ELEMENTS = 1 << 22
"""Logits turned into float64 at once; the sums hold a few copies of that."""

Progress = Callable[[int, int], None]
Logits = npt.NDArray[np.float32]
FloatArray = npt.NDArray[np.float64]
Evaluate = Callable[[Sequence[int]], Logits | None]
"""Appends tokens and returns the logits after each."""


@dataclass(slots=True)
class Score:
    """Sums over the tokens scored so far, and what follows from them."""

    tokens: int = 0
    nll_sum: float = 0.0
    """Negative log-likelihood, nats."""
    nll_square_sum: float = 0.0
    kl_values: list[float] = field(default_factory=list)
    """KL divergence from the saved distribution to this one per token, nats; empty without one."""
    top1_equal: int = 0

    @property
    def nll(self) -> float:
        """Mean negative log-likelihood per token, nats."""
        return self.nll_sum / self.tokens

    @property
    def nll_error(self) -> float:
        """Standard error of the mean."""
        if self.tokens < 2:
            return 0.0
        variance = max(0.0, self.nll_square_sum / self.tokens - self.nll**2)
        return math.sqrt(variance / (self.tokens - 1))

    @property
    def perplexity(self) -> float:
        """The exponential of the mean negative log-likelihood."""
        return math.exp(min(self.nll, 700.0))

    def to_json(self) -> dict[str, object]:
        """The figures as JSON types; those of the comparison only when there was one."""
        figures: dict[str, object] = {
            "tokens": self.tokens,
            "nll": self.nll,
            "nll_error": self.nll_error,
            "perplexity": self.perplexity,
        }
        if self.kl_values:
            figures["kl_mean"] = sum(self.kl_values) / self.tokens
            figures["kl_p99"] = float(np.quantile(self.kl_values, 0.99))
            figures["kl_max"] = max(self.kl_values)
            figures["top1_agreement"] = self.top1_equal / self.tokens
        return figures

    def add(self, log_probs: Logits, targets: Sequence[int], base: Logits | None) -> None:
        """Counts rows [n, V] that predict `targets`, against `base` [n, V] if there is one."""
        rows = log_probs.astype(np.float64)
        found = -rows[np.arange(len(targets)), np.asarray(targets, dtype=np.int64)]
        self.tokens += len(targets)
        self.nll_sum += float(found.sum())
        self.nll_square_sum += float((found**2).sum())
        if base is None:
            return
        reference = base.astype(np.float64)
        terms = np.exp(reference) * (reference - rows)
        self.kl_values += [float(value) for value in terms.sum(axis=1)]
        self.top1_equal += int((rows.argmax(axis=1) == reference.argmax(axis=1)).sum())


def log_softmax(logits: Logits) -> Logits:
    """Natural log-probabilities of logits [n, V], computed in float64, float32."""
    return _log_probabilities(logits).astype(np.float32)


def _log_probabilities(logits: npt.NDArray[np.floating[Any]]) -> FloatArray:
    """The same in float64; of [V] too."""
    rows = logits.astype(np.float64)
    rows -= rows.max(axis=-1, keepdims=True)
    rows -= np.log(np.exp(rows).sum(axis=-1, keepdims=True))
    return rows


def top_logprobs(
    logits: npt.NDArray[np.floating[Any]], n: int
) -> tuple[npt.NDArray[np.int64], FloatArray]:
    """The n likeliest tokens, and how likely each is before any sampling option.

    Args:
        logits: [V], any float dtype, as `Session.logits` gives them; -inf bans a token.
        n: tokens wanted, 0..V.

    Returns:
        ids int64 [n], the likeliest first and equal ones by the lower id, and their natural log
        probabilities, float64 [n], computed in float64.

    Raises:
        ConfigError: when `n` is out of its range or `logits` is no row.
        NumericError: for NaN or +inf, or when every logit is -inf.
    """
    if logits.ndim != 1 or logits.size == 0:
        raise ConfigError(f"logits must be [V], found {list(logits.shape)}")
    if not 0 <= n <= logits.size:
        raise ConfigError(f"n must be 0..{logits.size}, found {n}")
    bad = np.flatnonzero(~(logits < math.inf))
    if bad.size:
        raise NumericError(f"logit of token {bad[0]} is {logits[bad[0]]}")
    if not np.isfinite(logits).any():
        raise NumericError("every logit is -inf")
    least = np.partition(logits, logits.size - n)[logits.size - n] if n else math.inf
    candidates = np.flatnonzero(logits >= least)
    ids = candidates[np.argsort(-logits[candidates], kind="stable")][:n]
    return ids, _log_probabilities(logits)[ids]


def token_nlls(logits: Logits, targets: Sequence[int]) -> FloatArray:
    """Negative log-likelihood of targets [n] by logits [n, V] before each; nats, float64 [n]."""
    block = max(1, _BLOCK_ELEMENTS // logits.shape[1])
    found = np.empty(len(targets))
    for at in range(0, len(targets), block):
        part = np.asarray(targets[at : at + block], dtype=np.int64)
        rows = _log_probabilities(logits[at : at + len(part)])
        found[at : at + len(part)] = -rows[np.arange(len(part)), part]
    return found


def score_continuation(
    evaluate: Evaluate,
    token_ids: Sequence[int],
    *,
    before: Logits | None,
    chunk: int,
    on_progress: Progress | None = None,
) -> FloatArray:
    """Negative log-likelihood of each token, evaluating all of them.

    Args:
        evaluate: appends tokens and returns the logits after each, [n, V].
        token_ids: T tokens.
        before: [V] after the token before the first; None when there is none.
        chunk: tokens evaluated at once; no more rows of logits are held.
        on_progress: called with tokens done and in total after every chunk.

    Returns:
        Nats, float64 [T]; the first is NaN when nothing came before it.

    Raises:
        NumericError: when a logit is NaN or infinite.
    """
    nlls = np.full(len(token_ids), math.nan)
    if before is not None and len(token_ids):
        if not np.isfinite(before).all():
            raise NumericError("a logit of the last token is not finite")
        nlls[:1] = token_nlls(before[None], token_ids[:1])
    for start, logits in evaluate_chunks(evaluate, token_ids, chunk):
        targets = token_ids[start + 1 : start + 1 + len(logits)]
        nlls[start + 1 : start + 1 + len(targets)] = token_nlls(logits[: len(targets)], targets)
        if on_progress is not None:
            on_progress(start + len(logits), len(token_ids))
    return nlls


def text_windows(token_ids: Sequence[int], bos_id: int | None, window: int) -> list[list[int]]:
    """Cuts a text into windows that each open with the beginning-of-text token.

    Args:
        token_ids: the text, without that token.
        bos_id: the opening token; None opens each window with its own first token, unscored.
        window: tokens per window at most, the opening one included, >= 2.

    Raises:
        ConfigError: when there is no token to score.
    """
    opening = [] if bos_id is None else [bos_id]
    step = window - len(opening)
    cuts = [list(token_ids[i : i + step]) for i in range(0, len(token_ids), step)]
    windows = [[*opening, *cut] for cut in cuts if len(opening) + len(cut) >= 2]
    if not windows:
        raise ConfigError(f"the text has {len(token_ids)} tokens; give one with at least two")
    return windows


def score_text(
    engine: Engine,
    text: str,
    *,
    window: int,
    save: Path | None = None,
    base: Path | None = None,
    on_progress: Progress | None = None,
) -> Score:
    """Scores a text in windows that each start anew.

    Args:
        engine: the model.
        text: what is predicted; control-token text in it stays text.
        window: tokens per window, the opening one included, >= 2.
        save: file for the log-probabilities of every row (`formats/logit_file.py`).
        base: such a file to compare with.
        on_progress: called with tokens done and in total.

    Raises:
        ConfigError: nothing to score, or `base` has another text, window or vocabulary.
        FormatError: when `base` is damaged.
        NumericError: when a logit is NaN or infinite.
    """
    if window < 2:
        raise ConfigError(f"the window must be at least 2 tokens, found {window}")
    ids = engine.tokenizer.encode(text)
    windows = text_windows(ids, engine.tokenizer.bos_id, window)
    targets = np.array([t for cut in windows for t in cut[1:]], dtype="<i4")
    header = LogitHeader(engine.config.vocab_size, window, targets)
    score = Score()
    with ExitStack() as stack:
        reader = None if base is None else stack.enter_context(read_logits(base))
        if reader is not None:
            check_same_text(reader.header, header)
        writer = None if save is None else stack.enter_context(write_logits(save, header))
        for log_probs, expected in _scored_rows(engine, windows, window):
            score.add(log_probs, expected, None if reader is None else reader.take(len(expected)))
            if writer is not None:
                writer.append(log_probs)
            if on_progress is not None:
                on_progress(score.tokens, len(targets))
    return score


def _scored_rows(
    engine: Engine, windows: Sequence[Sequence[int]], window: int
) -> Iterator[tuple[Logits, Sequence[int]]]:
    """Log-probabilities [n, V] and the n tokens they predict, in blocks fit for float64."""
    block = max(1, _BLOCK_ELEMENTS // engine.config.vocab_size)
    chunk = engine.options.chunk
    for ids in windows:
        with engine.new_session(context=window) as session:
            evaluate = partial(session.evaluate, logits="all", chunk=chunk)
            for start, logits in evaluate_chunks(evaluate, ids, chunk):
                expected = ids[start + 1 : start + 1 + len(logits)]
                for at in range(0, len(expected), block):
                    part = expected[at : at + block]
                    yield log_softmax(logits[at : at + len(part)]), part


def check_same_text(saved: LogitHeader, now: LogitHeader) -> None:
    """Raises ConfigError when saved logits were made with another vocabulary, window or text."""
    for name in ("vocab_size", "window"):
        before, wanted = getattr(saved, name), getattr(now, name)
        if before != wanted:
            raise ConfigError(
                f"the saved logits have {name} {before}, this run {wanted}; make both runs alike"
            )
    if not np.array_equal(saved.token_ids, now.token_ids):
        same = min(len(saved.token_ids), len(now.token_ids))
        differs = np.flatnonzero(saved.token_ids[:same] != now.token_ids[:same])
        place = int(differs[0]) if len(differs) else same
        raise ConfigError(
            f"the saved logits belong to another text: token {place} differs"
            f" ({len(saved.token_ids)} tokens saved, {len(now.token_ids)} now)"
        )


def evaluate_chunks(
    evaluate: Evaluate, token_ids: Sequence[int], chunk: int
) -> Iterator[tuple[int, Logits]]:
    """Evaluates tokens and yields (index of the first, logits [n, V]) chunk by chunk.

    Raises:
        NumericError: when a logit is NaN or infinite.
    """
    for start in range(0, len(token_ids), chunk):
        part = token_ids[start : start + chunk]
        logits = evaluate(part)
        if logits is None or not np.isfinite(logits).all():
            raise NumericError(f"a logit of tokens {start}..{start + len(part) - 1} is not finite")
        yield start, logits


def save_all_logits(
    engine: Engine, token_ids: Sequence[int], out: Path, on_progress: Progress | None = None
) -> tuple[int, int]:
    """Writes the logits of every position, float32 [T, V], as a `.npy` file.

    The file takes its name only when it is complete. Returns its shape.

    Raises:
        ConfigError: when a token id is outside the vocabulary, there is none, or `out` is no file.
    """
    vocab_size = engine.config.vocab_size
    check_token_ids(token_ids, vocab_size)
    shape = (len(token_ids), vocab_size)
    with whole_file(out) as file, engine.new_session(context=len(token_ids)) as session:
        header = {"descr": "<f4", "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(file, header)
        chunk = engine.options.chunk
        evaluate = partial(session.evaluate, logits="all", chunk=chunk)
        for start, logits in evaluate_chunks(evaluate, token_ids, chunk):
            file.write(np.ascontiguousarray(logits, dtype="<f4").tobytes())
            if on_progress is not None:
                on_progress(start + len(logits), len(token_ids))
    return shape


def check_token_ids(token_ids: Sequence[int], vocab_size: int) -> None:
    """Raises ConfigError when there is no token or one is outside the vocabulary."""
    if len(token_ids) == 0:
        raise ConfigError("there are no tokens; give at least one")
    ids = np.asarray(token_ids)  # no copy of a large array, no overflow of a large id
    bad = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if len(bad):
        raise ConfigError(
            f"token {bad[0]} is {ids[bad[0]]}, expected 0..{vocab_size - 1}; another model's?"
        )

"""Which experts a model uses on a text: recorded while the model runs over it.

The routing is watched by a hook that leaves it as it is. Layers that route by a table need no
model: their frequencies follow from how often each token occurs, also in a larger text than the
model was run on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError
from edgedsv4.formats.expert_frequency import ExpertFrequency
from edgedsv4.formats.next_pairs import MOST_PER_EXPERT, PairCounter
from edgedsv4.formats.route_trace import RouteShape, RouteWriter, write_route_trace
from edgedsv4.runtime.scoring import text_windows

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.runtime.engine import Engine
    from edgedsv4.runtime.timeline import Progress

ExpertIds = npt.NDArray[np.int64]
Rates = npt.NDArray[np.float64]
RouteSink = Callable[[ExpertIds], None]
"""Takes the expert ids of one forward, [T, L, k]."""


class RouteRecorder:
    """A hook for `Engine.new_session(on_experts=...)` that hands on the ids of whole forwards.

    A forward that is cancelled half-way leaves nothing. With `note_guesses` as `on_guesses` it has
    what was guessed of them too.

    Args:
        layers: of the main model.
        sink: called after the last layer of every forward.
    """

    def __init__(self, layers: int, sink: RouteSink) -> None:
        self.guesses: ExpertIds | None = None
        """[T, L, n] of the forward that the sink is called with, the likeliest first, -1 for layers
        that are not guessed; None where nothing was."""
        self._layers = layers
        self._sink = sink
        self._seen: list[ExpertIds] = []
        self._guessed: dict[int, ExpertIds] = {}

    def __call__(self, layer: int, scores: Tensor, ids: Tensor) -> Tensor:  # noqa: ARG002  # a hook
        """Note the experts of a layer, and leave them as they are."""
        if layer == 0:
            self._seen.clear()
            self._guessed.clear()
        self._seen.append(ids.cpu().numpy().astype(np.int64))
        if len(self._seen) == self._layers:
            self.guesses = self._all_guesses()
            self._sink(np.stack(self._seen, axis=1))
            self._seen.clear()
            self._guessed.clear()
        return ids

    def note_guesses(self, layer: int, ids: Tensor) -> None:
        """Note what was guessed for a layer."""
        self._guessed[layer] = ids.cpu().numpy().astype(np.int64)

    def _all_guesses(self) -> ExpertIds | None:
        if not self._guessed:
            return None
        some = next(iter(self._guessed.values()))
        nothing = np.full_like(some, -1)
        layers = [self._guessed.get(layer, nothing) for layer in range(self._layers)]
        return np.stack(layers, axis=1)


def route_shape(engine: Engine) -> RouteShape:
    """Shape of the traces of a model."""
    config = engine.config
    return RouteShape(config.num_layers, config.num_experts, config.experts_per_token)


def hash_layer_rates(table: ExpertIds, token_counts: ExpertIds, experts: int) -> Rates:
    """Uses per token of a layer that routes by a table: sum of p(token) [e in table[token]].

    Args:
        table: expert ids by token id, [V, k].
        token_counts: how often each token occurs, [V].
        experts: E.

    Returns:
        [E] float64; they add up to k.
    """
    weights = np.repeat(token_counts.astype(np.float64), table.shape[1])
    uses = np.bincount(table.reshape(-1), weights=weights, minlength=experts)
    rates: Rates = uses / token_counts.sum()
    return rates


def whole_counts(rates: Rates, total: int) -> npt.NDArray[np.uint64]:
    """Whole numbers in the proportions of `rates` that add up to `total` (largest remainders)."""
    exact = rates * (total / rates.sum())
    counts: npt.NDArray[np.uint64] = np.floor(exact).astype(np.uint64)
    missing = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:missing]] += np.uint64(1)
    return counts


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """What is profiled and what is kept of it."""

    corpus: str
    """Name of the text, kept in the frequency file."""
    window: int = 512
    """Tokens per window, the opening one included; every window starts anew."""
    trace: Path | None = None
    """File for the routes of every token."""
    token_text: str | None = None
    """A larger text whose tokens alone are counted, for layers that route by a table."""
    pairs: int = 0
    """Experts of the next layer that are kept for each expert, those that follow it most often,
    0..16; 0 counts none."""

    def __post_init__(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        if self.window < 2:
            raise ConfigError(f"the window must be at least 2 tokens, found {self.window}")
        if not 0 <= self.pairs <= MOST_PER_EXPERT:
            raise ConfigError(f"pairs must be 0..{MOST_PER_EXPERT}, found {self.pairs}")


class _Tally:
    """What a profile counts and writes of each forward."""

    def __init__(
        self, shape: RouteShape, follow: PairCounter | None, on_done: Callable[[int], object]
    ) -> None:
        self.counts = np.zeros((shape.layers, shape.experts), dtype=np.uint64)
        self.recorder = RouteRecorder(shape.layers, self._take)
        self.writer: RouteWriter | None = None
        self.begins = True
        """The next tokens begin a text."""
        self._follow = follow
        self._on_done = on_done
        self._done = 0

    def _take(self, ids: ExpertIds) -> None:
        layers, experts = self.counts.shape
        for layer in range(layers):
            used = np.bincount(ids[:, layer].reshape(-1), minlength=experts)
            self.counts[layer] += used.astype(np.uint64)
        if self._follow is not None:
            self._follow.add(ids)
        if self.writer is not None:
            guesses = self.recorder.guesses
            self.writer.append(ids, "decode", guesses=guesses, begins_text=self.begins)
        self.begins = False
        self._done += len(ids)
        self._on_done(self._done)


def profile_experts(
    engine: Engine, text: str, options: ProfileOptions, on_progress: Progress | None = None
) -> ExpertFrequency:
    """Run a text through a model and count the experts it uses.

    In the trace every window begins a text, and its tokens are marked as decoded: they stand for
    what a model says.

    Args:
        engine: the model.
        text: what is evaluated; control-token text in it stays text.
        options: what is kept.
        on_progress: told (done, total) in tokens.

    Raises:
        ConfigError: nothing to evaluate, or a file that cannot be written there.
    """
    tokenizer, shape = engine.tokenizer, route_shape(engine)
    windows = text_windows(tokenizer.encode(text), tokenizer.bos_id, options.window)
    total = sum(len(window) for window in windows)
    identity = str(engine.describe()["identity_sha256"])
    follow = PairCounter(shape.layers, shape.experts) if options.pairs else None
    tally = _Tally(shape, follow, lambda done: on_progress and on_progress(done, total))
    recorder = tally.recorder
    with ExitStack() as stack:
        if options.trace is not None:
            trace = write_route_trace(options.trace, shape, identity_sha256=identity)
            tally.writer = stack.enter_context(trace)
        on_guesses = None if tally.writer is None else recorder.note_guesses
        for window in windows:
            tally.begins = True
            with engine.new_session(
                context=len(window), on_experts=recorder, on_guesses=on_guesses
            ) as session:
                session.evaluate(window, logits="none")
    counts = tally.counts
    pairs = None
    if follow is not None:
        pairs = follow.pairs(min(options.pairs, shape.experts), counts.copy())
    if options.token_text is not None:
        _count_tokens(engine, options.token_text, counts, total)
    digest = hashlib.sha256(text.encode("utf-8")).hexdigest()
    return ExpertFrequency(
        identity, options.corpus, digest, total, shape.experts_per_token, counts, pairs
    )


def _count_tokens(engine: Engine, text: str, counts: npt.NDArray[np.uint64], tokens: int) -> None:
    """Replace the counts of layers that route by a table by what another text lets expect."""
    tables = engine.hash_tables()
    if not tables:
        raise ConfigError("this model routes no layer by a table; leave the text of tokens out")
    ids = np.array(engine.tokenizer.encode(text), dtype=np.int64)
    if not len(ids):
        raise ConfigError("the text of tokens is empty; give one with at least one token")
    token_counts = np.bincount(ids, minlength=engine.config.vocab_size)
    for layer, table in tables.items():
        rates = hash_layer_rates(table, token_counts, counts.shape[1])
        counts[layer] = whole_counts(rates, tokens * table.shape[1])

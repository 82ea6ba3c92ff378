"""What a cache policy would have done: replays a recorded route trace against simulated tiers.

The books are those of the engine (`ExpertCache`), only no bytes move. With one tier an expert that
is missing is read and kept if the policy takes it. With two, an expert that is read enters the
lower tier, and one that is found there moves up if the upper tier's policy takes it; the tiers
never hold the same expert, and whoever has to leave the upper one is read again when it is needed.
Figures count tokens of decode; prefill goes through the same tiers, in chunks whose selections
weigh 1/T, and what it reads is counted apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from edgedsv4.errors import ConfigError
from edgedsv4.formats.route_trace import MOST_GUESSES
from edgedsv4.runtime.cache_policies import make_policy
from edgedsv4.runtime.expert_cache import ExpertCache, key_of
from edgedsv4.runtime.guess_replay import GuessCounts, guesser_of

if TYPE_CHECKING:
    from edgedsv4.config import ReplayPolicy
    from edgedsv4.formats.next_pairs import NextPairs
    from edgedsv4.formats.route_trace import RouteShape, RouteTrace
    from edgedsv4.runtime.aged_frequency import Doubles
    from edgedsv4.runtime.guess_replay import Guesser


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayOptions:
    """What is simulated."""

    slots: tuple[int, ...]
    """Experts that each tier holds, fastest first; one tier or two."""
    policy: ReplayPolicy = "aged"
    may_refuse: bool = True
    """An expert may be used without being kept; policies that always keep ignore it."""
    prefill_chunk: int = 512
    """Tokens evaluated at once in prefill."""
    prior: Doubles | None = None
    """[L, E], uses per token, for `aged`."""
    pairs: NextPairs | None = None
    """Judge these instead of the guesses of the trace."""
    pair_guesses: int = 8
    """Experts that pairs guess for each layer and token, 1..64."""

    def __post_init__(self) -> None:
        """Raises ConfigError when a field is out of its range."""
        if not 1 <= len(self.slots) <= 2 or min(self.slots) < 1:
            raise ConfigError(f"slots must be one or two numbers >= 1, found {self.slots}")
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk must be >= 1, found {self.prefill_chunk}")
        if not 1 <= self.pair_guesses <= MOST_GUESSES:
            raise ConfigError(f"pair_guesses must be 1..{MOST_GUESSES}, found {self.pair_guesses}")


@dataclass(slots=True)
class ReplayCounts:
    """What happened over the decoded tokens of a replay."""

    tokens: int = 0
    selections: int = 0
    hits: list[int] = field(default_factory=list)
    """By tier, fastest first."""
    moved_up: int = 0
    """Experts copied from the lower tier into the upper one."""
    evictions: int = 0
    prefill_tokens: int = 0
    prefill_reads: int = 0
    """Experts read during prefill; not part of the other figures."""
    guesses: GuessCounts | None = None
    """Of the layers before; None where nothing was guessed."""

    @property
    def reads(self) -> int:
        """Experts that no tier had."""
        return self.selections - sum(self.hits)

    def hit_rate(self, tier: int | None = None) -> float:
        """Share of the selections found in one tier, or in any."""
        found = sum(self.hits) if tier is None else self.hits[tier]
        return found / self.selections if self.selections else 0.0

    def to_json(self, expert_bytes: int | None = None) -> dict[str, object]:
        """The figures as JSON types; with the bytes of an expert also those read per token."""
        per_token = 1.0 / max(self.tokens, 1)
        figures: dict[str, object] = {
            "tokens": self.tokens,
            "hit_rate": round(self.hit_rate(), 6),
            "hit_rate_by_tier": [round(self.hit_rate(t), 6) for t in range(len(self.hits))],
            "reads_per_token": round(self.reads * per_token, 4),
            "moved_up_per_token": round(self.moved_up * per_token, 4),
            "evictions_per_token": round(self.evictions * per_token, 4),
            "prefill_tokens": self.prefill_tokens,
            "prefill_reads": self.prefill_reads,
        }
        if expert_bytes is not None:
            figures["bytes_per_token"] = round(self.reads * per_token * expert_bytes)
        if self.guesses is not None:
            figures["guesses"] = self.guesses.to_json()
        return figures


@dataclass(frozen=True, slots=True)
class _Step:
    """Tokens that are evaluated together."""

    tokens: int
    is_decode: bool
    first: int
    """Token."""
    layers: list[list[int]]
    """Expert ids by layer, as often as they were selected."""

    @property
    def weight(self) -> float:
        """Of each selection."""
        return 1.0 if self.is_decode else 1.0 / self.tokens


def _steps(trace: RouteTrace, prefill_chunk: int) -> Iterator[_Step]:
    for run, end in trace.spans():
        is_decode = run.kind == "decode"
        size = 1 if is_decode else prefill_chunk
        for first in range(run.first, end, size):
            part = trace.ids[first : min(first + size, end)]
            layers = part.transpose(1, 0, 2).reshape(trace.shape.layers, -1).tolist()
            yield _Step(len(part), is_decode, first, layers)


class _Tiers:
    """Simulated tiers and what happened to them."""

    def __init__(
        self, caches: Sequence[ExpertCache], options: ReplayOptions, guesser: Guesser | None
    ) -> None:
        self.counts = ReplayCounts(hits=[0] * len(caches))
        self._caches = caches
        self._options = options
        self._guesser = guesser
        self._guesses = GuessCounts()
        if guesser is not None:
            self.counts.guesses = self._guesses

    def run(self, step: _Step) -> None:
        """Evaluate a step."""
        counts = self.counts
        before = (*counts.hits, counts.moved_up, self._evictions())
        reads = sum(self._layer(layer, ids, step) for layer, ids in enumerate(step.layers))
        for cache in self._caches:
            cache.end_step(step.tokens)
        if step.is_decode:
            counts.tokens += step.tokens
            counts.selections += reads + sum(counts.hits) - sum(before[:-2])
            counts.evictions += self._evictions() - before[-1]
            self._guesses.tokens += step.tokens
            return
        *counts.hits, counts.moved_up, _ = before
        counts.prefill_tokens += step.tokens
        counts.prefill_reads += reads

    def _layer(self, layer: int, ids: list[int], step: _Step) -> int:
        """Have every expert of a layer; returns how many no tier had."""
        if self._guesser is not None and step.is_decode:
            self._judge(layer, ids, self._guesser(step.first, layer))
        for cache in self._caches:
            cache.use(layer, ids, step.weight)
        wanted = dict.fromkeys(ids)
        return sum(self._is_read(layer, expert, wanted) for expert in wanted)

    def _judge(self, layer: int, ids: list[int], guess: Sequence[int] | None) -> None:
        if guess is None:
            return
        wanted = set(ids)
        absent = {
            expert
            for expert in wanted.union(guess)
            if all(cache.find(layer, expert) is None for cache in self._caches)
        }
        self._guesses.judge(layer, wanted, guess, absent)

    def _is_read(self, layer: int, expert: int, wanted: dict[int, None]) -> bool:
        for tier, cache in enumerate(self._caches):
            if cache.find(layer, expert) is not None:
                self.counts.hits[tier] += 1
                if tier:
                    self._move_up(layer, expert, wanted)
                return False
        self._keep(self._caches[-1], layer, expert, wanted)
        return True

    def _move_up(self, layer: int, expert: int, wanted: dict[int, None]) -> None:
        upper, lower = self._caches
        if self._keep(upper, layer, expert, wanted):
            lower.drop(layer, expert)
            self.counts.moved_up += 1

    def _keep(self, cache: ExpertCache, layer: int, expert: int, wanted: dict[int, None]) -> bool:
        slot = cache.take(
            layer,
            expert,
            protected=lambda where, which: where == layer and which in wanted,
            may_refuse=self._options.may_refuse,
        )
        if slot is None:
            return False
        cache.publish(layer, expert)
        return True

    def _evictions(self) -> int:
        return sum(cache.evictions for cache in self._caches)


def replay_routes(trace: RouteTrace, options: ReplayOptions) -> ReplayCounts:
    """Replay a trace.

    Raises:
        ConfigError: `prior` does not fit the trace.
    """
    shape, chunk = trace.shape, options.prefill_chunk
    if options.prior is not None and options.prior.shape != (shape.layers, shape.experts):
        raise ConfigError(
            f"the frequencies are {list(options.prior.shape)}, the trace has"
            f" [{shape.layers}, {shape.experts}] experts; both must come from one model"
        )

    def future() -> Iterator[list[int]]:
        for step in _steps(trace, chunk):
            for layer, ids in enumerate(step.layers):
                yield [key_of(layer, expert) for expert in ids]

    caches = []
    for slots in options.slots:
        known = future() if options.policy == "belady" else ()
        policy = make_policy(
            options.policy, shape.layers, shape.experts, prior=options.prior, future=known
        )
        caches.append(ExpertCache(slots, policy))
    tiers = _Tiers(caches, options, guesser_of(trace, options.pairs, options.pair_guesses))
    for step in _steps(trace, chunk):
        tiers.run(step)
    return tiers.counts


def slots_of_share(shape: RouteShape, share: float) -> int:
    """Slots that hold this share of all experts, at least those of one token in one layer.

    Raises:
        ConfigError: a share outside 0..1.
    """
    if not 0.0 < share <= 1.0:
        raise ConfigError(
            f"a resident share must be more than 0 % and at most 100 %, found {share:.4g}"
        )
    return max(round(share * shape.layers * shape.experts), shape.experts_per_token)

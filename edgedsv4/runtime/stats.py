"""What a call reports about its work: token counts and seconds, as data and never as log lines."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, slots=True)
class SyncReport:
    """Where the tokens of a timeline came from; the three add up to its length after the call."""

    reused: int
    """Tokens kept as they were."""
    evaluated: int
    """New tokens."""
    rebuilt: int
    """Kept tokens that had to be evaluated again, because going back ended at a checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftStats:
    """What became of drafted tokens, by place in their step."""

    drafted: tuple[int, ...]
    """Drafts that were decided on: taken, or thrown away for a token that was none."""
    accepted: tuple[int, ...]
    """Drafts that became tokens."""
    drafted_steps: int = 0
    """Passes over the main model with drafts."""
    plain_steps: int = 0
    """Passes without."""
    state: str = "on"
    """`on`, or why nothing is drafted at the moment."""

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the drafts at each place that became tokens; 0 where none were made."""
        pairs = zip(self.accepted, self.drafted, strict=True)
        return tuple(accepted / drafted if drafted else 0.0 for accepted, drafted in pairs)

    @property
    def tokens_per_step(self) -> float:
        """Tokens that one pass with drafts gave; 0 without any."""
        steps = self.drafted_steps
        return 1 + sum(self.accepted) / steps if steps else 0.0

    def since(self, earlier: DraftStats) -> DraftStats:
        """What was added to `earlier`; the state is the present one."""
        return replace(
            self,
            drafted=_difference(self.drafted, earlier.drafted),
            accepted=_difference(self.accepted, earlier.accepted),
            drafted_steps=self.drafted_steps - earlier.drafted_steps,
            plain_steps=self.plain_steps - earlier.plain_steps,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertStats:
    """Where the routed experts of forwards came from: a store, or a card and main memory.

    Counts are of all sessions of the engine; an expert counts once per layer and evaluation.
    """

    card_hits: int = 0
    """Found on a card, by tokens that are evaluated alone."""
    ram_hits: int = 0
    """Found in main memory; where the file is mapped, all that the CPU computed for tokens that are
    evaluated alone."""
    prefetch_hits: int = 0
    """Read before they were asked for, or already on their way."""
    disk_reads: int = 0
    """Waited for."""
    read_bytes: int = 0
    """Bytes that came from the drive, prefetch and alignment included."""
    prefetched: int = 0
    """Experts read ahead."""
    prefetch_wasted: int = 0
    """Those of them that went without having been used, also those of which a part was read."""
    prefetch_late: int = 0
    """Of `prefetch_hits`, those that were still on their way when they were asked for."""
    guess_misses: int = 0
    """Experts that were asked for and not in memory, at layers whose experts were guessed."""
    guess_hits: int = 0
    """Those of them that a guess named, read in time or not."""
    stall_seconds: float = 0.0
    """Time in which nothing could be computed for want of an expert."""

    @property
    def asked(self) -> int:
        """Experts asked for."""
        return self.card_hits + self.ram_hits + self.prefetch_hits + self.disk_reads

    @property
    def hit_rate(self) -> float:
        """Share of them that was found in memory, a card's or main; 0 when none were asked for."""
        return (self.card_hits + self.ram_hits) / self.asked if self.asked else 0.0

    @property
    def guess_recall(self) -> float:
        """Share of the misses that guesses named, at layers with guesses; 0 without any."""
        return self.guess_hits / self.guess_misses if self.guess_misses else 0.0

    def since(self, earlier: ExpertStats) -> ExpertStats:
        """What was added to `earlier`."""
        return ExpertStats(
            **{
                field.name: getattr(self, field.name) - getattr(earlier, field.name)
                for field in fields(self)
            }
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStats:
    """Counts and times of one reply."""

    prompt_tokens: int
    """Tokens of the rendered prompt."""
    generated_tokens: int
    """Tokens sampled, the one that ended the reply included."""
    prefill_seconds: float
    decode_seconds: float
    reused_tokens: int = 0
    """Prompt tokens that did not have to be evaluated."""
    drafts: DraftStats | None = None
    """What became of the reply's drafts; None when `EngineOptions.draft` is 0."""
    experts: ExpertStats | None = None
    """Where routed experts came from meanwhile; None where they are used in the mapped file."""

    @property
    def prefill_tokens_per_second(self) -> float:
        """Evaluated prompt tokens per second; 0 when nothing was evaluated."""
        return _rate(self.prompt_tokens - self.reused_tokens, self.prefill_seconds)

    @property
    def decode_tokens_per_second(self) -> float:
        """Generated tokens per second; 0 when nothing was generated."""
        return _rate(self.generated_tokens, self.decode_seconds)


@dataclass(slots=True)
class SessionTotals:
    """Counts of a session since it was opened."""

    evaluated: int = 0
    """Tokens evaluated for the first time at their place."""
    rebuilt: int = 0
    """Tokens evaluated again: after going back to a checkpoint, or for logits after a rewind."""
    generated: int = 0
    """Tokens sampled by `generate` and `reply`."""
    drafts: DraftStats | None = None
    """What became of all drafts; None when `EngineOptions.draft` is 0."""
    experts: ExpertStats | None = None
    """Of the engine's store, all sessions together, since it was opened; None without a store."""


def _difference(later: tuple[int, ...], earlier: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a - b for a, b in zip(later, earlier, strict=True))


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0

"""What a call reports about its work: token counts and seconds, as data and never as log lines."""

from __future__ import annotations

from dataclasses import dataclass


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


def _rate(count: int, seconds: float) -> float:
    return count / seconds if count > 0 and seconds > 0 else 0.0

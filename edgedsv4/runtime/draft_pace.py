"""Whether drafting pays, found out by measuring it while a reply is written.

Seconds per token with drafts and without are compared as moving averages; no table of machines or
models stands behind the decision. Decoding goes through phases of so many steps: a few without
drafts, then trials with them. A trial that ends slower than plain decoding pauses drafting, each
time in a row for twice as long; while drafting pays, plain decoding is measured again now and then,
because both get slower as the context grows. The text does not depend on any of this.
"""

from __future__ import annotations

PLAIN_STEPS = 4
"""Steps without drafts that measure plain decoding."""
TRIAL_STEPS = 16
"""Steps with drafts after which the two are compared."""
TRIALS_PER_PLAIN = 8
"""Trials in a row after which plain decoding is measured again."""
FIRST_PAUSE, LONGEST_PAUSE = 256, 4096
"""Steps without drafts after a trial that was slower."""
_KEPT = 0.95
"""Share of a moving average that one step leaves."""


class DraftPace:
    """The decision for one timeline: `is_drafting` says what the next step should do."""

    def __init__(self) -> None:
        self.is_drafting = False
        self.is_paused = False
        self._plain = _Average()
        self._drafted = _Average()
        self._left = PLAIN_STEPS
        self._is_first = True
        self._pause = FIRST_PAUSE
        self._trials = 0

    def record(self, seconds: float, tokens: int, *, is_drafted: bool) -> None:
        """Take in one step: how long it took and how many tokens it gave.

        A step that did not do what `is_drafting` said (no room for drafts) is left out, and so is
        the first of a phase, which brings the draft block up to date.
        """
        if is_drafted != self.is_drafting:
            return
        if not self._is_first:
            (self._drafted if is_drafted else self._plain).add(seconds, tokens)
        self._is_first = False
        self._left -= 1
        if self._left <= 0:
            self._next_phase()

    def seconds_per_token(self) -> tuple[float, float]:
        """Moving averages without and with drafts; 0 where nothing was measured."""
        return self._plain.value, self._drafted.value

    def _next_phase(self) -> None:
        if not self.is_drafting:
            self._begin(TRIAL_STEPS, is_drafting=True)
        elif self._drafted.value > self._plain.value:
            self._begin(self._pause, is_drafting=False)
            self.is_paused = True
            self._pause = min(2 * self._pause, LONGEST_PAUSE)
            self._trials = 0
        else:
            self._pause = FIRST_PAUSE
            self._trials += 1
            is_drafting = self._trials % TRIALS_PER_PLAIN != 0
            self._begin(TRIAL_STEPS if is_drafting else PLAIN_STEPS, is_drafting=is_drafting)

    def _begin(self, steps: int, *, is_drafting: bool) -> None:
        if is_drafting and self.is_paused:
            self._drafted = _Average()
        if not is_drafting:
            # The first steps of a reply run with cold caches; kept, they would flatter the drafts.
            self._plain = _Average()
        self.is_drafting, self.is_paused = is_drafting, False
        self._left, self._is_first = steps, True


class _Average:
    """Seconds per token, recent steps first."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._tokens = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self._seconds = _KEPT * self._seconds + seconds
        self._tokens = _KEPT * self._tokens + tokens

    @property
    def value(self) -> float:
        return self._seconds / self._tokens if self._tokens else 0.0

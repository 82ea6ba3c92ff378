"""From the model's thread to the screen: everything that was said, in order, once per frame.

The idea: the thread only appends under a lock; the screen empties the feed when it has time to
draw. A fast model thus costs the screen one update per frame, and nothing is dropped.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dsv4_chat.chat_model import Progress, ReplyPart


@dataclass(slots=True)
class Pace:
    """When what began, in seconds of the feed's clock."""

    asked: float
    first_token: float | None = None
    tokens_before: int = 0
    """Tokens of the first part: they cost no decode time yet."""
    latest: float = 0.0
    tokens: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed so far; 0 before there is one."""
        if self.first_token is None or self.latest <= self.first_token:
            return 0.0
        return (self.tokens - self.tokens_before) / (self.latest - self.first_token)

    def remaining_seconds(self, progress: Progress, now: float) -> float | None:
        """Until the prefill is done, at the speed so far; None when that is not known."""
        elapsed = now - self.asked
        if not 0 < progress.done < progress.total or elapsed <= 0:
            return None
        return elapsed / progress.done * (progress.total - progress.done)


class ReplyFeed:
    """What one reply has said and not shown yet.

    Args:
        clock: seconds, any origin.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._parts: list[ReplyPart] = []
        self.pace = Pace(asked=clock())
        self.progress: Progress | None = None
        """Of the prefill; None once a token was generated."""

    def add(self, part: ReplyPart) -> None:
        """Take a part; any thread."""
        now = self._clock()
        with self._lock:
            pace = self.pace
            if pace.first_token is None:
                pace.first_token, pace.tokens_before = now, part.tokens
            pace.latest, pace.tokens = now, part.tokens
            self.progress = None
            self._parts.append(part)

    def advance(self, progress: Progress) -> None:
        """Take the progress of the prefill; any thread."""
        self.progress = progress

    def drain(self) -> list[ReplyPart]:
        """What came since the last call; neighbours of one kind are joined."""
        with self._lock:
            parts, self._parts = self._parts, []
        return joined(parts)


def joined(parts: list[ReplyPart]) -> list[ReplyPart]:
    """The same text in fewer parts; tool calls stay apart."""
    runs: list[list[ReplyPart]] = []
    for part in parts:
        if runs and part.kind != "tool_call" and runs[-1][0].kind == part.kind:
            runs[-1].append(part)
        else:
            runs.append([part])
    return [replace(run[-1], text="".join(part.text for part in run)) for run in runs]

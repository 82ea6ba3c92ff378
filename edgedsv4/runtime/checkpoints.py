"""The turn boundaries a timeline can return to without evaluating anything.

A checkpoint holds the window rings and unfinished windows of its place plus the logits there;
compressed rows stay in the cache, so a checkpoint ends with the first rewind below it. All
checkpoints of one model are about equally large, so every policy keeps about the same number of
them; what differs is the cost of a lost one, which is the distance to the checkpoint before. The
oldest are given up first: they have the fewest tokens before them, and people go back to recent
turns.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from edgedsv4.model.kv_cache import CacheCheckpoint


@dataclass(frozen=True, slots=True)
class TurnCheckpoint:
    """The state behind the last token of a turn."""

    state: CacheCheckpoint
    logits: npt.NDArray[np.float32] | None
    """[V] after the last token, None when they were not computed."""
    streams: Tensor | None = None
    """[1, hc * D] of the last token, for drafts; None when nothing is drafted."""

    @property
    def position(self) -> int:
        """Length of the timeline at this place."""
        return self.state.position

    @property
    def nbytes(self) -> int:
        """Memory it takes."""
        logits = 0 if self.logits is None else self.logits.nbytes
        streams = 0 if self.streams is None else self.streams.nbytes
        return self.state.nbytes + logits + streams


class TurnCheckpoints:
    """Checkpoints of one timeline in ascending order, within a byte budget."""

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self._kept: list[TurnCheckpoint] = []

    @property
    def positions(self) -> tuple[int, ...]:
        """Places that can be returned to, ascending."""
        return tuple(kept.position for kept in self._kept)

    def newest(self, count: int) -> tuple[TurnCheckpoint, ...]:
        """The last `count` checkpoints, ascending."""
        return tuple(self._kept[max(0, len(self._kept) - count) :])

    def nbytes(self) -> int:
        """Bytes of all checkpoints."""
        return sum(kept.nbytes for kept in self._kept)

    def add(self, checkpoint: TurnCheckpoint) -> None:
        """Keep a checkpoint past all others (or in place of the last one, at the same position).

        The oldest are given up until the budget holds; one that is larger than the whole budget is
        not kept at all.
        """
        self.drop_from(checkpoint.position)
        self._kept.append(checkpoint)
        while self._kept and self.nbytes() > self._budget_bytes:
            del self._kept[0]

    def drop_from(self, position: int) -> None:
        """Forget the checkpoints at `position` and beyond."""
        self._kept = [kept for kept in self._kept if kept.position < position]

    def at_or_before(self, position: int) -> TurnCheckpoint | None:
        """The last checkpoint that does not lie beyond `position`."""
        return next((kept for kept in reversed(self._kept) if kept.position <= position), None)

    def at_or_after(self, position: int) -> TurnCheckpoint | None:
        """The first checkpoint that does not lie before `position`."""
        return next((kept for kept in self._kept if kept.position >= position), None)

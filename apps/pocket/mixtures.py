"""What each training phase reads: the share of every task, row length, and range of long recall.

Shares are percent of tokens. A base, B sparse, C long, D finish. The long parts of D use the
mixture `D-long`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

TASKS = (
    "stories", "wordnet", "definitions", "prose", "recall-S", "recall-L", "last-write", "lists",
    "arith", "spell", "puzzles", "factbook", "small-talk", "identity", "tools", "json",
)  # fmt: skip

_SHARES: Mapping[str, tuple[float, ...]] = {
    # sto  wn  def pro  rS  rL  lw  li  ar  sp  pu  fb   st   id  to  js
    "A": (18, 13, 1, 16, 9, 10, 2, 5, 14, 1, 2, 2.5, 0.5, 1, 3, 2),
    "B": (16, 12, 1, 13, 6, 20, 2, 4, 14, 1, 1.5, 2.5, 0.5, 1, 3.5, 2),
    "C": (6, 5, 0, 18, 2, 56, 0, 2, 7, 0, 0, 1, 0, 0.5, 1.5, 1),
    "D": (20, 16, 1, 0, 6, 17, 2, 5, 18, 1, 1, 3, 1, 2, 5, 2),
    "D-long": (8, 6, 0, 0, 2, 75, 0, 2, 3, 0, 0, 1, 0, 0.5, 1.5, 1),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase's data."""

    name: str
    row_tokens: int
    """Rows are filled so that no document crosses a multiple of this many tokens."""
    recall_tokens: tuple[int, int]
    """Length of the longest recall documents at the start and at the end of the phase."""
    shortest_recall: int = 150
    long_parts_every: int = 0
    """Every so many parts one is made of long rows (mixture `<name>-long`); 0 for never."""
    long_row_tokens: int = 0

    @property
    def shares(self) -> dict[str, float]:
        """Task -> percent of tokens."""
        return dict(zip(TASKS, _SHARES[self.name], strict=True))

    def is_long_part(self, index: int) -> bool:
        """Whether a part of the store is made of long rows."""
        every = self.long_parts_every
        return every > 0 and index % every == every - 1


PHASES = {
    "A": Phase("A", 1024, (300, 1000)),
    "B": Phase("B", 4096, (1000, 4000), shortest_recall=200),
    "C": Phase("C", 16384, (8000, 16200), shortest_recall=1000),
    "D": Phase("D", 2048, (2000, 2000), long_parts_every=5, long_row_tokens=16384),
    "D-long": Phase("D-long", 16384, (16200, 16200), shortest_recall=2000),
}

"""What one thread asks an expert store for, uses, and guesses that it will ask for next."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.errors import Dsv4Error
    from edgedsv4.runtime.slot_books import Key

SMALL_TOKENS = 16
"""Evaluations of more tokens are prefill, whose selections count for less."""


@dataclass(slots=True, eq=False)
class Guess:
    """What a layer is expected to ask for."""

    layer: int
    experts: frozenset[int]
    waiting: deque[int]
    """Those of them that were not considered for reading yet, the likeliest first."""
    begun: set[Key] = field(default_factory=set)
    """Those that were absent, and whose reads began for this guess."""

    @classmethod
    def of(cls, layer: int, experts: Sequence[int]) -> Guess:
        """A guess of which nothing was read."""
        return cls(layer, frozenset(experts), deque(experts))


@dataclass(slots=True, eq=False)
class Ask:
    """What one thread asked for and uses."""

    layer: int = -1
    wanted: set[int] = field(default_factory=set)
    """Not handed out yet."""
    total: int = 0
    tokens: int = 0
    is_counted: bool = False
    unclaimed: deque[int] = field(default_factory=deque)
    """Wanted, and neither found nor being read for this thread."""
    arrived: list[Key] = field(default_factory=list)
    """Claimed and published since the last step."""
    ahead: deque[int] | None = None
    """Experts of the next layer to consider for reading ahead; None before that was decided."""
    guess: Guess | None = None
    """Of a layer that was not asked for yet."""
    claims: set[Key] = field(default_factory=set)
    held: dict[Key, int] = field(default_factory=dict)
    """Handed out: physical slots."""
    orphans: list[int] = field(default_factory=list)
    """Handed out, and left out when the books were made anew."""
    error: Dsv4Error | None = None
    seen: int = 0
    stalled: float = 0.0

    @property
    def is_small(self) -> bool:
        """Whether it is of few tokens, as in decode."""
        return self.tokens <= SMALL_TOKENS

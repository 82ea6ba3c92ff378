"""Pack documents into rows of fixed length, so that no document is cut.

A row is filled from a pool of waiting documents: the oldest first, then whatever fits best. What is
left over is filled with prose, which may be cut anywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

Produce = Callable[[], np.ndarray]
Fill = Callable[[int], np.ndarray]

_POOL = 48
_POOL_OF_LONG_ROWS = 16
_LONG_ROW = 8192


class RowPacker:
    """Fills rows.

    Args:
        row_tokens: length of a row.
        produce: makes the next document; one longer than a row is dropped.
        fill: makes exactly so many tokens, at least one.
        rng: chooses among waiting documents.
    """

    def __init__(self, row_tokens: int, produce: Produce, fill: Fill, rng: Random) -> None:
        self._row_tokens = row_tokens
        self._produce = produce
        self._fill = fill
        self._rng = rng
        # What still waits at the end is lost, so few long documents should wait.
        self._pool = _POOL if row_tokens < _LONG_ROW else _POOL_OF_LONG_ROWS
        self._waiting: list[np.ndarray] = []

    def row(self) -> np.ndarray:
        """The next row, uint16 [row_tokens]."""
        parts: list[np.ndarray] = []
        left = self._row_tokens
        while left > 0:
            document = self._take(left, is_first=not parts)
            if document is None:
                document = self._fill(left)
            parts.append(document)
            left -= len(document)
        # The filler comes last; shuffled, it stands anywhere.
        self._rng.shuffle(parts)
        return np.concatenate(parts)

    def _take(self, left: int, *, is_first: bool) -> np.ndarray | None:
        """A waiting document of at most `left` tokens, or None if none fits."""
        while len(self._waiting) < self._pool:
            document = self._produce()
            if len(document) <= self._row_tokens:
                self._waiting.append(document)
        if is_first:
            return self._waiting.pop(0)
        i = int(self._rng.random() * len(self._waiting))
        if len(self._waiting[i]) <= left:
            return self._waiting.pop(i)
        fitting = [(len(d), j) for j, d in enumerate(self._waiting) if len(d) <= left]
        return self._waiting.pop(max(fitting)[1]) if fitting else None

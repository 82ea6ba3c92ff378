"""Search for markers in text that arrives in pieces, in linear time and with nothing shown twice.

Text that cannot become part of a marker any more is given out at once; what still could is held
back, never more than the longest marker.
"""

from __future__ import annotations

import re
from collections.abc import Sequence


class MarkerSet:
    """Markers to look for together; at one position at most one of them may match."""

    def __init__(self, markers: Sequence[str]) -> None:
        """Prepare the search.

        Args:
            markers: distinct, not empty, none the start of another.
        """
        self._markers = tuple(markers)
        self._pattern = re.compile("|".join(map(re.escape, markers)))
        self._first_chars = re.compile(f"[{''.join(sorted({re.escape(m[0]) for m in markers}))}]")
        self._longest = max(map(len, markers))

    def search(self, text: str, start: int) -> re.Match[str] | None:
        """The first complete marker at or behind `start`."""
        return self._pattern.search(text, start)

    def safe_end(self, text: str, start: int) -> int:
        """Where the tail begins that may still become a marker; `len(text)` when there is none."""
        low = max(start, len(text) - self._longest + 1)
        for match in self._first_chars.finditer(text, low):
            tail = text[match.start() :]
            if any(marker.startswith(tail) for marker in self._markers):
                return match.start()
        return len(text)


class Scanner:
    """Text that arrives in pieces and is taken out marker by marker."""

    def __init__(self) -> None:
        """Start with no text."""
        self._text = ""
        self._start = 0

    def feed(self, text: str) -> None:
        """Append a piece of text."""
        self._text = self._text[self._start :] + text
        self._start = 0

    def take(self, markers: MarkerSet) -> tuple[str, str | None]:
        """Take the text up to the next marker, and the marker.

        Returns:
            (text, marker), or (text that certainly holds no marker, None) when more must come.
        """
        match = markers.search(self._text, self._start)
        end = markers.safe_end(self._text, self._start) if match is None else match.start()
        text = self._text[self._start : end]
        self._start = end if match is None else match.end()
        return text, None if match is None else match[0]

    def put_back(self, count: int) -> None:
        """Undo the last `count` characters of a marker just taken."""
        self._start -= count

    def rest(self) -> str:
        """Take everything, also what was held back."""
        text = self._text[self._start :]
        self._text, self._start = "", 0
        return text

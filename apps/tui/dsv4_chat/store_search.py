"""Searching turns: which SQL finds some words, and the piece of a text that shows them."""

from __future__ import annotations

from collections.abc import Sequence

_INDEXED_LENGTH = 3
"""Characters a word needs to be in the index of trigrams."""
_BEFORE, _AFTER = 24, 72
"""Characters shown around a hit."""


def like_pattern(word: str) -> str:
    """The pattern of LIKE (with escape character backslash) that finds a word anywhere."""
    escaped = word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_")
    return f"%{escaped}%"


def match_clause(words: Sequence[str], *, has_index: bool) -> tuple[str, list[str]]:
    """Condition on a turn `n` that holds all words, and its arguments."""
    indexed = [word for word in words if has_index and len(word) >= _INDEXED_LENGTH]
    others = [word for word in words if word not in indexed]
    conditions = ["n.content LIKE ? ESCAPE '\\'"] * len(others)
    arguments = [like_pattern(word) for word in others]
    if indexed:
        conditions.insert(0, "n.key IN (SELECT rowid FROM node_text WHERE node_text MATCH ?)")
        quoted = ['"{}"'.format(word.replace('"', '""').replace("\0", "")) for word in indexed]
        arguments.insert(0, " ".join(quoted))
    return " AND ".join(conditions), arguments


def excerpt(text: str, words: Sequence[str]) -> str:
    """One line of the text around the first word that is in it; empty for an empty text."""
    line = " ".join(text.split())
    folded = line.lower()
    places = [place for word in words if (place := folded.find(word.lower())) >= 0]
    first = min(places, default=0)
    start, stop = max(first - _BEFORE, 0), min(first + _AFTER, len(line))
    return f"{'…' if start else ''}{line[start:stop]}{'…' if stop < len(line) else ''}"

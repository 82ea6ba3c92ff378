"""Tokenize long text in parts without changing an id.

The `tokenizers` library keeps some hundred bytes per token, and its regular expressions give up on
about ten million white-space characters in a row. So long text is cut where the pre-tokenizer
always cuts, and a long run of one character, which is a single word for the pre-tokenizer, is
encoded once and repeated.

Why repeating is exact: BPE applies the pair of lowest (rank, position) first. If BPE leaves the
border between two neighbouring tokens alone when it sees only these two, no merge ever crosses that
border in a longer word, because merges on either side happen in the same order as before. So
results may be joined wherever the tokens around the border, encoded together, come out unchanged.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from edgedsv4.errors import ConfigError

WINDOW = 3 << 15
"""Characters that are tokenized at once where the text allows it; a multiple of three."""
LONG_RUN = 1 << 15
"""A character repeated this often is handled as a run."""
MAX_SPACES = 4_000_000
"""White space in a row that the library's regular expressions are trusted with."""

_CJK = "一-龥\u3040-\u30ff"
_SAFE_CUT = re.compile(
    r"(?<=\n)(?=[!-~])"
    r"|(?<=[A-Za-z])(?= [A-Za-z])"
    r"|(?<=[ -/:-~])(?=[0-9])|(?<=[0-9])(?=[ -/:-~])"
    rf"|(?<=[{_CJK}])(?=[ -~\u3001\u3002\uff0c])|(?<=[ -~\u3001\u3002\uff0c])(?=[{_CJK}])"
)
_SPACES = re.compile(
    rf"[\t-\r \x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]{{{MAX_SPACES}}}"
)
_LETTERS = re.compile("[A-Za-z]*")
_DIGIT_WINDOW = re.compile(f"[0-9]{{{WINDOW}}}")
_HEAD = 4096

Encode = Callable[[str], list[int]]


def encode_long(text: str, encode: Encode, token_bytes: Sequence[bytes]) -> list[int]:
    """Token ids of a text of any length, equal to `encode(text)`.

    Args:
        text: without lone surrogates.
        encode: encodes a text of moderate length as plain text.
        token_bytes: bytes of each token id.

    Raises:
        ConfigError: a run of more than `MAX_SPACES` different white-space characters.
    """
    ids: list[int] = []
    for segment in _segments(text):
        if len(segment) < 2 * LONG_RUN:
            ids += encode(segment)
        else:
            ids += _encode_runs(segment, encode, token_bytes)
    return ids


def _segments(text: str) -> Iterator[str]:
    """Cut text into parts of about `WINDOW` characters, longer where there is no safe cut."""
    start = 0
    while start < len(text):
        end = _cut_after(text, start)
        yield text[start:end]
        start = end


def _cut_after(text: str, start: int) -> int:
    """End of the part that starts at `start`, itself a safe cut."""
    end = start + WINDOW
    if end >= len(text):
        return len(text)
    if _DIGIT_WINDOW.match(text, start):
        return end  # digits are words of three, counted from the first
    for low, high in ((start + WINDOW // 2, end), (start + 1, start + WINDOW // 2)):
        cuts = [match.start() for match in _SAFE_CUT.finditer(text, low, high)]
        if cuts:
            return cuts[-1]
    later = _SAFE_CUT.search(text, end)
    return len(text) if later is None else later.start()


def _encode_runs(text: str, encode: Encode, token_bytes: Sequence[bytes]) -> list[int]:
    """Encode text with its long runs repeated; a shortcut that would not be exact is not taken."""
    ids: list[int] = []
    start = 0
    open_run: _Run | None = None
    for first, stop in _long_runs(text):
        if not _is_one_word(text, first, stop):
            continue
        run = _Run.of(text[first], encode, token_bytes)
        done = None if run is None else run.encode_start(text[start:first], stop - first)
        if run is None or done is None:
            continue
        run_ids, left = done
        if open_run is not None and not open_run.joins(ids, run_ids):
            return _encode_whole(text, encode)
        ids += run_ids
        start, open_run = stop - left, run
    rest = _encode_whole(text[start:], encode)
    if open_run is not None and not open_run.joins(ids, rest):
        return _encode_whole(text, encode)
    return [*ids, *rest]


def _encode_whole(text: str, encode: Encode) -> list[int]:
    if _SPACES.search(text):
        raise ConfigError(
            f"text holds more than {MAX_SPACES:,} white-space characters in a row,"
            " which cannot be tokenized; remove some"
        )
    return encode(text)


def _long_runs(text: str) -> list[tuple[int, int]]:
    """First and past-the-last position of each run of one character of at least `LONG_RUN`."""
    codes = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    borders = np.flatnonzero(np.diff(codes)) + 1
    edges = np.concatenate(([0], borders, [codes.size]))
    long_ones = np.flatnonzero(np.diff(edges) >= LONG_RUN)
    return [(int(edges[i]), int(edges[i + 1])) for i in long_ones]


def _is_one_word(text: str, first: int, stop: int) -> bool:
    """Whether the pre-tokenizer sees the run as one word, wherever it is cut into parts."""
    if unicodedata.category(text[first]).startswith("N"):
        return False
    if not _LETTERS.fullmatch(text[first]):
        return True
    # `!aaa` takes ASCII letters only, `aaa` any letters: they differ where others follow.
    following = _LETTERS.match(text, stop)
    end = stop if following is None else following.end()
    return text[end : end + 1].isascii()


@dataclass(frozen=True, slots=True)
class _Run:
    """How one repeated character is encoded: `period`, of `count` characters, may be repeated."""

    char: str
    period: list[int]
    count: int
    encode: Encode
    token_bytes: Sequence[bytes]

    @classmethod
    def of(cls, char: str, encode: Encode, token_bytes: Sequence[bytes]) -> _Run | None:
        ids = encode(char * _HEAD)
        probe = cls(char, ids, _HEAD, encode, token_bytes)
        kept = probe.cut_before(ids, ids)
        if kept is None:
            return None
        return cls(char, kept, probe.characters(kept), encode, token_bytes)

    def encode_start(self, before: str, length: int) -> tuple[list[int], int] | None:
        """Encode `before` and most of the `length` characters; returns (ids, characters left)."""
        head = self.cut_before(_encode_whole(before + self.char * _HEAD, self.encode), self.period)
        if head is None:
            return None
        run_bytes = sum(len(self.token_bytes[i]) for i in head) - len(before.encode())
        left = length - run_bytes // len(self.char.encode())
        repeats = (left - _HEAD) // self.count
        if repeats < 1:
            return None
        return head + self.period * repeats, left - repeats * self.count

    def cut_before(self, ids: list[int], following: list[int]) -> list[int] | None:
        """The longest start of `ids` that `following` may be joined to, a few tokens shorter."""
        for end in range(len(ids) - 1, max(len(ids) - 64, 0), -1):
            if self.joins(ids[:end], following):
                return ids[:end]
        return None

    def joins(self, left: list[int], right: list[int]) -> bool:
        """Whether no merge crosses the border; both sides must be inside the run there."""
        before = self.aligned(left[-8:][::-1])[::-1]
        after = self.aligned(right[:8])
        if not before or not after:
            return False
        both = [*before, *after]
        return self.encode(self.char * self.characters(both)) == both

    def aligned(self, ids: list[int]) -> list[int]:
        """The fewest first ids that cover whole characters of the run; empty if they do not."""
        unit = len(self.char.encode())
        total = 0
        for i, token_id in enumerate(ids):
            total += len(self.token_bytes[token_id])
            if total % unit == 0:
                return ids[: i + 1]
        return []

    def characters(self, ids: list[int]) -> int:
        """Characters of the run that these ids cover."""
        return sum(len(self.token_bytes[i]) for i in ids) // len(self.char.encode())

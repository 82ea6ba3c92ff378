"""The section `turns` of a snapshot: how replies are rendered, and the tokens they were sampled as.

Fixed fields instead of JSON, because a parser of nested text makes objects twenty times the size of
hostile input; here every count is compared with the bytes that are left before anything is made.

    u32 number of turns, then of each, least recently used first:
        u32 pieces, then of each: u8 special (0 or 1), u32 bytes, UTF-8 text
        u32 tokens, then int32 of each
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import TypeAlias

import numpy as np

from edgedsv4.errors import SnapshotError
from edgedsv4.formats.snapshot_header import MAX_TURN_BYTES

SavedTurn: TypeAlias = tuple[tuple[tuple[str, bool], ...], tuple[int, ...]]
"""Pieces as (text, is special), and token ids."""

_MAX_PIECES = 1 << 16
_MAX_COUNT = (1 << 32) - 1


def encode_turns(turns: list[SavedTurn]) -> bytes:
    """The section; where the limits of the format are exceeded, the turns used last are kept."""
    encoded: list[bytes] = []
    left, pieces_left = MAX_TURN_BYTES - 4, _MAX_PIECES
    for pieces, token_ids in reversed(turns):
        data = _encode_turn(pieces, token_ids)
        left -= len(data)
        pieces_left -= len(pieces)
        if left < 0 or pieces_left < 0:
            break
        encoded.append(data)
    return struct.pack("<I", len(encoded)) + b"".join(reversed(encoded))


def _encode_turn(pieces: tuple[tuple[str, bool], ...], token_ids: tuple[int, ...]) -> bytes:
    parts = [struct.pack("<I", len(pieces))]
    for text, is_special in pieces:
        data = text.encode()
        parts += [struct.pack("<BI", is_special, len(data)), data]
    parts.append(struct.pack("<I", len(token_ids)))
    parts.append(np.array(token_ids, dtype="<i4").tobytes())
    return b"".join(parts)


class _Cursor:
    """Reads fields in order; never past the end."""

    def __init__(self, data: bytes, path: Path | None, offset: int) -> None:
        self._data, self._path, self._base = data, path, offset
        self.place = 0

    @property
    def left(self) -> int:
        return len(self._data) - self.place

    def error(self, what: str) -> SnapshotError:
        return SnapshotError(
            f"section turns: {what}", path=self._path, offset=self._base + self.place
        )

    def take(self, count: int) -> bytes:
        if count > self.left:
            raise self.error(f"{count:,} bytes expected, {self.left:,} are left")
        self.place += count
        return self._data[self.place - count : self.place]

    def count(self, what: str, item_bytes: int, most: int = _MAX_COUNT) -> int:
        """A number of items that are at least so large and still to come."""
        value = int.from_bytes(self.take(4), "little")
        most = min(most, self.left // item_bytes)
        if value > most:
            self.place -= 4
            raise self.error(f"{what} must be at most {most:,}, found {value:,}")
        return value


def decode_turns(
    data: bytes, *, vocab_size: int, path: Path | None, offset: int
) -> list[SavedTurn]:
    """Read the section.

    Args:
        data: at most `MAX_TURN_BYTES`.
        vocab_size: every id must be below it.
        path: for messages.
        offset: of the section in its file, for messages.

    Raises:
        SnapshotError: a count beyond what is left, an id beyond the vocabulary, text that is not
            UTF-8, or trailing bytes.
    """
    cursor = _Cursor(data, path, offset)
    turns: list[SavedTurn] = []
    pieces_left = _MAX_PIECES
    for _ in range(cursor.count("turns", 13)):
        count = cursor.count("pieces", 5, pieces_left)
        if not count:
            raise cursor.error("a turn needs at least one piece")
        pieces_left -= count
        pieces = tuple(_decode_piece(cursor) for _ in range(count))
        size = cursor.count("tokens", 4)
        ids = np.frombuffer(cursor.take(4 * size), dtype="<i4")
        if size and (ids.min() < 0 or ids.max() >= vocab_size):
            raise cursor.error(f"token ids must be 0..{vocab_size - 1}")
        turns.append((pieces, tuple(ids.tolist())))
    if cursor.left:
        raise cursor.error(f"{cursor.left:,} trailing bytes")
    return turns


def _decode_piece(cursor: _Cursor) -> tuple[str, bool]:
    kind = cursor.take(1)[0]
    if kind > 1:
        raise cursor.error(f"a piece is 0 (text) or 1 (special), found {kind}")
    data = cursor.take(cursor.count("bytes of a piece", 1))
    try:
        return data.decode("utf-8"), kind == 1
    except UnicodeDecodeError:
        raise cursor.error("a text is not UTF-8") from None

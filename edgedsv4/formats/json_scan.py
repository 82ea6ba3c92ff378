"""Walking through large JSON of a known form, one member at a time, straight from the mapping.

A general parser builds every object a file asks for: a few bytes of JSON can cost twenty times as
much memory. Here only one small value exists at a time, so the caller decides what is kept.
"""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Iterator
from pathlib import Path

from edgedsv4.errors import Fault, FormatError
from edgedsv4.formats.faults import quoted

MAX_NAME_BYTES = 512

_SPACE = re.compile(rb"[ \t\r\n]*+")
_STRING = re.compile(rb'"(?:[^"\\\x00-\x1f]|\\.)*+"')


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    members = dict(pairs)
    if len(members) != len(pairs):
        raise ValueError("a name appears twice")
    return members


def _refuse_constant(text: str) -> object:
    raise ValueError(f"{text} is not a JSON number")


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


class JsonScanner:
    """A position inside JSON text; each method reads what must come next and moves behind it.

    Attributes:
        position: absolute byte offset of what is read next.
    """

    def __init__(self, buffer: mmap.mmap, start: int, end: int, path: Path) -> None:
        """Scan bytes start..end-1 of a file's mapping; `path` is for messages."""
        self._buffer = buffer
        self._end = end
        self._path = path
        self.position = start

    def members(self) -> Iterator[str]:
        """Names of the object that comes next; the value must be read before the next name is.

        Raises:
            FormatError: not an object, or a name that is empty, too long or not valid UTF-8.
        """
        self._expect(b"{")
        if self._accept(b"}"):
            return
        while True:
            self._skip_space()
            at = self.position
            name = self.string(MAX_NAME_BYTES)
            if not name or "\0" in name:
                raise self.fault(f"unusable name {quoted(name)}", at)
            self._expect(b":")
            yield name
            if self._accept(b"}"):
                return
            self._expect(b",")

    def string(self, limit_bytes: int) -> str:
        """The string that comes next.

        Raises:
            FormatError: no string, longer than the limit, or not valid UTF-8.
        """
        self._skip_space()
        found = _STRING.match(self._buffer, self.position, self._end)
        if found is None:
            raise self.fault("expected a JSON string")
        if found.end() - found.start() - 2 > limit_bytes:
            raise self.fault(f"a string of more than {limit_bytes:,} bytes")
        raw = found.group()
        try:
            text: str = raw[1:-1].decode("utf-8")
            if "\\" in text:
                text = json.loads(raw)
                text.encode("utf-8")  # escapes can make lone surrogates, which no text may hold
        except ValueError as error:
            raise self.fault(f"unusable string: {error}") from error
        self.position = found.end()
        return text

    def value(self, limit_bytes: int) -> object:
        """The value that comes next, parsed; text in it is taken as Latin-1.

        Raises:
            FormatError: not JSON, a name twice, too deep, or longer than the limit.
        """
        self._skip_space()
        stop = min(self._end, self.position + limit_bytes)
        text = self._buffer[self.position : stop].decode("latin-1")  # one character per byte
        try:
            value, length = _DECODER.raw_decode(text)
        except RecursionError as error:
            raise self.fault("JSON nested too deep") from error
        except ValueError as error:
            cut = f", or a value of more than {limit_bytes:,} bytes" if stop < self._end else ""
            raise self.fault(f"not usable JSON{cut}: {error}") from error
        self.position += length
        return value

    def finish(self) -> None:
        """Only white space may follow.

        Raises:
            FormatError: if something else does.
        """
        self._skip_space()
        if self.position != self._end:
            raise self.fault("bytes behind the end of the JSON object")

    def fault(self, what: str, offset: int | None = None, fault: Fault = "format") -> FormatError:
        """An error at `offset`, by default at the present position."""
        at = self.position if offset is None else offset
        return FormatError(what, path=self._path, offset=at, fault=fault)

    def _skip_space(self) -> None:
        found = _SPACE.match(self._buffer, self.position, self._end)
        if found is not None:
            self.position = found.end()

    def _accept(self, mark: bytes) -> bool:
        self._skip_space()
        is_next = self.position < self._end and self._buffer[self.position] == mark[0]
        self.position += is_next
        return is_next

    def _expect(self, mark: bytes) -> None:
        if not self._accept(mark):
            raise self.fault(f"not usable JSON: expected {mark.decode()!r}")

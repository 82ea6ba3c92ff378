"""Saved sessions as bytes: a preamble, a JSON header with the section table, then the sections.

    0   magic 89 44 53 56 34 53 0d 0a          16  u64 bytes of the header
    8   u32 version                            24  u64 bytes of the whole file
    12  u32 0x0a0b0c0d, shows the byte order   32  SHA-256 of bytes 0..31 and of the header

The header holds the SHA-256 of every section, so no byte of a file is without a checksum, and no
byte without an owner: the sections follow each other without gaps to the end. Files are read with
`read`, never mapped: what was checked is what was taken, and a file that shrinks meanwhile is an
error and no signal. docs/snapshot.md has the rest.
"""

from __future__ import annotations

import hashlib
import io
import os
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import ConfigError, SnapshotError, StorageError
from edgedsv4.formats.faults import quoted
from edgedsv4.formats.snapshot_header import (
    SnapshotHeader,
    SnapshotLayout,
    SnapshotModel,
    decode_header,
)
from edgedsv4.formats.strict_json import parse_json_object

if TYPE_CHECKING:
    from edgedsv4.errors import Fault

MAGIC: Final = b"\x89DSV4S\r\n"
VERSION: Final = 1
MAX_HEADER_BYTES: Final = 1 << 20
BYTE_ORDER: Final = 0x0A0B0C0D
FIXED: Final = struct.Struct("<8sIIQQ")
PREAMBLE_BYTES: Final = FIXED.size + 32
_CHUNK_BYTES: Final = 4 << 20

Bytes = npt.NDArray[np.uint8]
Source: TypeAlias = str | os.PathLike[str] | bytes | bytearray | memoryview
"""A path, or the bytes themselves."""


class Meter:
    """Counts work in bytes, tells about it, and asks whether to go on.

    Args:
        total: bytes of work.
        on_progress: told (done, total) after every few megabytes and at the end.
        check: called before every few megabytes; may raise to stop.
    """

    def __init__(
        self,
        total: int,
        on_progress: Callable[[int, int], None] | None = None,
        check: Callable[[], None] | None = None,
    ) -> None:
        self._total, self._done = total, 0
        self._on_progress = on_progress
        self._check = check

    def pieces(self, data: memoryview) -> Iterator[memoryview]:
        """A buffer in pieces, each counted when the next one is asked for."""
        for first in range(0, len(data), _CHUNK_BYTES):
            piece = data[first : first + _CHUNK_BYTES]
            self.begin()
            yield piece
            self.advance(len(piece))

    def begin(self) -> None:
        """Raise if the work is to stop."""
        if self._check is not None:
            self._check()

    def advance(self, count: int) -> None:
        """So many bytes more are done."""
        self._done += count
        if self._on_progress is not None:
            self._on_progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class SnapshotSection:
    """One section of a snapshot."""

    name: str
    offset: int
    """In the file, bytes."""
    nbytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SnapshotInfo:
    """What a snapshot says about itself; its sections are not read for it."""

    path: Path | None
    """None for bytes from memory."""
    version: int
    nbytes: int
    """Of the whole file."""
    header: SnapshotHeader
    sections: tuple[SnapshotSection, ...]

    @property
    def model(self) -> SnapshotModel:
        """To which model it belongs."""
        return self.header.model

    @property
    def layout(self) -> SnapshotLayout:
        """How the state is stored."""
        return self.header.layout

    @property
    def length(self) -> int:
        """Tokens of the timeline."""
        return self.header.tokens

    @property
    def capacity(self) -> int:
        """Tokens that the saved session could hold."""
        return self.header.capacity

    @property
    def turn_positions(self) -> tuple[int, ...]:
        """Lengths of the timeline that a rewind reaches without evaluating anything."""
        return tuple(record.position for record in self.header.checkpoints)

    def to_json(self) -> dict[str, object]:
        """Everything as JSON types."""
        return {
            "path": None if self.path is None else str(self.path),
            "version": self.version,
            "bytes": self.nbytes,
            **self.header.to_json(),
            "sections": [
                {"name": s.name, "offset": s.offset, "bytes": s.nbytes, "sha256": s.sha256}
                for s in self.sections
            ],
        }


def inspect_snapshot(source: Source) -> SnapshotInfo:
    """Read the header of a saved session, without a model and without its sections.

    Args:
        source: path, or the bytes of `Session.save_bytes`.

    Raises:
        SnapshotError: not a snapshot, of another version, truncated, or its header is damaged.
        StorageError: the file is missing or cannot be read.
    """
    with open_snapshot(source) as snapshot:
        return snapshot.info


def checked_name(path: str | os.PathLike[str]) -> str:
    """A path as text; one that the system's calls would choke on is refused."""
    try:
        name = os.fsdecode(path)
        os.fsencode(name)
    except (TypeError, UnicodeError):
        name = ""
    if not name or "\0" in name:
        raise ConfigError(f"expected the name of a file, found {quoted(path)}")
    return name


def storage_error(what: str, path: str | Path | None, error: OSError) -> StorageError:
    """The error for what the system said about a file, or an open one without a name."""
    return StorageError(what, path=path, errno=error.errno)


class _Input(Protocol):
    """Bytes in order."""

    def readinto(self, buffer: memoryview, /) -> int | None:
        """Fill a buffer from the front; the number of bytes, 0 at the end."""


class _Memory:
    """Bytes that are in memory already, not copied."""

    def __init__(self, data: memoryview) -> None:
        self._data, self._place = data, 0

    def readinto(self, buffer: memoryview, /) -> int:
        piece = self._data[self._place : self._place + len(buffer)]
        buffer[: len(piece)] = piece
        self._place += len(piece)
        return len(piece)


class Snapshot:
    """An opened snapshot with a sound header; its sections are read in order, each once.

    Attributes:
        info: what the header says.
    """

    def __init__(self, source: _Input, nbytes: int, path: Path | None) -> None:
        self._source = source
        self._path = path
        self._place = 0
        self.info = self._read_info(nbytes)
        self._sections = iter(self.info.sections)

    def section(self, name: str, meter: Meter) -> SectionReader:
        """The next section, which has this name."""
        section = next(self._sections)
        if section.name != name:
            raise RuntimeError(f"section {name} asked for, {section.name} is next")
        return SectionReader(self, section, meter)

    def fill(self, buffer: memoryview) -> None:
        """Take the next bytes.

        Raises:
            SnapshotError: the file ended, though its size said otherwise.
            StorageError: it could not be read.
        """
        left = buffer
        while left:
            try:
                count = self._source.readinto(left)
            except OSError as error:
                what = f"cannot be read: {error.strerror}"
                raise storage_error(what, self._path, error) from error
            if not count:
                raise self.error(
                    f"{len(left):,} bytes are missing; it was cut while it was read",
                    fault="truncated",
                )
            left = left[count:]
        self._place += len(buffer)

    def error(
        self, what: str, offset: int | None = None, *, fault: Fault = "format"
    ) -> SnapshotError:
        """An error that names the file and the place."""
        return SnapshotError(what, path=self._path, offset=offset, fault=fault)

    def _read_info(self, nbytes: int) -> SnapshotInfo:
        if nbytes < PREAMBLE_BYTES:
            raise self.error(
                f"{nbytes:,} bytes, expected at least {PREAMBLE_BYTES}; is this a saved session?",
                fault="truncated",
            )
        preamble = bytearray(PREAMBLE_BYTES)
        self.fill(memoryview(preamble))
        size = self._check_preamble(preamble, nbytes)
        text = bytearray(size)
        self.fill(memoryview(text))
        digest = hashlib.sha256(preamble[: FIXED.size] + text).digest()
        if digest != preamble[FIXED.size :]:
            raise self.error(
                f"the header is damaged: its SHA-256 is {digest.hex()[:16]}...,"
                f" expected {preamble[FIXED.size :].hex()[:16]}...",
                offset=0,
                fault="checksum",
            )
        try:
            value = parse_json_object(bytes(text))
        except ValueError as error:
            raise self.error(f"the header {error}", offset=PREAMBLE_BYTES) from error
        header, table = decode_header(value, self._path)
        sections = []
        offset = PREAMBLE_BYTES + size
        for name, length, sha256 in table:
            sections.append(SnapshotSection(name, offset, length, sha256))
            offset += length
            if offset > nbytes:
                raise self.error(
                    f"section {name} ends at byte {offset:,}, the file has {nbytes:,}",
                    offset=sections[-1].offset,
                    fault="truncated",
                )
        if offset < nbytes:
            raise self.error(f"{nbytes - offset:,} trailing bytes", offset=offset)
        return SnapshotInfo(
            path=self._path,
            version=VERSION,
            nbytes=nbytes,
            header=header,
            sections=tuple(sections),
        )

    def _check_preamble(self, preamble: bytearray, nbytes: int) -> int:
        """Bytes of the header."""
        magic, version, order, size, total = FIXED.unpack_from(preamble)
        if magic != MAGIC:
            raise self.error(
                f"is not a saved session: it starts with {quoted(magic)}, expected {MAGIC!r}",
                offset=0,
            )
        if order != BYTE_ORDER:
            is_swapped = order == int.from_bytes(BYTE_ORDER.to_bytes(4, "little"), "big")
            kind = "big-endian; sessions are little-endian" if is_swapped else f"{order:#010x}"
            raise self.error(f"the byte order mark is {kind}, expected {BYTE_ORDER:#x}", offset=12)
        if version != VERSION:
            raise self.error(f"format version {version}, this program reads {VERSION}", offset=8)
        if total != nbytes:
            if nbytes < total:
                raise self.error(
                    f"{nbytes:,} of {total:,} bytes present: truncated",
                    offset=24,
                    fault="truncated",
                )
            raise self.error(f"{nbytes - total:,} trailing bytes after {total:,}", offset=24)
        limit = min(MAX_HEADER_BYTES, nbytes - PREAMBLE_BYTES)
        if not 2 <= size <= limit:
            raise self.error(f"the header has {size:,} bytes, expected 2..{limit:,}", offset=16)
        return int(size)


class SectionReader:
    """Hands out the bytes of one section in order and compares their checksum at the end."""

    def __init__(self, snapshot: Snapshot, section: SnapshotSection, meter: Meter) -> None:
        self._snapshot, self._section, self._meter = snapshot, section, meter
        self._left = section.nbytes
        self._digest = hashlib.sha256()

    @property
    def offset(self) -> int:
        """Of the section in the file."""
        return self._section.offset

    def fill(self, block: Bytes) -> None:
        """Fill a block, uint8 [n], with the next bytes; trust none of them before `finish`."""
        data = block.data
        if len(data) > self._left:
            raise RuntimeError(f"section {self._section.name} has {self._left} bytes left")
        for piece in self._meter.pieces(data):
            self._snapshot.fill(piece)
            self._digest.update(piece)
        self._left -= len(data)

    def rest(self) -> Bytes:
        """All that is left, after its checksum was compared."""
        block = np.empty(self._left, dtype=np.uint8)
        self.fill(block)
        self.finish()
        return block

    def skip(self) -> None:
        """Pass over all that is left, and compare the checksum."""
        block = np.empty(min(self._left, _CHUNK_BYTES), dtype=np.uint8)
        while self._left:
            self.fill(block[: self._left])
        self.finish()

    def finish(self) -> None:
        """Compare the checksum.

        Raises:
            SnapshotError: the section is damaged.
        """
        if self._left:
            raise RuntimeError(f"{self._left} bytes of {self._section.name} were not read")
        found, expected = self._digest.hexdigest(), self._section.sha256
        if found != expected:
            raise self._snapshot.error(
                f"section {self._section.name} is damaged: its SHA-256 is {found[:16]}...,"
                f" expected {expected[:16]}...",
                self._section.offset,
                fault="checksum",
            )


@contextmanager
def open_snapshot(source: Source) -> Iterator[Snapshot]:
    """Open a snapshot and check its header.

    Raises:
        SnapshotError: not a snapshot, or its header is damaged; a folder, device or pipe.
        StorageError: missing or unreadable.
    """
    if isinstance(source, bytes | bytearray | memoryview):
        try:
            data = memoryview(source).cast("B")
        except TypeError:
            raise ConfigError("a snapshot must be contiguous bytes") from None
        yield Snapshot(_Memory(data), len(data), None)
        return
    path = Path(checked_name(source))
    try:
        # O_NONBLOCK: opening a pipe must fail below, not wait here for its writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise storage_error(f"cannot be opened: {error.strerror}", path, error) from error
    try:
        identity = os.fstat(descriptor)
        if not stat.S_ISREG(identity.st_mode):
            found = "a directory" if stat.S_ISDIR(identity.st_mode) else "a device, pipe or socket"
            raise SnapshotError(f"is {found}, expected a saved session", path=path)
        file = io.FileIO(descriptor, closefd=False)
        yield Snapshot(file, identity.st_size, path)
    finally:
        os.close(descriptor)

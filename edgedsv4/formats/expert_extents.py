"""Where the bytes of a routed expert lie: ranges of files, to be read without a mapping.

An expert is a tuple of extents in the order w1 (gate), w3 (up), w2 (down); block scales that are
stored apart follow in the same order. Nothing here touches the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.formats.mapped_file import MappedFile


@dataclass(frozen=True, slots=True)
class Extent:
    """A range of bytes in a file."""

    file: MappedFile
    offset: int
    """First byte, absolute in `file`."""
    nbytes: int

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.offset + self.nbytes


@dataclass(frozen=True, slots=True)
class ReadRange:
    """What is read at once: whole blocks of a file, and where they go."""

    file: MappedFile
    offset: int
    """First byte, a multiple of the alignment."""
    nbytes: int
    """Length, a multiple of the alignment; the file may end before it does."""
    needed: int
    """Bytes from `offset` on that must be there: up to the end of the last extent."""
    place: int
    """Where the first byte goes in the buffer, a multiple of the alignment."""


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """How the extents of one object are read into one buffer."""

    ranges: tuple[ReadRange, ...]
    places: tuple[int, ...]
    """Where the first byte of each extent is then, in their order."""
    nbytes: int
    """Length of the buffer."""


def plan_reads(extents: Iterable[Extent], alignment: int) -> ReadPlan:
    """Cover extents with aligned ranges; extents that follow one another are read as one.

    Args:
        extents: of one object, in their order.
        alignment: of offsets, lengths and places, a power of two; 1 reads exactly the extents.
    """
    runs: list[list[Extent]] = []
    for extent in extents:
        last = runs[-1][-1] if runs else None
        if last is not None and last.file is extent.file and last.end == extent.offset:
            runs[-1].append(extent)
        else:
            runs.append([extent])
    ranges: list[ReadRange] = []
    places: list[int] = []
    place = 0
    for run in runs:
        start = run[0].offset // alignment * alignment
        needed = run[-1].end - start
        nbytes = -(-needed // alignment) * alignment
        ranges.append(ReadRange(run[0].file, start, nbytes, needed, place))
        places += [place + extent.offset - start for extent in run]
        place += nbytes
    return ReadPlan(tuple(ranges), tuple(places), place)

"""The files that hold routed experts, opened for reading, and how each expert is read.

An expert goes into a buffer of `object_bytes`: its extents, widened to what direct reads want, one
after another. Where exactly they come to lie differs from expert to expert, so the read says it.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.formats.expert_extents import Extent, ReadPlan, ReadRange, plan_reads
from edgedsv4.formats.range_reader import OpenedForReading
from edgedsv4.runtime.store_plan import largest_object_bytes

if TYPE_CHECKING:
    from edgedsv4.config import IoMode
    from edgedsv4.formats.mapped_file import MappedFile
    from edgedsv4.model.weights import RoutedExperts


@dataclass(frozen=True, slots=True)
class ExpertReads:
    """What has to be read for one expert."""

    ranges: tuple[tuple[OpenedForReading, ReadRange], ...]
    extents: tuple[Extent, ...]
    places: tuple[int, ...]
    """Where each extent begins in the buffer."""

    @property
    def nbytes(self) -> int:
        """Bytes that are read."""
        return sum(range_.nbytes for _, range_ in self.ranges)

    def check_unchanged(self) -> None:
        """Raise `FormatError` if a file that was read is no longer the one that was opened."""
        for file in {extent.file for extent in self.extents}:
            file.check_unchanged()


class ExpertFiles:
    """Every file with routed experts.

    Args:
        experts: of an opened model; its files must stay open.
        mode: how they are read.

    Raises:
        BackendUnavailableError: direct reads were asked for and a file system refuses them.
        StorageError: a file cannot be opened again.
        FormatError: a file changed.
    """

    def __init__(self, experts: RoutedExperts, mode: IoMode) -> None:
        self._experts = experts
        self._opened: dict[MappedFile, OpenedForReading] = {}
        with ExitStack() as stack:
            for file in experts.files:
                self._opened[file] = OpenedForReading(file, mode)
                stack.callback(self._opened[file].close)
            self._files = stack.pop_all()
        self.alignment = max((opened.alignment for opened in self._opened.values()), default=1)
        """Of every read, in bytes."""
        self.object_bytes = largest_object_bytes(experts.layers, self.alignment)
        """Bytes of a buffer that any expert fits into."""

    @property
    def is_direct(self) -> bool:
        """Whether no file is read through the system's cache."""
        return all(opened.is_direct for opened in self._opened.values())

    def reads(self, layer: int, expert_id: int) -> ExpertReads:
        """How an expert is read.

        Raises:
            IndexError: no such layer or expert.
        """
        extents = self._experts.extents(layer, expert_id)
        plan: ReadPlan = plan_reads(extents, self.alignment)
        ranges = tuple((self._opened[range_.file], range_) for range_ in plan.ranges)
        return ExpertReads(ranges, extents, plan.places)

    def close(self) -> None:
        """Give the descriptors back; no read may be under way."""
        self._files.close()

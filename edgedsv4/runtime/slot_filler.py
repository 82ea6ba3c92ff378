"""Fills slots with experts: starts reads, and judges and describes what came.

A slot is good when all its bytes are in, the files are still those that were opened, and the
checksums agree where they are compared. Whoever calls holds a lock.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgedsv4.errors import Dsv4Error, ExpertReadError, FormatError
from edgedsv4.formats.range_reader import CANCELLED

if TYPE_CHECKING:
    from edgedsv4.formats.range_reader import RangeReader, ReadResult
    from edgedsv4.model.weights import ExpertWeights, RoutedExperts
    from edgedsv4.runtime.expert_files import ExpertFiles, ExpertReads
    from edgedsv4.runtime.slot_bank import SlotBank
    from edgedsv4.runtime.slot_books import Reading

Verify = Literal["off", "sampled", "full"]
Checksums = Callable[[int, int], Sequence[bytes] | None]
"""(layer, expert) -> SHA-256 of each extent; None where they are not known."""

SAMPLE = 0.01
"""Share of the reads that `sampled` verifies."""


@dataclass(frozen=True, slots=True)
class Verification:
    """How what was read is compared with checksums."""

    checksums: Checksums
    share: float = SAMPLE
    """Of the reads, 0..1."""


@dataclass(frozen=True, slots=True)
class Filled:
    """How a read ended."""

    reading: Reading
    error: Dsv4Error | None
    is_good: bool
    """False without an error for a read that was cancelled."""


class SlotFiller:
    """Reads experts of one model into the slots of a bank.

    Args:
        experts: of the model.
        files: opened for reading.
        bank: that they go into.
        reader: that reads; nobody else takes its results.
        verification: None compares nothing.
    """

    def __init__(
        self,
        experts: RoutedExperts,
        files: ExpertFiles,
        bank: SlotBank,
        reader: RangeReader,
        verification: Verification | None,
    ) -> None:
        self.read_bytes = 0
        """Read so far, what was read beside the experts included."""
        self._experts = experts
        self._files = files
        self._bank = bank
        self._reader = reader
        self._verification = verification
        self._draw = random.Random()  # which reads are compared: others in every process
        self._suspects: set[tuple[int, int]] = set()  # once found damaged, compared at every read
        self._forms = tuple(experts.form(layer) for layer in range(experts.num_layers))
        self._jobs: dict[int, tuple[Reading, ExpertReads]] = {}
        self._records: dict[int, tuple[object, ExpertWeights]] = {}
        self._seen = 0

    def start(self, reading: Reading) -> Dsv4Error | None:
        """Begin a read; what is wrong if it cannot be begun."""
        layer, expert = reading.key
        try:
            reads = self._files.reads(layer, expert)
            reads.check_unchanged()
            reading.job = self._reader.submit(
                reads.ranges, self._bank.address_of(reading.slot), is_urgent=not reading.is_prefetch
            )
        except FormatError as error:
            return error
        except (OSError, IndexError) as error:
            return ExpertReadError(f"expert {expert} of layer {layer} cannot be read: {error}")
        self._jobs[reading.job] = reading, reads
        return None

    def cancel(self, reading: Reading) -> None:
        """Read no more of it than what is under way; `collect` gives it back as no good."""
        self._reader.cancel(reading.job)

    def collect(self) -> list[Filled]:
        """Reads that are over since the last call."""
        if not self._jobs:
            return []
        over, self._seen = self._reader.wait(self._seen, 0)
        return [self._judge(result) for result in over]

    def look(self) -> int:
        """What `collect` knew of, all of it when nothing is being read; for `RangeReader.rest`."""
        if not self._jobs:
            _, self._seen = self._reader.wait(self._seen, 0)
        return self._seen

    def record(self, slot: int) -> ExpertWeights:
        """Weights of the expert in a slot that was filled; valid as long as it stays there."""
        return self._records[slot][1]

    def clear(self) -> None:
        """End all reads; no slot holds anything any more."""
        self._reader.clear()
        self._jobs.clear()
        self._records.clear()

    def _judge(self, result: ReadResult) -> Filled:
        reading, reads = self._jobs.pop(result.job)
        if result.error == CANCELLED:
            return Filled(reading, None, is_good=False)
        try:
            reads.check_unchanged()
            if result.error:
                raise self._read_error(reading, reads, result)
            self.read_bytes += reads.nbytes
            self._verify(reading, reads)
            self._describe(reading, reads)
        except (FormatError, ExpertReadError) as error:
            return Filled(reading, error, is_good=False)
        return Filled(reading, None, is_good=True)

    @staticmethod
    def _read_error(reading: Reading, reads: ExpertReads, result: ReadResult) -> ExpertReadError:
        layer, expert = reading.key
        file = reads.ranges[result.range_index][0].file
        return ExpertReadError(
            f"{file.path}: expert {expert} of layer {layer} cannot be read at byte"
            f" {result.offset:,}: {result.reason}; check the drive, or open the model again"
        )

    def _verify(self, reading: Reading, reads: ExpertReads) -> None:
        verification, key = self._verification, reading.key
        if verification is None:
            return
        if key not in self._suspects and self._draw.random() >= verification.share:
            return
        expected = verification.checksums(*key)
        if expected is None:
            return
        for extent, place, digest in zip(reads.extents, reads.places, expected, strict=True):
            view = self._bank.view(reading.slot, place, extent.nbytes)
            found = hashlib.sha256(view.data).digest()
            if found != digest:
                self._suspects.add(key)
                layer, expert = key
                raise ExpertReadError(
                    f"{extent.file.path}: expert {expert} of layer {layer}, {extent.nbytes:,} bytes"
                    f" at {extent.offset:,}, has SHA-256 {found.hex()}, expected {digest.hex()};"
                    " the file is damaged"
                )

    def _describe(self, reading: Reading, reads: ExpertReads) -> None:
        """Have the record of what lies in the slot; the old one serves if only bytes differ."""
        layer, expert = reading.key
        form = self._forms[layer]
        sign = None if form is None else (form, reads.places)
        known = self._records.get(reading.slot)
        if sign is not None and known is not None and known[0] == sign:
            return
        parts = [
            self._bank.view(reading.slot, place, extent.nbytes)
            for extent, place in zip(reads.extents, reads.places, strict=True)
        ]
        self._records[reading.slot] = sign, self._experts.over(layer, expert, parts)

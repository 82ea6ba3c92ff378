"""Memory for experts: one anonymous mapping, cut into slots of one size.

A slot holds one expert as it lies in its file. Pages are taken from the system when a slot is first
filled. The mapping stays where it is, so it can be registered with a device, in pieces.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import CapacityError
from edgedsv4.runtime.host import available_ram_bytes

PIN_BYTES = 256 << 20
"""Largest piece of a bank that is worth registering at once."""


class SlotBank:
    """Slots in memory, by number.

    Args:
        slots: how many.
        slot_bytes: of each, a multiple of 4,096.

    Raises:
        CapacityError: the system does not give the memory.
    """

    def __init__(self, slots: int, slot_bytes: int) -> None:
        self.slots = slots
        self.slot_bytes = slot_bytes
        try:
            # Private: a shared mapping would be a file in memory, without huge pages.
            self._memory = mmap.mmap(
                -1, slots * slot_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            )
        except (OSError, OverflowError) as error:
            raise CapacityError(
                f"memory for {slots:,} experts was refused ({error})",
                needed_bytes=slots * slot_bytes,
                available_bytes=available_ram_bytes(),
            ) from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            # A wish: kernels without huge pages refuse it and work all the same.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_HUGEPAGE)
        self._bytes: npt.NDArray[np.uint8] = np.frombuffer(self._memory, dtype=np.uint8)
        self.address = int(self._bytes.ctypes.data)
        """Of the first slot."""

    @property
    def nbytes(self) -> int:
        """Bytes of all slots."""
        return self.slots * self.slot_bytes

    def address_of(self, slot: int) -> int:
        """Where a slot begins, a multiple of 4,096."""
        return self.address + slot * self.slot_bytes

    def view(self, slot: int, place: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Bytes of a slot, uint8 [nbytes], not copied; they keep the bank alive."""
        start = slot * self.slot_bytes + place
        return self._bytes[start : start + nbytes]

    def pieces(self, nbytes: int = PIN_BYTES) -> Iterator[tuple[int, int]]:
        """(address, bytes) of consecutive pieces of at most `nbytes`, for registering as pinned."""
        for start in range(0, self.nbytes, nbytes):
            yield self.address + start, min(nbytes, self.nbytes - start)

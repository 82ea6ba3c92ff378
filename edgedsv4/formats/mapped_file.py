"""One file, mapped read-only: the only way tensor bytes enter the library.

Everything handed out is a view of the mapping, so opening a file costs address space and no memory.
The price is that the file must stay as it was: its identity is taken at open, and `check_unchanged`
compares it again before bytes are used.
"""

from __future__ import annotations

import mmap
import os
import stat
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import FormatError
from edgedsv4.formats import sigbus


class _Mapping(mmap.mmap):
    """A mapping that leaves the SIGBUS guard's table before its addresses are given back."""

    guard_slot: int | None = None

    def __del__(self) -> None:
        if self.guard_slot is not None:
            sigbus.unregister(self.guard_slot)


class MappedFile:
    """A read-only memory mapping of one regular file, with its identity at the time of opening.

    Attributes:
        path: the file as it was named.
        size: bytes in the file (and in the mapping).
    """

    def __init__(self, path: Path, descriptor: int, identity: os.stat_result) -> None:
        """Map an open descriptor, which belongs to this object once that has worked."""
        self.path = path
        self.size = identity.st_size
        self._absolute = path.absolute()
        self._identity = identity
        self._descriptor: int | None = None
        self._mapping: _Mapping | None = _Mapping(descriptor, self.size, access=mmap.ACCESS_READ)
        self._bytes: npt.NDArray[np.uint8] | None = np.frombuffer(self._mapping, dtype=np.uint8)
        self._mapping.guard_slot = sigbus.register(self._bytes.ctypes.data, self.size)
        self._descriptor = descriptor

    @classmethod
    def open(cls, path: Path) -> MappedFile:
        """Map a file.

        Args:
            path: a regular file, or a symbolic link to one, with at least one byte.

        Raises:
            FormatError: if it is missing, empty, not a regular file, or cannot be read or mapped.
        """
        path = Path(path)
        try:
            # O_NONBLOCK: opening a FIFO must fail below, not wait here for its writer.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except FileNotFoundError as error:
            raise FormatError("no such file", path=path, fault="missing") from error
        except (OSError, ValueError) as error:
            raise FormatError(f"cannot be opened: {error}", path=path) from error
        try:
            identity = os.fstat(descriptor)
            _require_regular(identity, path)
            return cls(path, descriptor, identity)
        except (OSError, ValueError) as error:
            os.close(descriptor)
            raise FormatError(f"cannot be mapped: {error}", path=path) from error
        except BaseException:
            os.close(descriptor)
            raise

    @property
    def buffer(self) -> mmap.mmap:
        """The whole mapping, for parsers that read many small fields; slices of it are copies."""
        if self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        return self._mapping

    def view(self, offset: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Look at a range of the file without reading or copying it.

        Args:
            offset: first byte.
            nbytes: length of the range; 0 is allowed.

        Returns:
            uint8 [nbytes], read-only. It stays valid after `close`, until it is garbage collected.

        Raises:
            FormatError: if the range is not inside the file.
        """
        if self._bytes is None:
            raise ValueError(f"{self.path} is closed")
        if not (0 <= offset <= self.size and 0 <= nbytes <= self.size - offset):
            raise FormatError(
                f"{nbytes:,} bytes asked for, the file ends at byte {self.size:,}:"
                " truncated download?",
                path=self.path,
                offset=offset,
                fault="truncated",
            )
        return self._bytes[offset : offset + nbytes]

    def check_unchanged(self) -> None:
        """Raise unless the file is still the one that was opened.

        Raises:
            FormatError: if the file was shortened, extended, modified, replaced or deleted while
                open, or if the SIGBUS guard had to put zeros where its bytes were gone.
        """
        if self._descriptor is None or self._mapping is None:
            raise ValueError(f"{self.path} is closed")
        now = os.fstat(self._descriptor)
        if now.st_size != self.size:
            self._fail(f"it had {self.size:,} bytes and has {now.st_size:,}")
        if now.st_mtime_ns != self._identity.st_mtime_ns:
            self._fail("it was written to")
        try:
            named = self._absolute.stat()
        except OSError as error:
            self._fail(f"its name no longer leads to it ({error.strerror})")
        if (named.st_ino, named.st_dev) != (self._identity.st_ino, self._identity.st_dev):
            self._fail("another file has its name")
        if self._mapping.guard_slot is not None and sigbus.tripped(self._mapping.guard_slot):
            self._fail("bytes that were read were gone or unreadable, zeros stood in for them")

    def open_again(self, flags: int = 0) -> int:
        """Another descriptor of the file, for reading without the mapping; the caller closes it.

        Args:
            flags: beside `O_RDONLY | O_CLOEXEC`.

        Raises:
            OSError: the system refuses, for instance the flags.
            FormatError: another file has the name by now.
        """
        if self._descriptor is None:
            raise ValueError(f"{self.path} is closed")
        flags |= os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
        descriptor = os.open(self._absolute, flags)
        found = os.fstat(descriptor)
        if (found.st_ino, found.st_dev) != (self._identity.st_ino, self._identity.st_dev):
            os.close(descriptor)
            self._fail("another file has its name")
        return descriptor

    def close(self) -> None:
        """Give the file back. Views handed out stay valid until they are garbage collected."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = self._mapping = self._bytes = None

    def __enter__(self) -> MappedFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # An object whose construction failed has no descriptor of its own.
        if getattr(self, "_descriptor", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return f"MappedFile({str(self.path)!r}, {self.size:,} bytes)"

    def _fail(self, how: str) -> None:
        raise FormatError(f"changed while open: {how}; open the model again", path=self.path)


def _require_regular(identity: os.stat_result, path: Path) -> None:
    """Refuse what cannot be mapped, in words that say what it is."""
    if stat.S_ISDIR(identity.st_mode):
        raise FormatError("is a directory, expected a file", path=path)
    if not stat.S_ISREG(identity.st_mode):
        raise FormatError("is a device, pipe or socket, expected a regular file", path=path)
    if identity.st_size == 0:
        raise FormatError("the file is empty: interrupted download?", path=path, fault="truncated")

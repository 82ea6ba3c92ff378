"""Every exception the library raises, one tree under `Dsv4Error`.

A message says which file or argument, what was expected, what was found and what to do. The classes
carry the same facts as attributes, so that a caller never has to parse a message.
"""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Literal

Fault = Literal["format", "missing", "truncated", "checksum", "mismatch"]
"""What is wrong with a file: its contents, that it is not there, that it ends too early, that a
part does not have its checksum, or that it belongs to something else."""


class Dsv4Error(Exception):
    """Base of every error of this library."""


class FormatError(Dsv4Error):
    """A file (or other untrusted bytes) is not what its format promises.

    Attributes:
        path: the file, or None for bytes that came from memory.
        offset: absolute byte offset of the fault, or None when it has no single place.
        problems: every fault found, in file order (at least one).
        fault: what kind of fault it is, for callers that react to it.
    """

    def __init__(
        self,
        what: str,
        *,
        path: str | Path | None = None,
        offset: int | None = None,
        problems: tuple[str, ...] = (),
        fault: Fault = "format",
    ) -> None:
        self.path = None if path is None else Path(path)
        self.offset = offset
        self.problems = problems or (what,)
        self.fault = fault
        where = "" if path is None else f"{path}: "
        at = "" if offset is None else f" (at byte {offset})"
        super().__init__(f"{where}{what}{at}")


class UnsupportedModelError(FormatError):
    """A well-formed file that holds something this version does not run."""


class SnapshotError(FormatError):
    """A saved session is damaged, or belongs to another model or layout."""


class StorageError(Dsv4Error, OSError):
    """A file could not be read or written, by the system's word: missing, full disk, no right.

    Attributes:
        what: the message without the file.
        path: the file, or None when only an open file object was given.
        errno: the system's number for it (`errno.ENOSPC`, `errno.ENOENT`, ...), None without one.
    """

    def __init__(
        self, what: str, *, path: str | PathLike[str] | None = None, errno: int | None = None
    ) -> None:
        super().__init__(what if path is None else f"{path}: {what}")
        self.what = what
        self.path = None if path is None else Path(path)
        self.errno = errno  # here, because the initialiser of OSError clears it


class ConfigError(Dsv4Error):
    """An option is out of its range; the message names it, its range and the value found.

    Attributes:
        name: the option or argument alone, None where the message is about something else.
    """

    def __init__(self, what: str, *, name: str | None = None) -> None:
        self.name = name
        super().__init__(what)


class ShapeError(Dsv4Error):
    """Tensors passed to an operation disagree in shape or dtype."""


class CapacityError(Dsv4Error):
    """A memory budget does not hold what was asked for.

    Attributes:
        needed_bytes, available_bytes: both sides of the comparison.
        is_on_device: the memory is a GPU's.
    """

    def __init__(
        self, what: str, *, needed_bytes: int, available_bytes: int, is_on_device: bool = False
    ) -> None:
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes
        self.is_on_device = is_on_device
        super().__init__(f"{what}: needs {needed_bytes:,} bytes, {available_bytes:,} are available")


class BackendUnavailableError(Dsv4Error):
    """A backend or device was named that this machine or build cannot run."""


class ContextFullError(Dsv4Error):
    """The timeline would grow past the context it was opened with.

    Attributes:
        needed, capacity: tokens.
    """

    def __init__(self, needed: int, capacity: int) -> None:
        self.needed = needed
        self.capacity = capacity
        super().__init__(
            f"context full: {needed:,} tokens asked for, the session holds {capacity:,};"
            " open it with a larger context, or drop the oldest turns"
        )


class ExpertReadError(Dsv4Error):
    """The weights of a routed expert could not be read."""


class NumericError(Dsv4Error):
    """A step produced NaN or infinity; the session still stands at its last complete token."""


class BusyError(Dsv4Error):
    """A session is already in use by another call, or an engine still has live sessions."""


class CancelledError(Dsv4Error):
    """The caller cancelled; the session stands at its last complete token."""


class DeviceLostError(Dsv4Error):
    """The device stopped answering; the engine must be opened again."""

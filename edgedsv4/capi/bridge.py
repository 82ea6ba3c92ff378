"""The edge between C and Python: how functions are registered, and how exceptions become statuses.

A function of the header is a Python function of the same name under `exported`. It takes cffi's
values, returns 0 and raises what it likes; the exception becomes the status and the stored text of
the thread.
"""

from __future__ import annotations

import errno
import importlib
import logging
import os
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from edgedsv4 import (
    BackendUnavailableError,
    BusyError,
    CancelledError,
    CapacityError,
    ConfigError,
    ContextFullError,
    DeviceLostError,
    Dsv4Error,
    ExpertReadError,
    FormatError,
    NumericError,
    ShapeError,
    UnsupportedModelError,
)

# By name, because import-linter takes a module that it cannot see for the package itself.
_entry = importlib.import_module("edgedsv4.capi._entry")
ffi: Any = _entry.ffi
lib: Any = _entry.lib

logger = logging.getLogger(__name__)

Exported = TypeVar("Exported", bound=Callable[..., int])


class AbiError(Exception):
    """A struct that was compiled for another interface."""


class BufferTooSmallError(Exception):
    """A buffer does not hold the answer; the needed length is stored.

    Args:
        name: the argument.
        needed: length of the answer.
        capacity: of the buffer.
    """

    def __init__(self, name: str, needed: int, capacity: int) -> None:
        self.name, self.needed, self.capacity = name, needed, capacity
        super().__init__(f"{name} holds {capacity}, the result has {needed}")


_STATUSES: tuple[tuple[type[BaseException], int], ...] = (
    (AbiError, lib.DSV4_ERR_ABI),
    (BufferTooSmallError, lib.DSV4_ERR_BUFFER),
    (UnsupportedModelError, lib.DSV4_ERR_UNSUPPORTED),
    (BackendUnavailableError, lib.DSV4_ERR_UNSUPPORTED),
    (CapacityError, lib.DSV4_ERR_OUT_OF_MEMORY),
    (MemoryError, lib.DSV4_ERR_OUT_OF_MEMORY),
    # Callbacks that called back, again and again; nothing that comes from outside gets this far.
    (RecursionError, lib.DSV4_ERR_OUT_OF_MEMORY),
    (ContextFullError, lib.DSV4_ERR_CONTEXT_FULL),
    (CancelledError, lib.DSV4_ERR_CANCELLED),
    (BusyError, lib.DSV4_ERR_BUSY),
    (DeviceLostError, lib.DSV4_ERR_DEVICE_LOST),
    (NumericError, lib.DSV4_ERR_NUMERIC),
    (ExpertReadError, lib.DSV4_ERR_IO),
    (ConfigError, lib.DSV4_ERR_INVALID_ARGUMENT),
    (ShapeError, lib.DSV4_ERR_INTERNAL),
    (UnicodeError, lib.DSV4_ERR_INVALID_ARGUMENT),
)
_FAULTS = {
    "format": lib.DSV4_ERR_FORMAT,
    "missing": lib.DSV4_ERR_NOT_FOUND,
    "truncated": lib.DSV4_ERR_TRUNCATED,
    "checksum": lib.DSV4_ERR_CHECKSUM,
    "mismatch": lib.DSV4_ERR_MISMATCH,
}


# Made beforehand, for when there is no memory to make anything.
_EXHAUSTED_TEXT = ffi.new("char[]", b"out of memory")
_EXHAUSTED = ffi.new(
    "dsv4_error_info *",
    {"status": lib.DSV4_ERR_OUT_OF_MEMORY, "text": _EXHAUSTED_TEXT, "offset": -1},
)
_EXHAUSTED.needed = _EXHAUSTED.available = -1


def exported(function: Exported) -> Exported:
    """Register a function under the name it has in the header."""
    name = function.__name__
    own_name = ffi.new("char[]", name.encode())

    def on_error(
        _kind: type[BaseException], error: BaseException, _trace: TracebackType | None
    ) -> int:
        try:
            return report(name, error)
        except (MemoryError, RecursionError):
            return int(lib.entry_fail(own_name, _EXHAUSTED))

    register = ffi.def_extern(name=f"py_{name}", error=lib.DSV4_ERR_INTERNAL, onerror=on_error)
    register(function)
    return function


def status_of(error: BaseException) -> int:
    """The status that stands for an exception."""
    # The one is torch's, which is not imported here for its name alone.
    is_out_of_memory = type(error).__name__ == "OutOfMemoryError"
    if is_out_of_memory or (isinstance(error, CapacityError) and error.is_on_device):
        return int(lib.DSV4_ERR_DEVICE_MEMORY)
    if type(error) is Dsv4Error:
        # An engine or a session that another thread closed after its handle had been looked up.
        return int(lib.DSV4_ERR_INVALID_ARGUMENT)
    for kind, status in _STATUSES:
        if isinstance(error, kind):
            return int(status)
    if isinstance(error, FormatError):
        # One that only wraps what the system said is no fault of the contents.
        if error.fault == "format" and isinstance(error.__cause__, OSError):
            return _status_of_system(error.__cause__.errno)
        return int(_FAULTS[error.fault])
    return _status_of_system(error.errno) if isinstance(error, OSError) else lib.DSV4_ERR_INTERNAL


def _status_of_system(number: int | None) -> int:
    """The status that stands for an error number of the system."""
    if number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return int(lib.DSV4_ERR_NO_SPACE)
    if number == errno.ENOMEM:
        return int(lib.DSV4_ERR_OUT_OF_MEMORY)
    return int(lib.DSV4_ERR_NOT_FOUND if number == errno.ENOENT else lib.DSV4_ERR_IO)


def report(function: str, error: BaseException) -> int:
    """Store an exception as the last error of this thread; returns its status."""
    status = status_of(error)
    text = str(error) or type(error).__name__
    if status == lib.DSV4_ERR_INTERNAL:
        logger.error("%s failed", function, exc_info=error)
        text = f"{type(error).__name__}: {text}"
    path = getattr(error, "path", None) or getattr(error, "filename", None) or ""
    name = str(getattr(error, "name", None) or "")
    # Alive until the library has copied them.
    texts = (_bytes(text), os.fsencode(str(path)), _bytes(name))
    kept = [ffi.new("char[]", data) for data in texts]
    info = ffi.new("dsv4_error_info *")
    info.status = status
    info.text, info.path, info.name = kept
    info.offset = _number(error, "offset")
    info.needed = _number(error, "needed_bytes", "needed")
    info.available = _number(error, "available_bytes", "capacity")
    return int(lib.entry_fail(ffi.new("char[]", function.encode()), info))


def _number(error: BaseException, *names: str) -> int:
    for name in names:
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return -1


def _bytes(text: str) -> bytes:
    return text.replace("\0", "\\0").encode("utf-8", "replace")

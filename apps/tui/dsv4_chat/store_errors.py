"""What can go wrong with the conversations on disk, and what SQLite calls it."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from edgedsv4 import Dsv4Error


class StoreError(Dsv4Error):
    """Conversations cannot be read or written; what is in memory is as it was."""


class StoreDamagedError(StoreError):
    """The database is no database any more; `set_aside` makes room for a new one.

    Attributes:
        path: the file.
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path = path
        super().__init__(
            f"{path}: the conversations cannot be read ({what}); start with a new file (this one is"
            " kept beside it under another name), or put a copy of yours in its place"
        )


class StoreVersionError(StoreError):
    """The database was written by a newer program."""

    def __init__(self, found: int, known: int) -> None:
        super().__init__(
            f"the conversations have version {found}, this program knows up to {known};"
            " install the newer dsv4-chat, or name another folder (data_folder)"
        )


class StoreConflictError(StoreError):
    """Another running program changed or deleted the conversation meanwhile."""


_ADVICE = {
    "SQLITE_FULL": "the disk is full; free some space, your text is still here",
    "SQLITE_READONLY": "it may not be written; check its owner and rights",
    "SQLITE_CANTOPEN": "it cannot be opened; check that the folder exists and may be written",
    "SQLITE_PERM": "it may not be written; check its owner and rights",
    "SQLITE_IOERR": "the disk failed",
    "SQLITE_BUSY": "another program is writing to it; try again",
    "SQLITE_LOCKED": "another program is writing to it; try again",
}


@contextmanager
def translated(path: Path) -> Iterator[None]:
    """Turn SQLite's and the system's errors into a `StoreError` that says what to do."""
    try:
        yield
    except sqlite3.IntegrityError as error:
        raise StoreConflictError(
            f"{path}: another dsv4-chat deleted or changed this conversation ({error});"
            " fork it to keep what you see"
        ) from error
    except sqlite3.Error as error:
        name: str = getattr(error, "sqlite_errorname", "")
        base = "_".join(name.split("_")[:2])
        if base in ("SQLITE_CORRUPT", "SQLITE_NOTADB"):
            raise StoreDamagedError(path, str(error)) from error
        raise StoreError(f"{path}: {_ADVICE.get(base, str(error))}") from error
    except OSError as error:
        raise StoreError(f"{error.filename or path}: {error.strerror or error}") from error

"""Files that take their name only when they are complete.

Everything is written under a temporary name in the target's folder, synced, and renamed at the end,
several files together. A failure on the way leaves older files as they were and nothing behind. A
link is followed, so that it stays a link; a device, pipe or folder is never replaced.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Self

from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from types import TracebackType

_WRITE_FAILURES = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""What a write can end in; the error does not know its file."""


_STDERR = 2


class WholeFiles:
    """A set of files that appear together when the `with` block ends without an error."""

    def __init__(self) -> None:
        self._pending: list[tuple[Path, Path]] = []  # temporary name, final name

    @contextmanager
    def create(self, target: Path) -> Iterator[BinaryIO]:
        """Open one of the files for writing, at the end of the set.

        Raises:
            ConfigError: if `target` is something else than a file.
            OSError: if it cannot be written.
        """
        final = Path(os.path.realpath(target))
        if final.exists() and not final.is_file():
            found = "a directory" if final.is_dir() else "a device, pipe or socket"
            raise ConfigError(f"{target}: expected a file name, found {found}")
        if final.is_symlink():
            raise ConfigError(f"{target}: expected a file name, found links that lead in a circle")
        name = f".{final.name[:40]}.{secrets.token_hex(6)}.partial"
        self._pending.append((final.with_name(name), final))
        try:
            with open(self._pending[-1][0], "xb", opener=_open_beyond_stdio) as file:
                if final.exists():
                    # What nobody else may read stays so, also in the file that replaces it.
                    os.fchmod(file.fileno(), stat.S_IMODE(final.stat().st_mode))
                yield file
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            if error.errno in _WRITE_FAILURES and error.filename is None:
                error.filename = str(target)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                for temporary, final in self._pending:
                    temporary.replace(final)
                for folder in {final.parent for _, final in self._pending}:
                    _sync_folder(folder)
        finally:
            for temporary, _ in self._pending:
                with suppress(FileNotFoundError):
                    temporary.unlink()


def _open_beyond_stdio(path: str, flags: int) -> int:
    """Open a file under no number that a process prints to, even where it has closed stdout."""
    descriptor = os.open(path, flags, 0o666)
    if descriptor > _STDERR:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _STDERR + 1)
    finally:
        os.close(descriptor)


@contextmanager
def whole_file(target: Path) -> Iterator[BinaryIO]:
    """One such file; see `WholeFiles.create`."""
    with WholeFiles() as files, files.create(target) as file:
        yield file


def _sync_folder(folder: Path) -> None:
    """Make renames durable, where the system can."""
    with suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

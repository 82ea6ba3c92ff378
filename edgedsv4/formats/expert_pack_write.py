"""The file of an expert pack while it is built: it grows by layers, and a crash costs at most one.

Bytes go to `X.partial`. When a layer is on the disk, `X.checkpoint.json` says so; a build that was
ended in any way goes on behind the last such layer. The index is written last, and only a whole
file gets the name `X`.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, BinaryIO, Final, Self

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import BusyError, CapacityError, ConfigError, FormatError
from edgedsv4.formats.expert_pack_header import HEADER_BYTES
from edgedsv4.formats.expert_pack_resume import (
    CHECKPOINT_SUFFIX,
    BuildIdentity,
    BuildProgress,
    checkpoint_text,
    read_checkpoint,
    sync_folder,
    write_json,
)

if TYPE_CHECKING:
    from edgedsv4.formats.expert_pack_index import Entries
    from edgedsv4.formats.expert_pack_layout import PackLayout

PARTIAL_SUFFIX: Final = ".partial"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_READ_BYTES: Final = 1 << 24

Bytes = npt.NDArray[np.uint8]


def checkpoint_path(target: Path) -> Path:
    """The checkpoint of a pack that is written."""
    final = Path(os.path.realpath(target))
    return final.with_name(final.name + CHECKPOINT_SUFFIX)


def require_space(target: Path, needed_bytes: int, margin_bytes: int) -> None:
    """Raise unless the disk of a file to write has room for so much more, and a margin.

    Raises:
        CapacityError: it has not.
    """
    folder = Path(os.path.realpath(target)).parent
    free = shutil.disk_usage(folder).free
    if free < needed_bytes + margin_bytes:
        raise CapacityError(
            f"{folder}: not enough free space on the disk for the expert pack and a margin of"
            f" {margin_bytes:,} bytes",
            needed_bytes=needed_bytes + margin_bytes,
            available_bytes=free,
        )


class PackWriter:
    """One build of one pack. Use it as a context manager: leaving it early keeps what is complete.

    Attributes:
        target: the name that the pack will have.
        progress: finished layers.
        is_named: the pack had its name already when a build went on, and lacks its manifest only.
    """

    def __init__(
        self,
        target: Path,
        identity: BuildIdentity,
        layout: PackLayout,
        *,
        resume: bool,
        margin_bytes: int,
    ) -> None:
        """Begin a build, or go on with one.

        Args:
            target: the pack to write; a link is followed.
            identity: what the build makes from what.
            layout: where everything goes.
            resume: go on behind the last finished layer, if there is one.
            margin_bytes: space on the disk that must be left when the pack is complete.

        Raises:
            ConfigError: there is an unfinished build and `resume` does not say to go on with it;
                or `target` is no file.
            FormatError: the unfinished build is of another source or program, or damaged.
            BusyError: another process is writing this pack.
            CapacityError: the disk is too small.
            OSError: a file cannot be written.
        """
        self.target = Path(os.path.realpath(target))
        self.partial = self.target.with_name(self.target.name + PARTIAL_SUFFIX)
        self.checkpoint = checkpoint_path(target)
        self._identity, self._layout = identity, layout
        self.progress = BuildProgress(identity.started_at, layout.data_start)
        self.is_named = False
        self._check_names(resume)
        goes_on = resume and self.checkpoint.exists()
        self._file = self._open(goes_on)
        try:
            self._begin(goes_on, margin_bytes)
        except BaseException:
            self._file.close()
            raise

    def write_layer(self, objects: Iterable[Iterable[Iterable[Bytes]]]) -> None:
        """Write the bytes of the next layer; `end_layer` makes them count.

        Args:
            objects: per expert, per role, the bytes in pieces.

        Raises:
            FormatError: a matrix has another size than the layout says.
            CapacityError: the disk is full.
        """
        layer = self._layout.layers[len(self.progress.layers)]
        with self._disk_errors():
            for expert, roles in enumerate(objects):
                for role, pieces in enumerate(roles):
                    offset, nbytes = layer.place(expert, role)
                    self._pad(offset)
                    for piece in pieces:
                        self._file.write(piece.data)
                    if self._file.tell() != offset + nbytes:
                        raise FormatError(
                            f"expert {expert} of layer {len(self.progress.layers)} has"
                            f" {self._file.tell() - offset:,} bytes, expected {nbytes:,}",
                            path=self.target,
                        )
            self._pad(layer.start + self._layout.num_experts * layer.stride)

    def end_layer(self, entries: Entries) -> None:
        """Make the layer durable and say so in the checkpoint."""
        with self._disk_errors():
            self._sync()
            self.progress.add(entries, self._file.tell())
            self._save(complete=False)

    def finish(self, trailer: bytes = b"") -> None:
        """Write what follows the experts, then the index; the file still has no name."""
        with self._disk_errors():
            if not self.is_named:
                self._file.seek(self._layout.data_end)
                self._file.write(trailer)
                self._file.truncate()
                self._file.seek(HEADER_BYTES)
                self._file.write(self.progress.entries().tobytes())
            self._sync()
            size = os.fstat(self._file.fileno()).st_size
            if size != self._identity.expected_pack_bytes:
                raise FormatError(
                    f"{size:,} bytes were written, expected"
                    f" {self._identity.expected_pack_bytes:,}; another program wrote to it?",
                    path=self.partial,
                )

    def pieces(self) -> Iterable[bytes]:
        """The whole file, read back."""
        self._file.flush()
        self._file.seek(0)
        while piece := self._file.read(_READ_BYTES):
            yield piece

    def read(self, offset: int, nbytes: int) -> bytes:
        """A part of the file, read back."""
        self._file.seek(offset)
        return self._file.read(nbytes)

    def name(self) -> None:
        """Give the complete file its name."""
        with self._disk_errors():
            self._save(complete=True)
            if not self.is_named:
                self.partial.replace(self.target)
                sync_folder(self.target.parent)

    def clean_up(self) -> None:
        """Remove the checkpoint, once the manifest is there."""
        self.checkpoint.unlink()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if kind is not None and not self.progress.layers and not self.is_named:
            for path in (self.partial, self.checkpoint):
                with suppress(FileNotFoundError):
                    path.unlink()
        with suppress(OSError):  # what could not be flushed is no part of a finished layer
            self._file.close()

    def _check_names(self, resume: bool) -> None:
        if self.target.exists() and not self.target.is_file():
            raise ConfigError(f"{self.target}: expected a file name, found something else")
        if not self.target.parent.is_dir():
            raise ConfigError(f"{self.target}: no such directory; make it first")
        if resume:
            return
        left = [path for path in (self.partial, self.checkpoint) if path.exists()]
        if left:
            raise ConfigError(
                f"{left[0]} is an unfinished build; go on with it (resume, --resume), or delete"
                f" {' and '.join(path.name for path in left)}"
            )

    def _open(self, goes_on: bool) -> BinaryIO:
        self.is_named = goes_on and not self.partial.exists() and self.target.exists()
        path = self.target if self.is_named else self.partial
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            os.close(descriptor)
            raise BusyError(f"{path}: another process is writing this expert pack") from error
        return os.fdopen(descriptor, "r+b")

    def _begin(self, goes_on: bool, margin_bytes: int) -> None:
        header = self._identity.header.encode()
        if goes_on:
            self.progress = read_checkpoint(self.checkpoint, self._identity)
            self._check_partial(header)
        if not self.is_named:
            # Before the space is judged: an older, longer file would count as used.
            self._file.truncate(self.progress.pack_end if goes_on else 0)
            # The index takes room only when it is written, at the end.
            rest = self._identity.expected_pack_bytes - self.progress.pack_end
            try:
                require_space(self.target, rest + self._layout.data_start, margin_bytes)
            except CapacityError:
                if not goes_on:
                    self.partial.unlink()
                raise
        if not goes_on:
            with self._disk_errors():
                self._file.write(header)
                self._file.truncate(self._layout.data_start)
                self._save(complete=False)
        self._file.seek(self.progress.pack_end)

    def _check_partial(self, header: bytes) -> None:
        """The unfinished file must be the one that the checkpoint speaks of."""
        size = os.fstat(self._file.fileno()).st_size
        done = len(self.progress.layers)
        ends = [layer.start for layer in self._layout.layers[1:]] + [self._layout.data_end]
        expected = ends[done - 1] if done else self._layout.data_start
        is_whole = self.progress.pack_end == expected and size >= expected
        if self.is_named:
            is_whole &= done == len(ends) and size == self._identity.expected_pack_bytes
        if not is_whole or self._file.read(HEADER_BYTES) != header:
            raise FormatError(
                f"is not the file that {self.checkpoint.name} speaks of ({size:,} bytes,"
                f" {self.progress.pack_end:,} expected at least); delete both to start again",
                path=self.target if self.is_named else self.partial,
                fault="mismatch",
            )

    def _pad(self, offset: int) -> None:
        gap = offset - self._file.tell()
        if gap > 0:
            self._file.write(bytes(gap))

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())

    def _save(self, *, complete: bool) -> None:
        text = checkpoint_text(self._identity, self.progress, complete=complete)
        write_json(self.checkpoint, text)

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        """Turns a full disk into `CapacityError`."""
        try:
            yield
        except OSError as error:
            if error.errno not in _FULL:
                raise
            raise CapacityError(
                f"{self.target.parent}: the disk (or a quota) is full after"
                f" {len(self.progress.layers)} layers, which are kept; make room and go on with"
                " resume (--resume)",
                needed_bytes=self._identity.expected_pack_bytes - self.progress.pack_end,
                available_bytes=shutil.disk_usage(self.target.parent).free,
            ) from error

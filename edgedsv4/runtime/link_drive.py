"""How fast a drive is read, by size and number of requests: past the page cache, or not at all.

A file is read with O_DIRECT; where the file system refuses that, through the page cache, whose
pages of the file are dropped before. Either may still be served from memory (tmpfs, holes, pages
that another process holds, file systems that only pretend), so the system's own count of bytes read
from storage by this process decides: a run that the drive did not serve is an error, not a figure.

What lies below the system stays unseen: a virtual machine's drive may be its host's memory.
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import mmap
import os
import random
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from edgedsv4.errors import CapacityError, ConfigError, StorageError
from edgedsv4.runtime.links import Access, DriveRate, DriveReading, mount_of

ALIGNMENT = 4096
"""Of offsets, lengths and memory; drives ask for 512 or 4096."""
SMALLEST_FILE = 64 << 20
"""Bytes that a file must have; a smaller one is read before a run is over."""
SIZES = (128 << 10, 1 << 20, 4 << 20, 12 << 20)
"""Bytes of a request: a piece of a matrix up to an expert of V4-Flash."""
DEPTHS = (1, 4, 16, 32)
"""Requests on their way at any time."""
USUAL_SIZE, USUAL_DEPTH = 1 << 20, 16
"""What is kept while the other varies."""
FROM_DRIVE = 0.9
"""Share of the bytes that storage has to have given, for a run to count."""
_PIECE = 16 << 20
_SEED = 20_260_801

Progress = Callable[[str, int, int], None]
Counter = Callable[[], int | None]


@dataclass(frozen=True, slots=True)
class DriveFile:
    """A file that is open for measuring."""

    descriptor: int
    path: Path
    nbytes: int
    access: Access


@contextmanager
def drive_file(path: Path, temporary_bytes: int) -> Iterator[DriveFile]:
    """Open a file, or one without a name in a directory, that is gone with the block.

    Args:
        path: a file of at least `SMALLEST_FILE` bytes, which is only read, or a directory.
        temporary_bytes: size of the file made in a directory; at most half of the free space.

    Raises:
        ConfigError: neither of them, or a file that is too small.
        CapacityError: the directory's file system is nearly full.
        StorageError: the system refuses.
    """
    with ExitStack() as stack:
        try:
            if path.is_dir():
                size = _temporary_size(path, temporary_bytes)
                file = stack.enter_context(tempfile.TemporaryFile(dir=path))
                _fill(file, size)
                descriptor = file.fileno()
            else:
                # O_NONBLOCK: a FIFO must be refused below, not waited for.
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
                stack.callback(os.close, descriptor)
            opened = _opened(descriptor, path)
        except FileNotFoundError:
            raise ConfigError(
                f"path: expected a file or directory on the drive, found nothing at {path}",
                name="path",
            ) from None
        except OSError as error:
            raise _storage_error(error, path) from error
        yield opened


def _opened(descriptor: int, path: Path) -> DriveFile:
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_size < SMALLEST_FILE:
        what = f"{found.st_size:,} bytes" if stat.S_ISREG(found.st_mode) else "something else"
        raise ConfigError(
            f"path: expected a directory or a file of at least {SMALLEST_FILE:,} bytes,"
            f" found {what} at {path}; name a model file or a directory on the drive",
            name="path",
        )
    nbytes = found.st_size // ALIGNMENT * ALIGNMENT
    return DriveFile(descriptor, path, nbytes, "direct" if _set_direct(descriptor) else "buffered")


def _set_direct(descriptor: int) -> bool:
    """Let reads go past the page cache; False where the file system refuses."""
    flag = getattr(os, "O_DIRECT", None)
    if flag is None:
        return False
    before = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before | flag)
        with mmap.mmap(-1, ALIGNMENT) as page:
            os.preadv(descriptor, [page], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(descriptor, fcntl.F_SETFL, before)
        return False
    return True


def _temporary_size(folder: Path, wanted: int) -> int:
    free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
    size = min(wanted, free // 2) // _PIECE * _PIECE
    if size < SMALLEST_FILE:
        raise CapacityError(
            f"{folder}: too little free space for a file to measure; name another directory or a"
            " file that exists",
            needed_bytes=2 * SMALLEST_FILE,
            available_bytes=free,
        )
    return size


def _fill(file: BinaryIO, nbytes: int) -> None:
    """Write bytes that no drive can compress, and let none of them stay in memory."""
    draw = random.Random(_SEED)
    for _ in range(nbytes // _PIECE):
        file.write(draw.randbytes(_PIECE))
    file.flush()
    os.fsync(file.fileno())
    _drop_pages(file.fileno())


def _drop_pages(descriptor: int) -> None:
    if hasattr(os, "posix_fadvise"):
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)


def bytes_from_storage() -> int | None:
    """Bytes that storage has given this process so far; None where the system does not tell."""
    try:
        lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "read_bytes":
            return int(value)
    return None


class DriveReader:
    """Reads a file with a number of threads, each with one request on its way."""

    def __init__(self, file: DriveFile, counter: Counter = bytes_from_storage) -> None:
        self._file = file
        self._counter = counter

    def rate(self, request_bytes: int, depth: int, seconds: float) -> float:
        """Bytes per second.

        Args:
            request_bytes: of each read, a multiple of `ALIGNMENT`.
            depth: reads at the same time.
            seconds: how long to go on; through the page cache, until every byte was read once.

        Raises:
            StorageError: a read failed, or storage did not serve the reads.
        """
        file = self._file
        offsets = _scattered(file.nbytes, request_bytes)
        if file.access == "buffered":
            _drop_pages(file.descriptor)
            order: Iterator[int] = iter(offsets)
        else:
            order = itertools.cycle(offsets)
        before, began = self._counter(), time.perf_counter()
        done = self._read_all(order, (request_bytes, depth), began + seconds)
        elapsed = time.perf_counter() - began
        self._check_served(done, before, self._counter())
        return done / elapsed

    def _read_all(self, order: Iterator[int], shape: tuple[int, int], deadline: float) -> int:
        request_bytes, depth = shape
        lock = threading.Lock()

        def work(first: int | None) -> int:
            """One request at least, then others until the time is over."""
            done, offset = 0, first
            with mmap.mmap(-1, request_bytes) as memory:
                while offset is not None:
                    self._read(memory, offset)
                    done += request_bytes
                    with lock:
                        offset = next(order, None) if time.perf_counter() < deadline else None
            return done

        starts = [next(order, None) for _ in range(depth)]
        with ThreadPoolExecutor(depth) as pool:
            return sum(pool.map(work, starts))

    def _read(self, memory: mmap.mmap, offset: int) -> None:
        try:
            count = os.preadv(self._file.descriptor, [memory], offset)
        except OSError as error:
            raise _storage_error(error, self._file.path) from error
        if count != len(memory):
            raise StorageError(
                f"{len(memory):,} bytes asked for at byte {offset:,}, {count:,} came: was the file"
                " shortened?",
                path=self._file.path,
            )

    def _check_served(self, done: int, before: int | None, after: int | None) -> None:
        if before is None or after is None:
            raise StorageError(
                "this system does not tell which bytes came from the drive (/proc/self/io), so its"
                " rate cannot be told from that of memory",
                path=self._file.path,
            )
        if after - before < FROM_DRIVE * done:
            raise StorageError(
                f"only {after - before:,} of {done:,} bytes came from a drive, the others from"
                " memory (tmpfs, a sparse file, or a file system that keeps its own cache); name a"
                " file or directory on the drive itself",
                path=self._file.path,
            )


def _scattered(nbytes: int, request_bytes: int) -> Sequence[int]:
    """Offsets of all whole requests, in an order that no read-ahead guesses, always the same."""
    offsets = list(range(0, nbytes - request_bytes + 1, request_bytes))
    random.Random(_SEED).shuffle(offsets)
    return offsets


def _storage_error(error: OSError, path: Path) -> StorageError:
    return StorageError(error.strerror or str(error), path=path, errno=error.errno)


def request_shapes() -> tuple[tuple[int, int], ...]:
    """(bytes, depth) of what is measured: every size at the usual depth, and the other way."""
    by_size = [(size, USUAL_DEPTH) for size in SIZES]
    by_depth = [(USUAL_SIZE, depth) for depth in DEPTHS if depth != USUAL_DEPTH]
    return (*by_size, *by_depth)


def measure_drive(
    reader: DriveReader, file: DriveFile, repeat: int, seconds: float, report: Progress
) -> DriveRate:
    """Measure all request shapes.

    Args:
        reader: of `file`.
        file: what is read.
        repeat: runs of each shape.
        seconds: of each run.
        report: told before each shape.

    Raises:
        StorageError: as `DriveReader.rate`.
    """
    shapes = request_shapes()
    readings = []
    for place, (size, depth) in enumerate(shapes):
        report(f"drive, {size >> 10} KiB x {depth}", place, len(shapes))
        runs = tuple(reader.rate(size, depth, seconds) for _ in range(repeat))
        readings.append(DriveReading(request_bytes=size, depth=depth, runs=runs))
    return DriveRate(mount=mount_of(file.path), access=file.access, readings=tuple(readings))

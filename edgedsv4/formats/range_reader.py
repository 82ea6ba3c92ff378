"""Reads ranges of files into memory, many pieces at a time and past the system's cache.

`RangeReader` is the C part (`native/reader.h`) with its threads: jobs go in, and come out when they
are over. `OpenedForReading` opens a mapped file once more, for direct reads where the file system
takes them. Nobody here knows what the bytes are for.
"""

from __future__ import annotations

import errno
import importlib
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgedsv4.errors import BackendUnavailableError, StorageError

if TYPE_CHECKING:
    from edgedsv4.config import IoMode
    from edgedsv4.formats.expert_extents import ReadRange
    from edgedsv4.formats.mapped_file import MappedFile

LARGEST_ALIGNMENT = 4096
PIECE_BYTES = 1 << 20
"""Bytes of one read: drives reach their rate at this size with a queue of 16."""
ENDED, CANCELLED = -1, -2
"""Errors of a job beside the system's numbers."""
_MOST_RESULTS = 64
_O_DIRECT: int = getattr(os, "O_DIRECT", 0)

_ffi: Any = None
_lib: Any = None
try:
    # By name, as the other extensions: the module exists only where it was built.
    _extension = importlib.import_module("edgedsv4.formats.native._reader")
except ImportError as _error:
    _reason = f"the reader is not built ({_error}); `pip install -e .` with a C compiler does it"
else:
    _reason = ""
    _ffi, _lib = _extension.ffi, _extension.lib

HAVE_READER: bool = _lib is not None
"""Whether files can be read by this module."""
WHY_NO_READER: str = _reason
"""Why not, for a message; empty when they can."""


class OpenedForReading:
    """A mapped file, opened a second time for reads that bypass the mapping.

    Args:
        file: the mapping, which keeps watching for changes.
        mode: `direct` bypasses the system's cache; `buffered` reads through it and drops what was
            read; `auto` is direct where the file system allows it.

    Raises:
        BackendUnavailableError: direct reads were asked for and are refused.
        StorageError: the file cannot be opened again.
        FormatError: another file has its name by now.
    """

    def __init__(self, file: MappedFile, mode: IoMode) -> None:
        self.file = file
        self.is_direct = False
        self.alignment = 1
        """Bytes that offsets, lengths and addresses have to be multiples of, at most 4,096."""
        self._descriptor: int | None = None
        why = "" if mode == "buffered" else self._open_direct()
        if mode == "direct" and not self.is_direct:
            raise BackendUnavailableError(
                f"{file.path} cannot be read directly: {why}; use io auto or buffered"
            )
        if self._descriptor is None:
            try:
                self._descriptor = file.open_again()
            except OSError as error:
                raise StorageError(
                    f"cannot be opened again: {error.strerror}", path=file.path, errno=error.errno
                ) from error

    @property
    def descriptor(self) -> int:
        """For the system's calls, until `close`."""
        if self._descriptor is None:
            raise ValueError(f"{self.file.path} is closed")
        return self._descriptor

    def close(self) -> None:
        """Give the descriptor back; no read of it may be under way."""
        if self._descriptor is not None:
            os.close(self._descriptor)
        self._descriptor = None

    def _open_direct(self) -> str:
        """Open with O_DIRECT and try it; why it cannot be, or an empty string."""
        if not _O_DIRECT:
            return "this system has no O_DIRECT"
        try:
            descriptor = self.file.open_again(_O_DIRECT)
        except OSError as error:
            return f"the file system refuses O_DIRECT ({error.strerror})"
        alignment = _alignment_of(descriptor)
        if not 1 <= alignment <= LARGEST_ALIGNMENT:
            os.close(descriptor)
            return f"the file system wants an alignment of {alignment:,} bytes"
        try:
            with mmap.mmap(-1, LARGEST_ALIGNMENT) as block:
                os.preadv(descriptor, [block], 0)
        except OSError as error:
            os.close(descriptor)
            return f"a first read was refused ({error.strerror})"
        self._descriptor, self.is_direct, self.alignment = descriptor, True, alignment
        return ""


def _alignment_of(descriptor: int) -> int:
    found = int(_lib.dsv4_direct_alignment(descriptor)) if HAVE_READER else -1
    # 512 is what older kernels never say; the page size is always enough there.
    return LARGEST_ALIGNMENT if found < 0 else found


@dataclass(frozen=True, slots=True)
class ReadResult:
    """How a job ended."""

    job: int
    error: int
    """0, an errno, `ENDED` (the file ended, or reads stayed short) or `CANCELLED`."""
    range_index: int
    """Which range failed."""
    offset: int
    """Where in the file that was, in bytes."""

    @property
    def reason(self) -> str:
        """The error as the end of a sentence."""
        if self.error == ENDED:
            return "the file ended, or reads stayed short after 4 tries"
        if self.error == CANCELLED:
            return "the read was cancelled"
        return f"{os.strerror(self.error)} after 4 tries"


@dataclass(frozen=True, slots=True)
class ReadCounts:
    """What a reader has done so far."""

    nbytes: int
    """That came from the system."""
    reads: int
    retries: int


class RangeReader:
    """Reads that are under way, and those that wait for their turn; for any number of threads.

    Args:
        depth: reads under way at a time, 1..1024.
        has_ring: try io_uring first; else, or where the kernel has none, `depth` threads read.
        kept: what must not go before the reader: memory that it reads into.

    Raises:
        BackendUnavailableError: the C part is not built, or the system gives no threads.
    """

    def __init__(self, *, depth: int, has_ring: bool = True, kept: object = None) -> None:
        if not HAVE_READER:
            raise BackendUnavailableError(WHY_NO_READER)
        failed = _ffi.new("int32_t *")
        self._handle: Any = _lib.dsv4_reader_open(depth, PIECE_BYTES, has_ring, failed)
        if self._handle == _ffi.NULL:
            self._handle = None
            raise BackendUnavailableError(
                f"a reader of depth {depth} cannot be started: {os.strerror(failed[0])}"
            )
        self.depth = depth
        self._kept = kept

    @property
    def method(self) -> str:
        """`io_uring`, or `threads`."""
        return "io_uring" if _lib.dsv4_reader_has_ring(self._live) else "threads"

    def submit(
        self,
        ranges: Sequence[tuple[OpenedForReading, ReadRange]],
        address: int,
        *,
        is_urgent: bool,
    ) -> int:
        """Read some ranges as one job.

        Files and memory must stay until the job came out of `wait`.

        Args:
            ranges: what to read, each with its opened file.
            address: of the buffer that the ranges' places count from, a multiple of the alignment.
            is_urgent: somebody waits for it.

        Returns:
            Number of the job.

        Raises:
            StorageError: no memory, or this process is the child of a fork.
        """
        records = _ffi.new("dsv4_read_range[]", len(ranges))
        for record, (opened, range_) in zip(records, ranges, strict=True):
            record.fd = opened.descriptor
            record.is_direct = opened.is_direct
            record.offset = range_.offset
            record.nbytes = range_.nbytes
            record.needed = range_.needed
            record.address = address + range_.place
        job = int(_lib.dsv4_reader_submit(self._live, records, len(ranges), is_urgent))
        if job < 0:
            why = "a forked child cannot read; open the model there" if job == -errno.ECHILD else ""
            raise StorageError(why or os.strerror(-job), errno=-job)
        return job

    def hurry(self, job: int) -> None:
        """Somebody waits for this job now."""
        _lib.dsv4_reader_hurry(self._live, job)

    def cancel(self, job: int) -> None:
        """Read no more of a job than what is under way; it comes out of `wait` all the same."""
        _lib.dsv4_reader_cancel(self._live, job)

    def wait(self, seen: int, timeout_ms: int) -> tuple[list[ReadResult], int]:
        """Jobs that are over, each handed out once.

        Waits when there are none, until a job ends, `wake` is called, or the time is up.

        Args:
            seen: what the last call returned as its second value, 0 at first: anything that
                happened since ends the wait at once.
            timeout_ms: 0 waits for nothing.
        """
        results = _ffi.new("dsv4_read_result[]", _MOST_RESULTS)
        count = _ffi.new("int64_t *", seen)
        found = _lib.dsv4_reader_wait(self._live, results, _MOST_RESULTS, count, timeout_ms)
        over = [
            ReadResult(result.job, result.error, result.range, result.offset)
            for result in results[0:found]
        ]
        return over, int(count[0])

    def rest(self, seen: int, timeout_ms: int) -> None:
        """Wait as `wait` does, and leave the jobs that are over for whoever calls that."""
        _lib.dsv4_reader_wait(self._live, _ffi.NULL, 0, _ffi.new("int64_t *", seen), timeout_ms)

    def clear(self) -> None:
        """Drop every job; what is being read ends first. None comes out of `wait` any more."""
        _lib.dsv4_reader_clear(self._live)

    def wake(self) -> None:
        """End every wait of now."""
        _lib.dsv4_reader_wake(self._live)

    def counts(self) -> ReadCounts:
        """Bytes and reads since the start."""
        found = _ffi.new("dsv4_read_counts *")
        _lib.dsv4_reader_counts(self._live, found)
        return ReadCounts(found.bytes, found.reads, found.retries)

    def disturb(
        self, *, skip: int = 0, times: int, error: int = 0, nbytes: int = 0, delay_ms: int = 0
    ) -> None:
        """Let reads fail, to see that nothing else does (tests).

        Args:
            skip: reads that go well first.
            times: reads that do not.
            error: errno they fail with; 0 cuts them to `nbytes` instead.
            nbytes: of a read that is cut.
            delay_ms: how much longer each takes.
        """
        _lib.dsv4_reader_disturb(self._live, skip, times, error, nbytes, delay_ms)

    def close(self) -> None:
        """End all reads; jobs that are not over never come out. Closing twice is fine."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            _lib.dsv4_reader_close(handle)

    def __del__(self) -> None:
        if getattr(self, "_handle", None) is not None:
            self.close()

    @property
    def _live(self) -> Any:
        if self._handle is None:
            raise ValueError("the reader is closed")
        return self._handle

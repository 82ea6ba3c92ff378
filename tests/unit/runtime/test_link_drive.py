"""Reads of a drive: what is read, what is refused, what stays behind; never how fast it is."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from edgedsv4.errors import CapacityError, ConfigError, StorageError
from edgedsv4.runtime import link_drive
from edgedsv4.runtime.link_drive import (
    ALIGNMENT,
    SMALLEST_FILE,
    DriveFile,
    DriveReader,
    bytes_from_storage,
    drive_file,
    measure_drive,
    request_shapes,
)
from edgedsv4.runtime.links import mount_of

MIB = 1 << 20
SIZE = SMALLEST_FILE + 5000


@pytest.fixture(scope="module")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("drive") / "large"
    with path.open("wb") as file:
        file.truncate(SIZE)
    return path


class Reads:
    """Notes every read, and counts it as the drive's unless told otherwise."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offsets: Counter[tuple[int, int]] = Counter()
        self.share = 1.0
        self.short = 0
        self.error: OSError | None = None
        monkeypatch.setattr(link_drive.os, "preadv", self._preadv)

    def _preadv(self, _descriptor: int, buffers: list[Any], offset: int) -> int:
        if self.error is not None:
            raise self.error
        self.offsets[offset, len(buffers[0])] += 1
        return len(buffers[0]) - self.short

    def from_storage(self) -> int:
        return round(self.share * sum(size * n for (_, size), n in self.offsets.items()))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    return Reads(monkeypatch)


def opened(access: Any = "buffered", nbytes: int = 8 * MIB, path: str = "large") -> DriveFile:
    return DriveFile(descriptor=0, path=Path(path), nbytes=nbytes, access=access)


@pytest.fixture(autouse=True)
def dropped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []
    monkeypatch.setattr(link_drive, "_drop_pages", found.append)
    return found


def test_through_the_cache_every_byte_is_read_once_after_its_pages_went(
    reads: Reads, dropped: list[int]
) -> None:
    DriveReader(opened(), reads.from_storage).rate(MIB, 4, seconds=60)
    assert dropped == [0]
    assert reads.offsets == {(offset * MIB, MIB): 1 for offset in range(8)}


def test_direct_reads_go_round_until_the_time_is_over(reads: Reads) -> None:
    assert DriveReader(opened("direct"), reads.from_storage).rate(MIB, 3, seconds=0.05) > 0
    assert {offset for offset, _ in reads.offsets} == {place * MIB for place in range(8)}


def test_requests_stay_inside_the_file(reads: Reads) -> None:
    DriveReader(opened(nbytes=5 * MIB), reads.from_storage).rate(2 * MIB, 9, seconds=60)
    assert sorted(reads.offsets) == [(0, 2 * MIB), (2 * MIB, 2 * MIB)]


def test_requests_are_scattered(reads: Reads) -> None:
    DriveReader(opened(nbytes=64 * MIB), reads.from_storage).rate(MIB, 1, seconds=60)
    offsets = [offset for offset, _ in reads.offsets]
    assert offsets != sorted(offsets)


@pytest.mark.parametrize("access", ["direct", "buffered"])
def test_memory_is_never_reported_as_a_drive(reads: Reads, access: str) -> None:
    reads.share = 0.8
    with pytest.raises(StorageError, match="from memory"):
        DriveReader(opened(access), reads.from_storage).rate(MIB, 2, seconds=0)


def test_system_that_does_not_count_gives_no_rate(reads: Reads) -> None:
    with pytest.raises(StorageError, match="does not tell"):
        DriveReader(opened(), lambda: None).rate(MIB, 2, seconds=0)
    assert reads.offsets


def test_short_and_failed_reads_are_errors_with_the_file(reads: Reads) -> None:
    reads.short = 1
    with pytest.raises(StorageError, match=r"large.*shortened") as caught:
        DriveReader(opened(), reads.from_storage).rate(MIB, 2, seconds=0)
    reads.error = OSError(errno.EIO, "Input/output error")
    with pytest.raises(StorageError, match="Input/output") as caught:
        DriveReader(opened(), reads.from_storage).rate(MIB, 2, seconds=0)
    assert (caught.value.errno, caught.value.path) == (errno.EIO, Path("large"))


def test_every_shape_has_its_runs(reads: Reads) -> None:
    seen: list[tuple[str, int, int]] = []
    file = opened(nbytes=64 * MIB)
    reader = DriveReader(file, reads.from_storage)
    found = measure_drive(reader, file, 2, 0.0, lambda *step: seen.append(step))
    shapes = request_shapes()
    assert [(r.request_bytes, r.depth, len(r.runs)) for r in found.readings] == [
        (size, depth, 2) for size, depth in shapes
    ]
    assert [(done, total) for _, done, total in seen] == [(n, len(shapes)) for n in range(7)]
    assert (found.access, found.mount) == ("buffered", mount_of(Path("large")))


def test_file_is_only_read_and_used_to_whole_pages(large_file: Path) -> None:
    before = large_file.stat().st_mtime_ns
    with drive_file(large_file, SMALLEST_FILE) as file:
        assert file.nbytes == SIZE // ALIGNMENT * ALIGNMENT
        assert fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
        has_flag = bool(fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT)
        assert has_flag == (file.access == "direct")
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)
    assert large_file.stat().st_mtime_ns == before


def test_file_in_a_directory_is_gone_afterwards(tmp_path: Path) -> None:
    with drive_file(tmp_path, SMALLEST_FILE) as file:
        assert file.nbytes == SMALLEST_FILE
        with mmap.mmap(-1, ALIGNMENT) as page:
            assert os.preadv(file.descriptor, [page], 0) == ALIGNMENT
            assert len(set(page[:])) == 256
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(file.descriptor)


def test_interrupted_measurement_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), drive_file(tmp_path, SMALLEST_FILE):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def test_error_of_the_measurement_is_not_the_files(large_file: Path) -> None:
    mine = OSError(errno.ENOSPC, "mine")
    with pytest.raises(OSError, match="mine") as caught, drive_file(large_file, SMALLEST_FILE):
        raise mine
    assert caught.value is mine


def test_refused_direct_reads_become_buffered_ones(
    large_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_args: Any) -> int:
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(link_drive.os, "preadv", refuse)
    with drive_file(large_file, SMALLEST_FILE) as file:
        assert file.access == "buffered"
        assert not fcntl.fcntl(file.descriptor, fcntl.F_GETFL) & os.O_DIRECT


@pytest.mark.parametrize("name", ["absent", "small", "pipe"])
def test_what_cannot_be_measured_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "small").write_bytes(bytes(ALIGNMENT))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError) as caught, drive_file(tmp_path / name, SMALLEST_FILE):
        pass
    assert caught.value.name == "path"


def test_full_file_system_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1000, 4096

    monkeypatch.setattr(link_drive.os, "statvfs", lambda _path: Full)
    with pytest.raises(CapacityError, match="free space"), drive_file(tmp_path, SMALLEST_FILE):
        pass


def test_storage_is_counted_on_this_system() -> None:
    before = bytes_from_storage()
    assert before is not None
    assert before >= 0

"""The reader: right bytes whatever the layout, urgent jobs first, faults tried again and named."""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.errors import BackendUnavailableError, FormatError
from edgedsv4.formats import range_reader
from edgedsv4.formats.expert_extents import Extent, ReadPlan, plan_reads
from edgedsv4.formats.mapped_file import MappedFile
from edgedsv4.formats.range_reader import (
    CANCELLED,
    ENDED,
    PIECE_BYTES,
    OpenedForReading,
    RangeReader,
    ReadResult,
)

SIZE = 5 * PIECE_BYTES + 1234


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reads") / "data"
    path.write_bytes(np.random.default_rng(1).bytes(SIZE))
    return path


@pytest.fixture(params=["ring", "threads"])
def reader(request: pytest.FixtureRequest) -> Iterator[RangeReader]:
    reader = RangeReader(depth=4, has_ring=request.param == "ring")
    yield reader
    reader.close()


@pytest.fixture(params=["direct", "buffered"])
def opened(request: pytest.FixtureRequest, path: Path) -> Iterator[OpenedForReading]:
    with MappedFile.open(path) as file:
        opened = OpenedForReading(file, request.param)
        yield opened
        opened.close()


class Buffer:
    """Memory to read into, filled with what no file here holds for long."""

    def __init__(self, nbytes: int) -> None:
        self.memory = mmap.mmap(-1, nbytes)
        self.bytes = np.frombuffer(self.memory, dtype=np.uint8)
        self.bytes[:] = 0xA5
        self.address = self.bytes.ctypes.data


def start(
    reader: RangeReader, opened: OpenedForReading, *extents: tuple[int, int], is_urgent: bool = True
) -> tuple[int, ReadPlan, Buffer]:
    plan = plan_reads([Extent(opened.file, o, n) for o, n in extents], opened.alignment)
    buffer = Buffer(plan.nbytes + 4096)
    ranges = [(opened, range_) for range_ in plan.ranges]
    return reader.submit(ranges, buffer.address, is_urgent=is_urgent), plan, buffer


def results(reader: RangeReader, count: int) -> list[ReadResult]:
    found: list[ReadResult] = []
    seen, end = 0, time.monotonic() + 20
    while len(found) < count and time.monotonic() < end:
        over, seen = reader.wait(seen, 100)
        found += over
    return found


def test_ring_is_used_where_the_kernel_has_it() -> None:
    disabled = Path("/proc/sys/kernel/io_uring_disabled")
    reader = RangeReader(depth=2)
    if disabled.exists() and disabled.read_text().strip() == "0":
        assert reader.method == "io_uring"
    reader.close()
    threads = RangeReader(depth=2, has_ring=False)
    assert threads.method == "threads"
    threads.close()


@pytest.mark.parametrize(
    "extents",
    [
        [(0, 1)],
        [(4095, 2)],
        [(1, PIECE_BYTES)],
        [(SIZE - 1, 1)],
        [(7, SIZE - 7)],
        [(100, 5000), (5100, 3), (3 * PIECE_BYTES + 1, PIECE_BYTES + 17)],
    ],
    ids=str,
)
def test_bytes_are_those_of_the_file(
    reader: RangeReader, opened: OpenedForReading, path: Path, extents: list[tuple[int, int]]
) -> None:
    job, plan, buffer = start(reader, opened, *extents)
    assert results(reader, 1) == [ReadResult(job, 0, 0, 0)]
    for (offset, nbytes), place in zip(extents, plan.places, strict=True):
        expected = np.fromfile(path, np.uint8, nbytes, offset=offset)
        assert np.array_equal(buffer.bytes[place : place + nbytes], expected)
    assert (buffer.bytes[plan.nbytes :] == 0xA5).all()


def test_many_jobs_from_several_threads(
    reader: RangeReader, opened: OpenedForReading, path: Path
) -> None:
    data = np.fromfile(path, np.uint8)
    jobs: dict[int, tuple[int, int, Buffer]] = {}
    lock = threading.Lock()

    def submit(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for offset in rng.integers(0, SIZE - 70000, 20):
            with lock:
                job, plan, buffer = start(
                    reader, opened, (int(offset), 70000), is_urgent=bool(offset % 2)
                )
                jobs[job] = int(offset), plan.places[0], buffer

    threads = [threading.Thread(target=submit, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = results(reader, 80)
    assert sorted(result.job for result in found) == sorted(jobs)
    assert not any(result.error for result in found)
    for offset, place, buffer in jobs.values():
        assert np.array_equal(buffer.bytes[place : place + 70000], data[offset : offset + 70000])


@pytest.mark.parametrize("error", [errno.EIO, errno.EINTR, errno.EAGAIN])
def test_three_faults_in_a_row_are_overcome(
    reader: RangeReader, opened: OpenedForReading, path: Path, error: int
) -> None:
    reader.disturb(times=3, error=error)
    _, plan, buffer = start(reader, opened, (1000, 3000))
    assert results(reader, 1)[0].error == 0
    place = plan.places[0]
    expected = np.fromfile(path, np.uint8, 3000, offset=1000)
    assert np.array_equal(buffer.bytes[place : place + 3000], expected)
    assert reader.counts().retries == 3


def test_fourth_fault_is_reported_with_its_place(
    reader: RangeReader, opened: OpenedForReading
) -> None:
    reader.disturb(times=4, error=errno.EIO)
    job, *_ = start(reader, opened, (2 * PIECE_BYTES, 4096))
    assert results(reader, 1) == [ReadResult(job, errno.EIO, 0, 2 * PIECE_BYTES)]
    reader.disturb(times=0)
    _kept = start(reader, opened, (2 * PIECE_BYTES, 4096))
    assert results(reader, 1)[0].error == 0


@pytest.mark.parametrize("nbytes", [4096, 5000, PIECE_BYTES // 2])
def test_short_reads_go_on_where_they_stopped(
    reader: RangeReader, opened: OpenedForReading, path: Path, nbytes: int
) -> None:
    reader.disturb(times=3, nbytes=nbytes)
    _, plan, buffer = start(reader, opened, (0, PIECE_BYTES))
    assert results(reader, 1)[0].error == 0
    place = plan.places[0]
    expected = np.fromfile(path, np.uint8, PIECE_BYTES)
    assert np.array_equal(buffer.bytes[place : place + PIECE_BYTES], expected)


def test_file_that_is_cut_while_open_is_an_error(reader: RangeReader, tmp_path: Path) -> None:
    path = tmp_path / "shrinking"
    path.write_bytes(bytes(3 * PIECE_BYTES))
    for mode in ("direct", "buffered"):
        with MappedFile.open(path) as file:
            opened = OpenedForReading(file, mode)
            os.truncate(path, PIECE_BYTES)
            job, *_ = start(reader, opened, (2 * PIECE_BYTES, 100_000))
            result = results(reader, 1)[0]
            assert (result.job, result.error) == (job, ENDED)
            assert "ended" in result.reason
            opened.close()
        os.truncate(path, 3 * PIECE_BYTES)


def test_urgent_job_overtakes(path: Path) -> None:
    with MappedFile.open(path) as file:
        opened = OpenedForReading(file, "buffered")
        reader = RangeReader(depth=1, has_ring=False)
        reader.disturb(times=1000, nbytes=1 << 30, delay_ms=20)
        lazy, _, kept = start(reader, opened, (0, 4 * PIECE_BYTES), is_urgent=False)
        time.sleep(0.01)
        urgent, _, also_kept = start(reader, opened, (0, PIECE_BYTES))
        assert [result.job for result in results(reader, 2)] == [urgent, lazy]
        assert kept.bytes[0] == also_kept.bytes[0]
        reader.close()
        opened.close()


def test_hurried_job_overtakes(path: Path) -> None:
    with MappedFile.open(path) as file:
        opened = OpenedForReading(file, "buffered")
        reader = RangeReader(depth=1, has_ring=False)
        reader.disturb(times=1000, nbytes=1 << 30, delay_ms=10)
        first = start(reader, opened, (0, 4 * PIECE_BYTES), is_urgent=False)
        second = start(reader, opened, (0, PIECE_BYTES), is_urgent=False)
        reader.hurry(second[0])
        assert [result.job for result in results(reader, 2)] == [second[0], first[0]]
        reader.close()
        opened.close()


def test_cancelled_job_comes_out_as_cancelled(
    reader: RangeReader, opened: OpenedForReading
) -> None:
    reader.disturb(times=1000, nbytes=1 << 30, delay_ms=10)
    first = start(reader, opened, (0, SIZE))
    second = start(reader, opened, (0, SIZE), is_urgent=False)
    reader.cancel(second[0])
    found = {result.job: result.error for result in results(reader, 2)}
    assert found == {first[0]: 0, second[0]: CANCELLED}


def test_wake_ends_a_wait(reader: RangeReader) -> None:
    _, seen = reader.wait(0, 0)
    timer = threading.Timer(0.05, reader.wake)
    timer.start()
    begin = time.monotonic()
    over, after = reader.wait(seen, 5000)
    assert (over, after) == ([], seen + 1)
    assert time.monotonic() - begin < 4
    timer.join()


def test_rest_leaves_the_result(reader: RangeReader, opened: OpenedForReading) -> None:
    job, _, _kept = start(reader, opened, (0, 8))
    for _ in range(100):
        reader.rest(0, 50)
        over, _ = reader.wait(0, 0)
        if over:
            break
    assert over == [ReadResult(job, 0, 0, 0)]


def test_cleared_jobs_never_come_out(reader: RangeReader, opened: OpenedForReading) -> None:
    reader.disturb(times=1000, nbytes=1 << 30, delay_ms=3)
    kept = [start(reader, opened, (0, SIZE), is_urgent=bool(i % 2)) for i in range(4)]
    reader.clear()
    before = [buffer.bytes.copy() for _, _, buffer in kept]
    assert reader.wait(0, 0)[0] == []
    time.sleep(0.03)
    for (_, _, buffer), was in zip(kept, before, strict=True):
        assert np.array_equal(buffer.bytes, was)
    reader.disturb(times=0)
    job, _, _also_kept = start(reader, opened, (0, 8))
    assert [result.job for result in results(reader, 1)] == [job]


def test_wait_without_work_ends_in_time(reader: RangeReader) -> None:
    begin = time.monotonic()
    assert reader.wait(0, 30) == ([], 0)
    assert 0.025 < time.monotonic() - begin < 4


def test_close_in_the_middle_of_reads(opened: OpenedForReading) -> None:
    for has_ring in (True, False):
        reader = RangeReader(depth=4, has_ring=has_ring)
        kept = [start(reader, opened, (0, SIZE)) for _ in range(4)]
        reader.close()
        reader.close()
        assert len(kept) == 4


def test_child_of_a_fork_is_told(reader: RangeReader, opened: OpenedForReading) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        pid = os.fork()
    if pid == 0:
        try:
            start(reader, opened, (0, 8))
        except OSError:
            reader.close()
            os._exit(7)
        os._exit(1)
    assert os.waitpid(pid, 0)[1] == 7 << 8
    _kept = start(reader, opened, (0, 8))
    assert results(reader, 1)[0].error == 0


def test_direct_reads_leave_the_cache_alone(path: Path, reader: RangeReader) -> None:
    with MappedFile.open(path) as file:
        opened = OpenedForReading(file, "direct")
        assert opened.is_direct
        assert 1 <= opened.alignment <= 4096
        before = reader.counts().nbytes
        _, plan, _ = start(reader, opened, (4096, 4096))
        results(reader, 1)
        assert reader.counts().nbytes - before == plan.nbytes
        opened.close()


def test_refused_direct_reads_are_an_error_only_when_asked_for(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(range_reader, "_alignment_of", lambda _descriptor: 0)
    with MappedFile.open(path) as file:
        opened = OpenedForReading(file, "auto")
        assert (opened.is_direct, opened.alignment) == (False, 1)
        opened.close()
        with pytest.raises(BackendUnavailableError, match="cannot be read directly"):
            OpenedForReading(file, "direct")


def test_replaced_file_is_not_opened(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(bytes(8192))
    with MappedFile.open(path) as file:
        path.rename(tmp_path / "old")
        path.write_bytes(bytes(8192))
        with pytest.raises(FormatError, match="another file has its name"):
            OpenedForReading(file, "auto")

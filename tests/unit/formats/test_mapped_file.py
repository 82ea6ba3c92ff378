"""MappedFile: zero-copy views, every bound checked, and changes of an open file are noticed."""

import gc
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from edgedsv4.errors import FormatError
from edgedsv4.formats.mapped_file import MappedFile

CONTENT = bytes(range(256)) * 40


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights.bin"
    file.write_bytes(CONTENT)
    return file


def descriptors() -> int:
    gc.collect()
    return len(list(Path("/proc/self/fd").iterdir()))


def test_view_shows_the_bytes_of_the_file(path: Path) -> None:
    with MappedFile.open(path) as file:
        view = file.view(300, 50)
        assert view.dtype == np.uint8
        assert view.tobytes() == CONTENT[300:350]


def test_view_is_not_a_copy(path: Path) -> None:
    with MappedFile.open(path) as file:
        assert file.view(0, 10).base is not None
        assert np.shares_memory(file.view(0, 10), file.view(5, 10))


def test_view_is_read_only(path: Path) -> None:
    with MappedFile.open(path) as file:
        view = file.view(0, 4)
        with pytest.raises(ValueError, match="read-only"):
            view[0] = 1
        with pytest.raises(ValueError, match="WRITEABLE"):
            view.flags.writeable = True


def test_empty_view_at_the_end_is_allowed(path: Path) -> None:
    with MappedFile.open(path) as file:
        assert file.view(file.size, 0).shape == (0,)


@pytest.mark.parametrize(
    ("offset", "nbytes"),
    [
        (0, len(CONTENT) + 1),
        (len(CONTENT), 1),
        (len(CONTENT) + 1, 0),
        (-1, 1),
        (0, -1),
        (10, -5),
        (1 << 63, 1),
        (1, (1 << 64) - 1),
    ],
)
def test_range_outside_the_file_is_refused(path: Path, offset: int, nbytes: int) -> None:
    with MappedFile.open(path) as file, pytest.raises(FormatError, match="truncated") as caught:
        file.view(offset, nbytes)
    assert caught.value.path == path
    assert caught.value.offset == offset


def test_view_outlives_close(path: Path) -> None:
    file = MappedFile.open(path)
    view = file.view(0, len(CONTENT))
    file.close()
    del file
    gc.collect()
    assert view.tobytes() == CONTENT


def test_closed_file_gives_no_more_views(path: Path) -> None:
    file = MappedFile.open(path)
    file.close()
    file.close()
    with pytest.raises(ValueError, match="is closed"):
        file.view(0, 1)
    with pytest.raises(ValueError, match="is closed"):
        file.check_unchanged()


def test_close_gives_the_descriptors_back(path: Path) -> None:
    before = descriptors()
    file = MappedFile.open(path)
    file.close()
    assert descriptors() == before


def test_forgotten_file_gives_the_descriptors_back(path: Path) -> None:
    before = descriptors()
    MappedFile.open(path)
    gc.collect()
    assert descriptors() == before


def test_symbolic_link_is_followed(path: Path, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(path)
    with MappedFile.open(link) as file:
        file.check_unchanged()
        assert file.size == len(CONTENT)


def make_fifo(where: Path) -> None:
    os.mkfifo(where)


def make_socket(where: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(where))


def make_loop(where: Path) -> None:
    where.symlink_to(where)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(lambda _: None, "no such file", id="missing"),
        pytest.param(Path.mkdir, "is a directory", id="directory"),
        pytest.param(Path.touch, "is empty", id="empty"),
        pytest.param(make_fifo, "device, pipe or socket", id="fifo"),
        pytest.param(make_socket, "cannot be opened", id="socket"),
        pytest.param(make_loop, "cannot be opened", id="link_to_itself"),
        pytest.param(lambda where: where.symlink_to("/dev/zero"), "device", id="device"),
        pytest.param(lambda where: where.symlink_to("gone"), "no such file", id="dangling_link"),
    ],
)
def test_what_is_not_a_file_is_refused(
    tmp_path: Path, make: Callable[[Path], None], message: str
) -> None:
    where = tmp_path / "model.gguf"
    make(where)
    before = descriptors()
    with pytest.raises(FormatError, match=message) as caught:
        MappedFile.open(where)
    assert caught.value.path == where
    assert descriptors() == before


def test_name_with_nul_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot be opened"):
        MappedFile.open(tmp_path / "a\0b")


def test_unchanged_file_passes(path: Path) -> None:
    with MappedFile.open(path) as file:
        file.check_unchanged()


def test_changed_permissions_do_not_matter(path: Path) -> None:
    with MappedFile.open(path) as file:
        path.chmod(0o400)
        file.check_unchanged()


def shorten(path: Path) -> None:
    os.truncate(path, 100)


def extend(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"more")


def modify(path: Path) -> None:
    before = path.stat()
    with path.open("r+b") as file:
        file.write(b"other")
    # File systems with coarse clocks could give the old time to a write this soon.
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))


def replace(path: Path) -> None:
    before = path.stat()
    twin = path.with_suffix(".new")
    twin.write_bytes(CONTENT)
    os.utime(twin, ns=(before.st_atime_ns, before.st_mtime_ns))
    twin.replace(path)


@pytest.mark.parametrize("change", [shorten, extend, modify, replace, Path.unlink])
def test_change_while_open_is_noticed(path: Path, change: Callable[[Path], None]) -> None:
    with MappedFile.open(path) as file:
        change(path)
        with pytest.raises(FormatError, match="changed while open") as caught:
            file.check_unchanged()
    assert caught.value.path == path


def test_change_of_the_working_directory_is_no_change(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with MappedFile.open(Path(path.name)) as file:
        monkeypatch.chdir("/")
        file.check_unchanged()


def test_views_from_many_threads_agree(path: Path) -> None:
    with MappedFile.open(path) as file:
        seen: list[bytes] = []

        def read() -> None:
            file.check_unchanged()
            seen.append(file.view(0, file.size).tobytes())

        threads = [threading.Thread(target=read) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert seen == [CONTENT] * 8

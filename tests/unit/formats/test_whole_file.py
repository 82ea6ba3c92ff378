"""Files that appear whole or not at all."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.formats.whole_file import WholeFiles, whole_file


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def write_and_stop(target: Path) -> None:
    with whole_file(target) as file:
        file.write(b"new")
        raise KeyboardInterrupt


def write_one_and_stop(folder: Path) -> None:
    with WholeFiles() as files:
        with files.create(folder / "a") as file:
            file.write(b"a")
        raise KeyboardInterrupt


def test_the_name_appears_when_the_content_is_complete(tmp_path: Path) -> None:
    target = tmp_path / "out"
    with whole_file(target) as file:
        file.write(b"half")
        assert not target.exists()
    assert target.read_bytes() == b"half"
    assert names(tmp_path) == ["out"]


def test_a_failure_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    with pytest.raises(KeyboardInterrupt):
        write_and_stop(target)
    assert target.read_bytes() == b"old"
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("mode", [0o600, 0o640])
def test_the_rights_of_the_file_that_is_replaced_stay(tmp_path: Path, mode: int) -> None:
    target = tmp_path / "out"
    target.write_bytes(b"old")
    target.chmod(mode)
    with whole_file(target) as file:
        file.write(b"new")
    assert (target.read_bytes(), stat.S_IMODE(target.stat().st_mode)) == (b"new", mode)


def test_links_that_lead_in_a_circle_are_refused(tmp_path: Path) -> None:
    (tmp_path / "a").symlink_to(tmp_path / "a")
    with (
        pytest.raises(ConfigError, match="links that lead in a circle"),
        whole_file(tmp_path / "a"),
    ):
        pass


def test_a_full_disk_is_told_with_the_name_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"old")
    with pytest.raises(OSError, match="No space left") as caught, whole_file(tmp_path / "x"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == str(tmp_path / "x")
    assert names(tmp_path) == ["x"]
    assert (tmp_path / "x").read_bytes() == b"old"


def test_files_of_a_set_appear_together(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        write_one_and_stop(tmp_path)
    assert names(tmp_path) == []
    with WholeFiles() as files:
        for name in ("a", "b"):
            with files.create(tmp_path / name) as file:
                file.write(name.encode())
            assert not (tmp_path / "a").exists()
    assert names(tmp_path) == ["a", "b"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to("real")
    with whole_file(tmp_path / "link") as file:
        file.write(b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"


def test_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(ConfigError, match="found a device, pipe"), whole_file(pipe) as file:
        file.write(b"new")
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_not_replaced() -> None:
    with pytest.raises(ConfigError, match="found a device, pipe"), whole_file(Path("/dev/null")):
        pass
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)


def test_a_folder_is_not_replaced(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a directory"), whole_file(tmp_path):
        pass

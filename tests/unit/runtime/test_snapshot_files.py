"""Saving to disks that fail and in processes that die: the old file is always whole."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from snapshot_sessions import GREEDY, TEXT, everything, options, write_model

from edgedsv4.errors import CancelledError, ConfigError, SnapshotError, StorageError
from edgedsv4.formats.snapshot_file import inspect_snapshot
from edgedsv4.runtime.engine import Engine

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

ROOT = Path(__file__).resolve().parents[3]
CHILD = """
    import os, resource, signal, sys
    from pathlib import Path
    from edgedsv4 import Engine, EngineOptions, StorageError
    from edgedsv4.formats import whole_file
    engine = Engine.open(sys.argv[1], EngineOptions(threads=1, context=800))
    session = engine.load_session(sys.argv[2])
    session.evaluate([5, 6, 7])
"""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    write_model(path, compress_ratios=(0, 4, 128), num_hash_layers=1)
    with Engine.open(path, options()) as engine:
        yield engine


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.new_session() as session:
        session.sync(TEXT[:300])
        yield session


@pytest.fixture
def path(session: Session, tmp_path: Path) -> Path:
    """A saved session of 300 tokens."""
    session.save(tmp_path / "talk.dsv4s")
    return tmp_path / "talk.dsv4s"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def child(engine: Engine, path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run code in a process that has restored the session of `path` and evaluated three tokens."""
    program = textwrap.dedent(CHILD) + textwrap.dedent(code)
    model = str(engine.describe()["path"])
    return subprocess.run(
        [sys.executable, "-c", program, model, str(path)],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


def test_a_file_may_grow_no_further_and_the_old_one_is_intact(engine: Engine, path: Path) -> None:
    old = path.read_bytes()
    done = child(
        engine,
        path,
        """
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        try:
            session.save(sys.argv[2])
        except StorageError as error:
            print(error.errno, error)
        print(session.evaluate([8]) is not None, session.length)
        """,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith(f"{errno.EFBIG} {path}: cannot be written: File too large; a file of")
    assert second == "True 304"
    assert path.read_bytes() == old
    assert names(path.parent) == ["talk.dsv4s"]


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_failures_of_the_system_are_typed_and_leave_the_old_file(
    session: Session, path: Path, monkeypatch: pytest.MonkeyPatch, call: str, number: int
) -> None:
    def fail(*_args: Any) -> None:
        raise OSError(number, os.strerror(number))

    old = path.read_bytes()
    session.evaluate([5, 6])
    before = everything(session)
    monkeypatch.setattr(*((os, "fsync") if call == "fsync" else (Path, "replace")), fail)
    with pytest.raises(StorageError, match="a file of that name is as it was") as caught:
        session.save(path)
    monkeypatch.undo()
    assert (caught.value.errno, caught.value.path) == (number, path)
    assert path.read_bytes() == old
    assert names(path.parent) == ["talk.dsv4s"]
    assert everything(session) == before


@pytest.mark.parametrize("moment", ["before the rename", "half written"])
def test_killed_process_leaves_the_old_file(engine: Engine, path: Path, moment: str) -> None:
    old = path.read_bytes()
    at = {
        "before the rename": "Path.replace = lambda *_: os.kill(os.getpid(), signal.SIGKILL)",
        "half written": "die = lambda done, total: done * 4 > total * 3 and"
        " os.kill(os.getpid(), signal.SIGKILL)",
    }[moment]
    how = ", on_progress=die" if moment == "half written" else ""
    done = child(engine, path, f"{at}\nsession.save(sys.argv[2]{how})\n")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert path.read_bytes() == old
    assert engine.load_session(path).length == 300
    assert [name for name in names(path.parent) if not name.endswith(".partial")] == ["talk.dsv4s"]


def test_file_and_folder_are_on_the_disk_before_and_after_the_rename(
    session: Session, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, replace = os.fsync, Path.replace

    def watched_fsync(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")  # noqa: PTH112
        fsync(descriptor)

    def watched_replace(self: Path, target: Path) -> Path:
        done.append("rename")
        return replace(self, target)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(Path, "replace", watched_replace)
    session.save(path)
    assert done == ["file", "rename", "folder"]


def test_cancelled_save_leaves_the_old_file(session: Session, path: Path) -> None:
    old = path.read_bytes()
    session.evaluate([5, 6])
    before = everything(session)
    with pytest.raises(CancelledError):
        session.save(path, on_progress=lambda _done, _total: session.cancel())
    assert path.read_bytes() == old
    assert names(path.parent) == ["talk.dsv4s"]
    assert everything(session) == before
    session.save(path)
    assert inspect_snapshot(path).length == 302


def test_progress_of_a_save_counts_checksums_and_writing(session: Session, path: Path) -> None:
    seen: list[tuple[int, int]] = []
    session.save(path, on_progress=lambda *step: seen.append(step))
    total = 2 * sum(section.nbytes for section in inspect_snapshot(path).sections)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert seen[-1] == (total, total)


def test_refused_file_stays_where_it_is(engine: Engine, path: Path) -> None:
    damaged = path.read_bytes()[:-1] + b"\1"
    path.write_bytes(damaged)
    with pytest.raises(SnapshotError) as caught:
        engine.load_session(path)
    assert str(caught.value).startswith(f"{path}: section turns is damaged")
    assert path.read_bytes() == damaged
    assert names(path.parent) == ["talk.dsv4s"]


def test_paths_that_are_no_files_are_refused(engine: Engine, session: Session, path: Path) -> None:
    os.mkfifo(path.with_name("pipe"))
    for name in ("pipe", "."):
        with pytest.raises(SnapshotError, match="expected a saved session"):
            engine.load_session(path.with_name("pipe").parent / name)
        with pytest.raises(ConfigError, match="expected a file name"):
            session.save(path.parent / name)
    with pytest.raises(StorageError, match="No such file"):
        engine.load_session(path.with_name("none"))


def test_saving_over_the_file_that_is_loaded_from_is_fine(engine: Engine, path: Path) -> None:
    with engine.load_session(path) as restored:
        ids = list(restored.generate(GREEDY))
        restored.save(path)
    with engine.load_session(path) as again:
        assert again.length == 300 + len(ids)
        again.load(path)


def test_sessions_of_an_engine_save_and_load_at_the_same_time(
    engine: Engine, session: Session, path: Path
) -> None:
    saved = path.read_bytes()
    with engine.new_session() as other:

        def between(_done: int, _total: int) -> None:
            if not other.length:
                other.load(saved)

        session.save(path, on_progress=between)
        assert other.token_ids == session.token_ids
    assert path.read_bytes() == saved

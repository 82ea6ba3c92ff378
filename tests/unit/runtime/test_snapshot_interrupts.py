"""Ctrl+C between any two statements of saving and loading: all of the old, or all of the new."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from line_interrupt import Interrupt
from snapshot_sessions import GREEDY, TEXT, everything, options, session_of, write_model

from edgedsv4.runtime.engine import Engine

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

FILES = (
    "runtime/session.py",
    "runtime/snapshot.py",
    "runtime/timeline.py",
    "runtime/speculation.py",
    "model/cache_state.py",
    "formats/snapshot_file.py",
    "formats/snapshot_write.py",
    "formats/whole_file.py",
)
POINTS = 40
"""Lines that are interrupted, spread over all; those at the end one by one."""


def traced(work: Callable[[], object], interrupt: Interrupt) -> None:
    """Do it under the trace; an interrupt that was raised is swallowed."""
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def points(work: Callable[[], object]) -> list[int]:
    """Lines to interrupt, of one undisturbed run."""
    counter = Interrupt(FILES)
    traced(work, counter)
    spread = range(1, counter.count, max(1, counter.count // POINTS))
    return sorted({*spread, *range(max(1, counter.count - 25), counter.count + 1)})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    return write_model(path, compress_ratios=(0, 4), num_hash_layers=1)


@pytest.fixture
def session(model: Path) -> Iterator[Session]:
    with session_of(model, draft=2) as session:
        session.sync(TEXT[:60])
        session.note = b"first"
        yield session


def test_interrupted_load_is_all_or_nothing(model: Path, session: Session) -> None:
    first = session.save_bytes()
    with Engine.open(model, options(draft=2)) as engine, engine.new_session() as other:
        other.sync(TEXT[300:470])
        other.note = b"second"
        second = other.save_bytes()
    outcomes = {"old": everything(session)}
    session.load(second)
    outcomes["new"] = everything(session)
    seen = set()
    for at in points(lambda: session.load(second)):
        session.load(first)
        traced(lambda: session.load(second), Interrupt(FILES, at))
        now = everything(session)
        # The note and the replies are taken over one statement behind the timeline.
        name = "new" if now[0] == outcomes["new"][0] else "old"
        assert now[:-1] == outcomes[name][:-1]
        seen.add(name)
    assert seen == {"old", "new"}
    assert len(list(session.generate(GREEDY))) == 24


# A file that was just opened is closed by whoever collects it.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_interrupted_save_leaves_the_old_file_or_the_new_one(
    session: Session, tmp_path: Path
) -> None:
    path = tmp_path / "talk.dsv4s"
    session.save(path)
    old = path.read_bytes()
    session.evaluate(TEXT[60:90])
    before = everything(session)
    new = session.save_bytes()
    for at in points(lambda: session.save(path)):
        path.write_bytes(old)
        traced(lambda: session.save(path), Interrupt(FILES, at))
        assert path.read_bytes() in (old, new)
        # At worst the interrupt kept the part from being removed.
        assert {name.name for name in tmp_path.iterdir() if name.suffix != ".partial"} == {
            path.name
        }
        assert everything(session) == before
    session.save(path)
    assert path.read_bytes() == new

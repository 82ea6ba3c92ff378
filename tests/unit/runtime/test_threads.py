"""What may be called from several threads at once: readings, and opening and closing sessions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BusyError, Dsv4Error
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.random_model import build_random_model


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    build_random_model(path)
    with Engine.open(path, EngineOptions(threads=1, context=600)) as engine:
        yield engine


@pytest.fixture(autouse=True)
def _eager_switching() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def run_beside(work: Callable[[], None], others: int, read: Callable[[], object]) -> None:
    """Calls `read` until `work` has ended in each of its threads; failures of both are raised."""
    with ThreadPoolExecutor(others) as pool:
        running = [pool.submit(work) for _ in range(others)]
        while not all(future.done() for future in running):
            read()
    for future in running:
        future.result()


def test_memory_is_told_while_sessions_come_and_go(engine: Engine) -> None:
    def work() -> None:
        for _ in range(150):
            engine.new_session(context=10).close()

    run_beside(work, 2, engine.memory)
    assert engine.memory()["sessions"] == 0


def test_readings_of_a_session_survive_its_close(engine: Engine) -> None:
    sessions = [engine.new_session(context=10) for _ in range(200)]

    def work() -> None:
        for session in sessions:
            session.close()

    def read() -> None:
        for session in sessions:
            assert (session.nbytes(), session.checkpoint_nbytes())[1] == 0
            assert session.usage() in ((0, 10), None)

    run_beside(work, 1, read)
    assert {session.usage() for session in sessions} == {None}


def test_close_while_iterators_are_made_is_done_or_busy(engine: Engine) -> None:
    session = engine.new_session(context=10)
    session.sync([5])

    def work() -> None:
        try:
            assert len([session.generate() for _ in range(2000)]) == 2000
        except Dsv4Error:
            assert session.is_closed

    def close() -> None:
        try:
            session.close()
        except BusyError:
            assert not session.is_closed

    run_beside(work, 2, close)

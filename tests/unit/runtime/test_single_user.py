"""One user at a time: the second is refused, and an interrupt never locks the place for good."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

import pytest

from edgedsv4 import Engine, EngineOptions, Session
from edgedsv4.runtime.single_user import SingleUser, Use

FILES = ("session.py", "single_user.py")


class Interrupt:
    """Raises at one of the lines of the code that takes and gives back, and counts them."""

    def __init__(self, at: int) -> None:
        self.count = 0
        self._at = at

    def __call__(self, frame: FrameType, _event: str, _value: Any) -> Any:
        return self._line if frame.f_code.co_filename.endswith(FILES) else None

    def _line(self, _frame: FrameType, event: str, _value: Any) -> Any:
        self.count += event == "line"
        if event == "line" and self.count == self._at:
            raise KeyboardInterrupt
        return self._line


def interrupted(session: Session, line: int) -> bool:
    """Whether a call was long enough to be interrupted at that line."""
    trace = sys.gettrace()
    sys.settrace(Interrupt(line))
    try:
        session.rewind(0)
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(trace)
    return False


def test_second_user_is_refused_until_the_first_gives_back() -> None:
    place, first, second = SingleUser(), Use(), Use()
    assert place.take(first)
    assert not place.take(second)
    place.give_back(second)
    assert not place.take(second)
    place.give_back(first)
    assert place.take(second)


def test_dropped_use_is_given_back() -> None:
    place, first = SingleUser(), Use()
    place.take(first)
    del first
    assert place.take(Use())


def test_of_many_threads_one_is_let_in() -> None:
    place, inside, most = SingleUser(), list[Use](), list[int]()

    def visit() -> None:
        for _ in range(300):
            use = Use()
            if place.take(use):
                inside.append(use)
                most.append(len(inside))
                inside.remove(use)
                place.give_back(use)

    threads = [threading.Thread(target=visit) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}


def test_session_is_free_after_an_interrupt_at_any_line() -> None:
    options = EngineOptions(threads=1, context=64)
    with Engine.open("random-tiny", options) as engine, engine.new_session() as session:
        session.evaluate([3, 4, 5])
        lines = 0
        while interrupted(session, lines + 1):
            lines += 1
            session.rewind(0)
        assert lines > 10
        assert session.token_ids == (3, 4, 5)


def test_busy_session_stays_busy() -> None:
    options = EngineOptions(threads=1, context=64)
    with Engine.open("random-tiny", options) as engine, engine.new_session() as session:
        session.evaluate([3, 4, 5])
        tokens = session.generate()
        next(tokens)
        with pytest.raises(Exception, match="in use by another call"):
            session.rewind(0)
        tokens.close()
        session.rewind(0)

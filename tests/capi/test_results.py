"""A result tells where experts came from however the reply ends."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from capi.programs import POCKET

from edgedsv4 import Engine, EngineOptions, Message, PromptOptions, SamplingOptions, Session
from edgedsv4.capi.bridge import ffi, lib
from edgedsv4.capi.calls import Call
from edgedsv4.capi.session import EventSink, _Outcome, _OwnSession, _reply
from edgedsv4.errors import CancelledError, ExpertReadError
from edgedsv4.runtime.ram_store import ExpertStore

if TYPE_CHECKING:
    from edgedsv4 import ReplyEvent

SLOTS = 20 * 122_880
QUESTION = ([Message("user", "What is 12 + 30?")], PromptOptions())


class Sink(EventSink):
    """Events that do something instead of going to C."""

    def __init__(self, act: Any) -> None:
        super().__init__(ffi.NULL, ffi.NULL)
        self._act = act

    def send(self, _event: ReplyEvent, _count: int = 0) -> bool:
        return bool(self._act())


@pytest.fixture
def session() -> Iterator[Session]:
    chosen = EngineOptions(
        context=512, threads=1, expert_place="stored", expert_ram_bytes=SLOTS, prefetch="gate"
    )
    with Engine.open(POCKET, chosen) as engine, engine.new_session() as found:
        yield found


def store_of(session: Session) -> ExpertStore:
    source = session._parts.model.experts  # below the interface
    assert isinstance(source, ExpertStore)
    return source


def replied(session: Session, act: Any) -> Any:
    """The result of a reply, whatever became of it."""
    result = ffi.new("dsv4_result *")
    result.struct_size = ffi.sizeof("dsv4_result")
    own = _OwnSession(session, None)
    options = SamplingOptions(temperature=0, max_tokens=12)
    before = store_of(session).stats()
    try:
        _reply(own, QUESTION, options, Call(ffi.NULL), Sink(act), _Outcome(result))
    finally:
        done = store_of(session).stats().since(before)
        assert result.expert_hits == done.ram_hits
        assert result.expert_misses == done.asked - done.ram_hits > 0
        assert result.expert_bytes_read == done.read_bytes > 0
        assert result.expert_prefetched == done.prefetched
        assert result.expert_guess_misses == done.guess_misses > 0
    return result


def test_of_a_reply_that_ends(session: Session) -> None:
    result = replied(session, lambda: False)
    assert result.finish_reason == lib.DSV4_FINISH_LENGTH
    assert result.generated_tokens == 12


def test_of_a_reply_that_a_callback_stops(session: Session) -> None:
    assert replied(session, lambda: True).finish_reason == lib.DSV4_FINISH_CANCELLED


def test_of_a_reply_that_another_thread_cancels(session: Session) -> None:
    with pytest.raises(CancelledError):
        replied(session, session.cancel)


def test_of_a_reply_that_a_drive_ends(session: Session) -> None:
    store = store_of(session)
    with pytest.raises(ExpertReadError):
        replied(session, lambda: store.reader.disturb(times=1 << 40, error=errno.EIO))

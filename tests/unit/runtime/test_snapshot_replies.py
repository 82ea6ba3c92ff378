"""A conversation goes on after a restore: its replies keep the tokens they were sampled with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from snapshot_sessions import options

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.snapshot_file import inspect_snapshot
from edgedsv4.formats.snapshot_header import MAX_TURN_BYTES
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.replies import DoneEvent, SampledTurns
from edgedsv4.runtime.shipped_models import RANDOM_TINY
from edgedsv4.text.messages import Message, Piece
from edgedsv4.text.prompt import PromptOptions

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

PLAIN = PromptOptions(thinking="none")
SAMPLED = SamplingOptions(seed=4, max_tokens=30)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(RANDOM_TINY, options()) as engine:
        yield engine


def answer(session: Session, messages: list[Message]) -> DoneEvent:
    *_, done = session.reply(messages, SAMPLED, prompt=PLAIN)
    assert isinstance(done, DoneEvent)
    return done


def test_replies_keep_their_tokens_after_a_restore(engine: Engine, tmp_path: Path) -> None:
    live = engine.new_session()
    messages = [Message("user", "Hello")]
    first = answer(live, messages)
    messages += [Message("assistant", first.reply.text), Message("user", "And then?")]
    live.save(tmp_path / "talk.dsv4s")
    restored = engine.load_session(tmp_path / "talk.dsv4s")
    before = live.token_ids
    assert list(engine.tokenizer.encode(first.reply.text)) != list(before[-30:])
    ours, theirs = answer(live, messages), answer(restored, messages)
    assert theirs.report == ours.report
    assert theirs.report.reused == len(before)
    assert theirs.reply == ours.reply
    assert restored.token_ids == live.token_ids


def test_second_restore_remembers_the_replies_of_both_lives(engine: Engine) -> None:
    live = engine.new_session()
    messages = [Message("user", "Hello")]
    for question in ("One more", "And another", "The last"):
        done = answer(live, messages)
        assert done.report.rebuilt == 0
        messages += [Message("assistant", done.reply.text), Message("user", question)]
        length = live.length
        live = engine.load_session(live.save_bytes())
        report = answer(engine.load_session(live.save_bytes()), messages).report
        assert report.reused == length


def test_asking_again_after_a_restore_evaluates_nothing_of_the_prompt(engine: Engine) -> None:
    live = engine.new_session()
    messages = [Message("user", "Hello")]
    first = answer(live, messages)
    restored = engine.load_session(live.save_bytes())
    again = answer(restored, messages)
    assert again.report.evaluated == 0
    assert again.reply == first.reply


def test_replies_of_the_session_before_are_forgotten(engine: Engine) -> None:
    empty = engine.new_session().save_bytes()
    session = engine.new_session()
    answer(session, [Message("user", "Hello")])
    session.load(empty)
    assert session._turns.items() == []


def test_turns_are_bounded_by_the_capacity_of_who_loads(engine: Engine) -> None:
    live = engine.new_session(context=600)
    messages = [Message("user", "Hello")]
    for _ in range(4):
        done = answer(live, messages)
        messages += [Message("assistant", done.reply.text), Message("user", "On")]
    live.sync([5, 6, 7])
    small = engine.load_session(live.save_bytes(), context=20)
    assert 0 < sum(len(ids) for _, ids in small._turns.items()) <= 40


def test_turns_beyond_the_limit_of_the_format_still_save(engine: Engine) -> None:
    session = engine.new_session()
    session._turns = SampledTurns(limit_tokens=1 << 30)
    for name in range(6):
        session._turns.remember((Piece(f"{name}" * 1_000_000),), [5])
    saved = session.save_bytes()
    assert inspect_snapshot(saved).sections[-1].nbytes <= MAX_TURN_BYTES
    kept = [form[0].text[0] for form, _ in engine.load_session(saved)._turns.items()]
    assert kept == ["2", "3", "4", "5"]


def test_note_of_the_caller_comes_back(engine: Engine) -> None:
    session = engine.new_session()
    session.note = "né".encode()
    saved = session.save_bytes()
    assert engine.load_session(saved).note == "né".encode()
    other = engine.new_session()
    other.note = b"of another"
    other.load(engine.new_session().save_bytes())
    assert other.note == b""


@pytest.mark.parametrize("note", ["text", bytearray(1), bytes((16 << 20) + 1)], ids=type)
def test_note_that_cannot_be_saved_is_refused(engine: Engine, note: Any) -> None:
    session = engine.new_session()
    session.note = note
    with pytest.raises(ConfigError, match="note must be bytes, at most 16,777,216, found"):
        session.save_bytes()

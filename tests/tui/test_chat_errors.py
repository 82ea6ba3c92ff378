"""What goes wrong is said on a card, the prompt comes back, and the app goes on."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from chat_pilot import chatting
from scripted_model import Ends, Prefill, ScriptedModel, Wait
from textual.widgets import Button

from dsv4_chat.chat_model import OutOfMemoryError
from dsv4_chat.store import Store
from dsv4_chat.widgets.welcome import Suggestion, Welcome
from edgedsv4 import (
    BackendUnavailableError,
    CapacityError,
    ConfigError,
    ContextFullError,
    DeviceLostError,
    FormatError,
    NumericError,
)


@pytest.mark.parametrize(
    ("error", "title"),
    [
        (OutOfMemoryError("reply"), "Out of memory"),
        (NumericError("NaN in layer 3"), "The computation went wrong"),
        (ConfigError("no such mode"), "The model cannot be asked this"),
        (FormatError("changed while open", path="x.gguf"), "The reply failed"),
        (DeviceLostError("gone"), "The device stopped answering"),
        (RuntimeError("a bug"), "The reply failed"),
    ],
)
async def test_failed_question_comes_back_to_the_prompt(error: Exception, title: str) -> None:
    async with chatting(ScriptedModel(script=[[error], ["fine"]])) as chat:
        await chat.ask("hello")
        assert chat.prompt.text == "hello"
        assert chat.said == []
        (card,) = chat.cards
        assert card.advice.title == title
        assert str(error) in card.advice.what
        await chat.press("enter")
        await chat.idle()
        assert chat.said == ["hello", "fine"]
        assert chat.cards == []
        assert len(chat.app.keeper.current.siblings(chat.path[0].id)) == 1


async def test_what_came_before_a_failure_stays() -> None:
    script = [["Half a ", NumericError("NaN")], ["whole"]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.ask("hello")
        assert chat.said == ["hello", "Half a "]
        assert chat.path[-1].state == "failed"
        assert "✗ failed" in chat.shown
        assert chat.prompt.text == ""
        chat.screen.query(Button).first().press()
        await chat.until(lambda: chat.said == ["hello", "whole"])


async def test_typing_during_a_failure_is_kept_behind_the_question() -> None:
    go = threading.Event()
    async with chatting(ScriptedModel(script=[[Wait(go), NumericError("NaN")]])) as chat:
        await chat.type("hello")
        await chat.press("enter")
        await chat.until(lambda: chat.screen.dialogue.run is not None)
        await chat.type("next")
        go.set()
        await chat.idle()
        assert chat.prompt.text == "hello\nnext"


async def test_failed_regeneration_shows_the_old_answer_again() -> None:
    async with chatting(ScriptedModel(script=[["first"], [NumericError("NaN")]])) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+r")
        await chat.idle()
        assert chat.said == ["hello", "first"]
        assert chat.cards
        assert chat.prompt.text == ""


async def test_full_context_offers_to_drop_the_oldest_turns() -> None:
    script = [["one"], ["two"], [ContextFullError(1200, 1000)], ["three"]]
    async with chatting(ScriptedModel(script=script)) as chat:
        for question in ("a", "b", "c"):
            await chat.ask(question)
        (card,) = chat.cards
        assert "1,200 tokens are needed" in card.advice.what
        assert chat.prompt.text == "c"
        assert isinstance(chat.screen.focused, Button)
        await chat.press("enter")
        await chat.until(lambda: chat.said == ["a", "one", "b", "two", "c", "three"])
        await chat.idle()
        sent = [message.content for message in chat.model.calls[-1].messages]
        assert sent == ["b", "two", "c"]
        assert chat.prompt.text == ""


async def test_full_context_can_begin_a_new_chat_with_the_question() -> None:
    async with chatting(ScriptedModel(script=[["one"], [ContextFullError(1200, 1000)]])) as chat:
        await chat.ask("a")
        await chat.ask("b")
        await chat.press("right", "enter")
        await chat.idle()
        assert chat.said == []
        assert chat.prompt.text == "b"


async def test_too_long_first_question_has_nothing_to_drop() -> None:
    async with chatting(ScriptedModel(script=[[ContextFullError(1200, 1000)]])) as chat:
        await chat.ask("a")
        (card,) = chat.cards
        assert [choice for choice, _ in card.advice.choices] == ["new"]
        assert "Shorten" in card.advice.to_do


async def test_reply_that_fills_the_context_says_so() -> None:
    script = [["one"], ["word " * 997, Ends("length")]]
    async with chatting(ScriptedModel(script=script)) as chat:
        await chat.ask("a")
        await chat.ask("b")
        (card,) = chat.cards
        assert "no room for more" in card.advice.what
        chat.screen.query(Button).first().press()
        await chat.idle()
        await chat.until(lambda: len(chat.app.keeper.current.dropped()) == 2)
        assert len(chat.model.calls) == 2


async def test_lost_device_is_loaded_again() -> None:
    async with chatting(ScriptedModel(script=[[DeviceLostError("gone")], ["fine"]])) as chat:
        await chat.ask("hello")
        chat.screen.query(Button).first().press()
        await chat.until(lambda: not chat.cards and chat.app.facts is not None)
        await chat.press("enter")
        await chat.until(lambda: chat.said == ["hello", "fine"])


@pytest.mark.parametrize(
    ("error", "advice"),
    [
        (FormatError("no such file", path="x.gguf"), "Check the path"),
        (CapacityError("weights", needed_bytes=9, available_bytes=1), "--ctx"),
        (BackendUnavailableError("no triton"), "--help"),
        (RuntimeError("a bug"), "log_file"),
    ],
)
async def test_model_that_cannot_be_opened(error: Exception, advice: str) -> None:
    async with chatting(ScriptedModel(opening=[error]), is_open=False) as chat:
        await chat.until(lambda: chat.cards)
        (card,) = chat.cards
        assert advice in card.advice.to_do
        await chat.type("hello")
        await chat.press("enter")
        await chat.idle()
        assert chat.prompt.text == "hello"
        chat.model.opening = []
        chat.screen.query(Button).first().press()
        await chat.until(lambda: chat.app.facts is not None and not chat.cards)


async def test_loading_shows_phase_speed_and_can_be_cancelled() -> None:
    never = threading.Event()
    model = ScriptedModel(opening=[Prefill(1 << 30, 4 << 30), Wait(never)])
    async with chatting(model, is_open=False) as chat:
        await chat.until(lambda: "read weights 1.0 GiB of 4.0 GiB, 2.00 GB/s" in chat.shown)
        assert "Esc cancels" in chat.shown
        await chat.press("escape")
        await chat.until(lambda: chat.cards)
        assert chat.cards[0].advice.title == "Loading was stopped"


async def test_question_asked_while_the_model_loads_is_sent_later() -> None:
    go = threading.Event()
    async with chatting(ScriptedModel(opening=[Wait(go)]), is_open=False) as chat:
        await chat.type("hello")
        await chat.press("enter")
        await chat.idle()
        assert "Will be sent" in chat.shown
        await chat.press("escape")
        assert chat.prompt.text == "hello"
        await chat.press("enter")
        await chat.idle()
        go.set()
        await chat.until(lambda: chat.said == ["hello", "You said: hello"])


async def test_unwritable_store_is_told_and_the_chat_goes_on(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(store=store) as chat:
        store.close()
        await chat.ask("hello")
        assert chat.said == ["hello", "You said: hello"]
        assert chat.toasts


async def test_failed_turn_is_kept_on_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(ScriptedModel(script=[["Half", NumericError("NaN")]]), store=store) as chat:
        await chat.ask("hello")
        kept = store.load(chat.app.keeper.current.id)
        assert [node.state for node in kept.path()] == ["complete", "failed"]


async def test_screen_follows_a_resize() -> None:
    async with chatting(size=(120, 40)) as chat:
        await chat.ask("hello")
        for size in ((40, 12), (80, 24), (200, 60)):
            await chat.pilot.resize_terminal(*size)
            await chat.pilot.pause()
            assert "You said: hello" in chat.shown
            assert chat.screen.focused is chat.prompt


async def test_model_that_opens_while_the_welcome_view_comes_or_goes() -> None:
    async with chatting() as chat:
        assert chat.app.facts is not None
        await chat.screen.clear_cards()
        early = Welcome("scripted")
        early.show_facts(chat.app.facts, "before")
        await chat.screen.transcript.mount_extra(early)
        await chat.pilot.pause()
        assert len(early.query(Suggestion)) == 3
        early.show_facts(chat.app.facts, "again")
        await chat.pilot.pause()
        assert "again" in chat.shown
        await early.remove()
        early.show_facts(chat.app.facts, "after")

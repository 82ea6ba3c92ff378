"""Every key of the chat that no other file presses, and every slash command."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from chat_pilot import Chat, chatting
from scripted_model import ScriptedModel, Wait

from dsv4_chat.commands import COMMANDS
from dsv4_chat.screens.confirm import ConfirmScreen
from dsv4_chat.screens.conversations import ConversationsScreen
from dsv4_chat.screens.details import DetailsScreen
from dsv4_chat.screens.help import HelpScreen
from dsv4_chat.screens.sampling import SamplingScreen
from dsv4_chat.store import Store
from dsv4_chat.widgets.welcome import Suggestion, Welcome

CODE = "Two:\n\n```python\nprint(1)\n```\n\n```\nsecond\n```"


def has_left(chat: Chat) -> bool:
    return not chat.app.is_running or chat.app._exit


async def test_new_chat_keeps_the_old_one_on_disk(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(store=store) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+n")
        await chat.idle()
        assert chat.said == []
        assert chat.screen.query(Welcome)
        (kept,) = store.list()
        assert store.load(kept.id).path()[1].content == "You said: hello"


async def test_saved_chat_is_opened_from_its_state(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(store=store) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+n")
        await chat.idle()
        await chat.ask("other")
        await chat.press("ctrl+o")
        await chat.until(lambda: isinstance(chat.app.screen, ConversationsScreen))
        await chat.until(lambda: "hello" in chat.shown)
        await chat.press("down", "enter")
        await chat.idle()
        await chat.until(lambda: chat.said == ["hello", "You said: hello"])
        await chat.until(lambda: len(chat.model.loaded) == 1)
        await chat.command("/open other")
        await chat.until(lambda: chat.said == ["other", "You said: other"])
        await chat.until(lambda: len(chat.model.loaded) == 2)


async def test_state_is_saved_when_the_app_is_left(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(store=store) as chat:
        await chat.ask("hello")
        await chat.press("ctrl+q")
        await chat.until(lambda: has_left(chat))
        assert len(chat.model.saved) == 1
        assert not chat.model.is_open


async def test_ctrl_c_clears_then_leaves_when_pressed_twice() -> None:
    async with chatting() as chat:
        await chat.type("half a quest")
        await chat.press("ctrl+c")
        assert chat.prompt.text == ""
        await chat.press("up")
        assert chat.prompt.text == "half a quest"
        await chat.press("ctrl+c", "ctrl+c")
        assert not has_left(chat)
        await chat.press("ctrl+c")
        await chat.until(lambda: has_left(chat))


async def test_two_slow_ctrl_c_do_not_leave() -> None:
    async with chatting() as chat:
        await chat.press("ctrl+c")
        chat.app.clock.now += 10  # type: ignore[attr-defined]
        await chat.press("ctrl+c")
        await chat.pilot.pause()
        assert not has_left(chat)


async def test_answer_and_code_blocks_are_copied() -> None:
    async with chatting(ScriptedModel(script=[[CODE]])) as chat:
        await chat.press("ctrl+y", "ctrl+b")
        assert chat.toasts[-2:] == ["There is no answer to copy.", "The answer has no code block."]
        await chat.ask("code?")
        await chat.press("ctrl+y")
        assert chat.app.clipboard == CODE
        copied = []
        for _ in range(3):
            await chat.press("ctrl+b")
            copied.append(chat.app.clipboard)
        assert copied == ["print(1)", "second", "print(1)"]
        await chat.command("/code 2")
        assert chat.app.clipboard == "second"
        await chat.command("/code 3")
        assert chat.toasts[-1] == "The answer has 2 code blocks."
        await chat.press("shift+tab", "up", "ctrl+y")
        assert chat.app.clipboard == "code?"


async def test_thinking_mode_goes_round() -> None:
    async with chatting() as chat:
        modes = []
        for _ in range(3):
            await chat.press("ctrl+t")
            await chat.pilot.pause()
            modes.append(chat.app.keeper.current.thinking)
        assert modes == ["max", "none", "high"]
        await chat.command("/think 40")
        await chat.ask("hello")
        assert chat.model.calls[-1].prompt.thinking == 40
        assert "think 40" in chat.shown


@pytest.mark.parametrize(
    ("key", "screen"),
    [
        ("f1", HelpScreen),
        ("ctrl+g", HelpScreen),
        ("f2", DetailsScreen),
        ("ctrl+p", SamplingScreen),
    ],
)
async def test_key_opens_a_screen_and_escape_comes_back(key: str, screen: type) -> None:
    async with chatting() as chat:
        await chat.press(key)
        await chat.until(lambda: isinstance(chat.app.screen, screen))
        await chat.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.press("x")
        assert chat.prompt.text == "x"


async def test_letters_typed_on_a_turn_go_to_the_prompt() -> None:
    async with chatting() as chat:
        await chat.ask("hello")
        await chat.press("shift+tab")
        assert chat.screen.focused is not chat.prompt
        await chat.press("h", "i")
        assert chat.prompt.text == "hi"
        await chat.press("shift+tab", "escape")
        assert chat.screen.focused is chat.prompt


async def test_suggestion_is_asked() -> None:
    async with chatting() as chat:
        chat.screen.query(Suggestion).first().focus()
        await chat.press("down", "up", "enter")
        await chat.until(lambda: len(chat.said) == 2)
        assert chat.said[0] == "What does river mean?"


async def test_help_lists_the_keys_of_the_chat() -> None:
    async with chatting(size=(120, 60)) as chat:
        await chat.command_opens("/help", HelpScreen)
        for text in ("Ctrl+N", "New chat", "Shift+Enter", "Quit; the conversation is saved"):
            assert text in chat.shown


async def test_commands_without_a_screen(tmp_path: Path) -> None:
    store = Store(tmp_path / "data")
    async with chatting(ScriptedModel(script=[["one"], ["two"]]), store=store) as chat:
        await chat.command("/stop")
        assert chat.toasts[-1] == "No reply is being written."
        await chat.ask("hello")
        await chat.command("/rename Foxes")
        assert "Foxes" in chat.shown.splitlines()[0]
        await chat.command("/system Be brief.")
        await chat.command("/set temperature 0.5")
        await chat.command("/regenerate")
        assert chat.said == ["hello", "two"]
        assert chat.model.calls[-1].messages[0].content == "Be brief."
        assert chat.model.calls[-1].sampling.temperature == 0.5
        await chat.command("/copy")
        assert chat.app.clipboard == "two"
        await chat.command("/theme light")
        assert chat.app.theme == "light"
        await chat.command("/edit")
        assert chat.prompt.text == "hello"
        await chat.press("escape")
        await chat.command("/fork")
        assert chat.app.keeper.current.title == "Foxes (fork)"
        await chat.command("/new")
        assert chat.said == []
        saved = {summary.title for summary in store.list()}
        assert saved == {"Foxes", "Foxes (fork)"}


async def test_export_writes_both_formats(tmp_path: Path) -> None:
    async with chatting(folder=tmp_path) as chat:
        await chat.ask("hello")
        await chat.command("/export md talk.md")
        await chat.command("/export json talk.json")
        assert "You said: hello" in (tmp_path / "talk.md").read_text(encoding="utf-8")
        document = json.loads((tmp_path / "talk.json").read_text(encoding="utf-8"))
        assert [message["role"] for message in document["messages"]] == ["user", "assistant"]
        await chat.command("/export md /nowhere/talk.md")
        assert "/nowhere" in chat.toasts[-1]


async def test_file_is_attached_by_key_and_command(tmp_path: Path) -> None:
    (tmp_path / "notes.py").write_text("x = 1\n", encoding="utf-8")
    async with chatting(folder=tmp_path) as chat:
        await chat.press("ctrl+l")
        assert chat.prompt.text == "/attach "
        await chat.command("/attach notes.py")
        assert chat.prompt.text == "[file notes.py, 1 line #1] "
        await chat.type("What is this?")
        await chat.press("enter")
        await chat.idle()
        assert "```py\nx = 1\n```" in chat.said[0]
        await chat.command("/attach missing.txt")
        assert "no such file" in chat.toasts[-1]
        assert chat.prompt.text == ""


async def test_delete_asks_first(tmp_path: Path) -> None:
    store = Store(tmp_path)
    async with chatting(store=store) as chat:
        await chat.ask("hello")
        await chat.command_opens("/delete", ConfirmScreen)
        await chat.press("k")
        await chat.idle()
        assert len(store.list()) == 1
        await chat.command_opens("/delete", ConfirmScreen)
        await chat.press("d")
        await chat.until(lambda: not store.list())
        await chat.idle()
        assert chat.said == []


async def test_details_and_quit_are_commands() -> None:
    async with chatting() as chat:
        await chat.command_opens("/details", DetailsScreen)
        await chat.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.type("/quit")
        await chat.press("enter")
        await chat.until(lambda: has_left(chat))


async def test_wrong_command_says_what_is_expected_and_stays_in_the_prompt() -> None:
    async with chatting() as chat:
        await chat.type("/thimk high")
        await chat.press("enter")
        assert chat.prompt.text == "/thimk high"
        assert "did you mean /think?" in chat.toasts[-1]
        assert chat.model.calls == []


async def test_stop_is_a_command_as_well() -> None:
    never = threading.Event()
    async with chatting(ScriptedModel(script=[["Once ", Wait(never)]])) as chat:
        await chat.type("a story")
        await chat.press("enter")
        await chat.until(lambda: len(chat.path) == 2 and chat.path[-1].content)
        await chat.type("/stop")
        await chat.press("enter")
        await chat.idle()
        assert chat.path[-1].state == "stopped"


def test_every_command_has_a_test() -> None:
    text = "".join(path.read_text(encoding="utf-8") for path in Path(__file__).parent.glob("*.py"))
    assert [spec.name for spec in COMMANDS if f'"/{spec.name}' not in text] == []

"""The prompt: lines, history, pastes, the external editor, and completion of commands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from chat_pilot import Chat, chatting
from scripted_model import ScriptedModel
from textual import events

from dsv4_chat.app import ChatApp
from dsv4_chat.settings import Settings
from dsv4_chat.store import Store
from dsv4_chat.widgets.prompt_input import CompletionList

LONG = "\n".join(f"line {number}" for number in range(120))


async def paste(chat: Chat, text: str) -> None:
    chat.prompt.post_message(events.Paste(text))
    await chat.pilot.pause()


def offered(chat: Chat) -> list[str]:
    listed = chat.screen.query_one(CompletionList)
    if not listed.display:
        return []
    return [str(listed.get_option_at_index(i).prompt) for i in range(listed.option_count)]


@pytest.mark.parametrize("key", ["shift+enter", "ctrl+j", "alt+enter"])
async def test_newline_keys_do_not_send(key: str) -> None:
    async with chatting() as chat:
        await chat.press("a", key, "b")
        assert chat.prompt.text == "a\nb"
        await chat.press("enter")
        await chat.idle()
        assert chat.said[0] == "a\nb"


async def test_enter_sends_all_letters_of_a_burst() -> None:
    async with chatting() as chat:
        for character in "hello":
            chat.app.post_message(events.Key(character, character))
        chat.app.post_message(events.Key("enter", "\r"))
        await chat.until(lambda: chat.model.calls)
        await chat.idle()
        assert chat.said[0] == "hello"


async def test_empty_prompt_is_not_sent() -> None:
    async with chatting() as chat:
        await chat.press("enter", "space", "enter")
        await chat.idle()
        assert chat.model.calls == []


async def test_history_goes_up_at_the_first_and_down_at_the_last_line() -> None:
    async with chatting() as chat:
        await chat.ask("first")
        await chat.ask("second\nof two lines")
        await chat.type("draft")
        seen = []
        for key in ("up", "up", "up", "up", "down", "down", "down", "down"):
            await chat.press(key)
            seen.append(chat.prompt.text)
        # The second Up moves inside the two lines.
        both = "second\nof two lines"
        assert seen == [both, both, "first", "first", both, "draft", "draft", "draft"]


async def test_history_of_earlier_runs_comes_from_the_store(tmp_path: Path) -> None:
    async with chatting(store=Store(tmp_path)) as chat:
        await chat.ask("from before")
    async with chatting(store=Store(tmp_path)) as chat:
        await chat.until(lambda: chat.screen.panels.titles)
        await chat.press("up")
        assert chat.prompt.text == "from before"


async def test_long_paste_is_a_placeholder_and_sent_in_full() -> None:
    async with chatting(ScriptedModel(script=[["Fine."]])) as chat:
        await chat.type("Sum up: ")
        await paste(chat, LONG)
        assert chat.prompt.text == "Sum up: [pasted 120 lines #1]"
        await chat.press("enter")
        await chat.idle()
        assert chat.said[0] == f"Sum up: {LONG}"
        assert "▸ 108 more lines" in chat.shown
        await chat.press("shift+tab", "up", "enter")
        await chat.until(lambda: chat.screen.transcript.max_scroll_y > 100)
        await chat.press("enter")
        await chat.until(lambda: chat.screen.transcript.max_scroll_y < 30)


async def test_long_line_is_folded_as_well() -> None:
    async with chatting(ScriptedModel(script=[["Fine."]])) as chat:
        await paste(chat, "x" * 100_000)
        await chat.press("enter")
        await chat.idle()
        assert "▸ 98,500 more characters" in chat.shown


async def test_short_paste_is_text_and_line_ends_are_made_one_kind() -> None:
    async with chatting() as chat:
        await paste(chat, "a\r\nb\rc")
        assert chat.prompt.text == "a\nb\nc"


async def test_settings_say_what_a_long_paste_is() -> None:
    async with chatting(settings=Settings(paste_lines=2, paste_characters=10)) as chat:
        await paste(chat, "12345678901")
        assert chat.prompt.text == "[pasted 11 characters #1]"


async def test_commands_are_completed() -> None:
    async with chatting() as chat:
        await chat.press("/", "t", "h")
        assert [line.split()[0] for line in offered(chat)] == ["/think", "/theme"]
        await chat.press("down", "tab")
        assert chat.prompt.text == "/theme "
        assert [line.split()[0] for line in offered(chat)] == ["dark", "light", "contrast"]
        await chat.press("escape")
        assert offered(chat) == []
        assert chat.prompt.text == "/theme "
        await chat.press("l")
        await chat.press("enter")
        await chat.idle()
        assert chat.app.theme == "light"
        assert chat.prompt.text == ""


async def test_enter_on_a_half_typed_command_completes_it_first() -> None:
    async with chatting() as chat:
        await chat.press(*"/thi", "enter")
        assert chat.prompt.text == "/think "


async def test_files_are_completed(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("x", encoding="utf-8")
    async with chatting(folder=tmp_path) as chat:
        await chat.press("ctrl+l", "n", "tab")
        assert chat.prompt.text == "/attach notes.txt"


async def test_usage_of_the_command_is_shown_while_its_arguments_are_typed() -> None:
    async with chatting() as chat:
        await chat.press(*"/rename x")
        assert "/rename TITLE" in chat.shown
        await chat.press("ctrl+c")
        assert "/rename TITLE" not in chat.shown


async def test_external_editor_changes_the_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def suspend(_app: ChatApp) -> Iterator[None]:
        yield

    monkeypatch.setattr(ChatApp, "suspend", suspend)
    script = tmp_path / "editor.sh"
    script.write_text('#!/bin/sh\nprintf "%s and more\\n" "$(cat "$2")" > "$2"\n', encoding="utf-8")
    script.chmod(0o755)
    async with chatting(editor=f"{script} --flag") as chat:
        await chat.type("text")
        await chat.press("ctrl+x")
        assert chat.prompt.text == "text and more"
        chat.app.editor = "false"
        await chat.press("ctrl+x")
        assert chat.prompt.text == "text and more"
        assert "ended with status 1" in chat.toasts[-1]
        chat.app.editor = "/no/such/editor"
        await chat.press("ctrl+x")
        assert "$VISUAL" in chat.toasts[-1]


async def test_editor_without_a_terminal_says_so() -> None:
    async with chatting() as chat:
        await chat.press("ctrl+x")
        assert "needs a terminal" in chat.toasts[-1]

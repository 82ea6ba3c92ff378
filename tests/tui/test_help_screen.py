"""The help says what the bindings and the registry say."""

from __future__ import annotations

import pytest
from dialog_host import result_after, shown
from stored_screens import CompareScreen
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.widgets import Static

from dsv4_chat.commands import COMMANDS
from dsv4_chat.screens.help import HelpLine, HelpScreen, KeySection, help_text, key_lines, key_text

KEYS = KeySection(
    title="Chat",
    bindings=[
        Binding("enter", "send", "Send the prompt"),
        Binding("escape", "stop", "Stop the reply"),
        Binding("ctrl+c", "stop", "Stop the reply"),
        Binding("shift+enter,ctrl+j", "newline", "Begin a new line"),
        ("ctrl+r", "regenerate", "Ask for another answer"),
        Binding("ctrl+x", "hidden"),
    ],
)


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("ctrl+r", "Ctrl+R"),
        ("shift+enter", "Shift+Enter"),
        ("f1", "F1"),
        ("escape", "Esc"),
        ("question_mark", "?"),
        ("pageup", "PgUp"),
    ],
)
def test_key_is_written_as_on_a_keyboard(key: str, text: str) -> None:
    assert key_text(key) == text


def test_keys_that_do_the_same_share_a_line() -> None:
    assert key_lines(KEYS.bindings) == [
        HelpLine(keys="Enter", help="Send the prompt"),
        HelpLine(keys="Esc, Ctrl+C", help="Stop the reply"),
        HelpLine(keys="Shift+Enter, Ctrl+J", help="Begin a new line"),
        HelpLine(keys="Ctrl+R", help="Ask for another answer"),
    ]


async def test_help_lists_every_key_and_command() -> None:
    async with shown(HelpScreen([KEYS]), (120, 40)) as pilot:
        text = str(pilot.app.screen.query_one("#text", Static).content)
    told = " ".join(text.split())
    expected = [f"{line.keys} {line.help}" for line in key_lines(KEYS.bindings)]
    expected += [f"{spec.usage} {spec.help}" for spec in COMMANDS]
    assert [line for line in expected if line not in told] == []


def test_long_keys_and_explanations_keep_their_columns() -> None:
    section = KeySection(
        title="Long",
        bindings=[
            Binding("ctrl+left,ctrl+right,ctrl+up,ctrl+down", "move", "Move the focused turn"),
            Binding("x", "explain", "word " * 12),
        ],
    )
    lines = help_text([section], 60).plain.splitlines()
    assert lines[1:5] == [
        "Ctrl+Left, Ctrl+Right, Ctrl+Up, Ctrl+Down ",
        f"{'':25}Move the focused turn",
        f"{'X':25}{'word ' * 6}word",
        f"{'':25}{'word ' * 4}word",
    ]


async def test_help_closes() -> None:
    keys = ["escape", "q", "f1", "ctrl+g", "ctrl+c"]
    async with shown(HelpScreen([KEYS])) as pilot:
        assert [await result_after(pilot, HelpScreen(), [key]) for key in keys] == [None] * 5


async def test_help_scrolls() -> None:
    async with shown(HelpScreen([KEYS])) as pilot:
        places = []
        for key in ("down", "pagedown", "end", "home"):
            await pilot.press(key)
            await pilot.pause()
            places.append(pilot.app.screen.query_one(VerticalScroll).scroll_y)
        assert 0 < places[0] < places[1] <= places[2]
        assert places[3] == 0


@pytest.mark.parametrize(
    ("size", "theme"), [((80, 24), "dark"), ((120, 40), "light"), ((200, 60), "contrast")]
)
async def test_help_looks_as_stored(
    size: tuple[int, int], theme: str, compare_screen: CompareScreen
) -> None:
    async with shown(HelpScreen([KEYS]), size, theme) as pilot:
        await compare_screen(pilot, f"help-{size[0]}-{theme}")

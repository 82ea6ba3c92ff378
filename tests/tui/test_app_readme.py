"""The tables of apps/tui/README.md are those of the program.

`UPDATE_README=1 pytest tests/tui/test_app_readme.py` writes them anew.
"""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Iterable
from pathlib import Path

import tomlkit
from textual.dom import DOMNode

import dsv4_chat
from dsv4_chat.app import ChatApp
from dsv4_chat.launch import _parser
from dsv4_chat.screens.ask_text import AskTextScreen
from dsv4_chat.screens.chat import ChatScreen
from dsv4_chat.screens.choice_line import ChoiceLine
from dsv4_chat.screens.confirm import ConfirmScreen
from dsv4_chat.screens.conversations import ConversationsScreen
from dsv4_chat.screens.details import DetailsScreen
from dsv4_chat.screens.help import HelpScreen, command_lines, key_lines
from dsv4_chat.screens.sampling import SamplingScreen
from dsv4_chat.settings_file import DEFAULTS, key_documentation
from dsv4_chat.themes import THEME_NAMES
from dsv4_chat.widgets.card import Card
from dsv4_chat.widgets.prompt_input import PromptInput
from dsv4_chat.widgets.turn import Turn
from dsv4_chat.widgets.welcome import Suggestion

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "apps" / "tui" / "README.md"
PLACES: dict[str, tuple[type[DOMNode], ...]] = {
    "In the chat": (ChatScreen, ChatApp),
    "In the prompt": (PromptInput,),
    "On a turn (Shift+Tab goes there)": (Turn,),
    "On a thing to try": (Suggestion,),
    "On a card that says what went wrong": (Card,),
    "In the list of conversations": (ConversationsScreen,),
    "In the sampling panel": (SamplingScreen, ChoiceLine),
    "In the details": (DetailsScreen,),
    "In the help": (HelpScreen,),
    "In a question": (ConfirmScreen, AskTextScreen),
}
MAX_PICTURE_BYTES = 150_000


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    return "\n".join(
        f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in line)} |" for line in lines
    )


def keys_part() -> str:
    parts = []
    for place, owners in PLACES.items():
        bindings = [binding for owner in owners for binding in owner.__dict__["BINDINGS"]]
        rows = ((line.keys, line.help) for line in key_lines(bindings))
        parts.append(table((place, ""), rows))
    return "\n\n".join(parts)


def settings_part() -> str:
    rows = (
        (f"`{key}`", f"`{tomlkit.item(value).as_string()}`", key_documentation(key))
        for key, value in DEFAULTS.items()
    )
    return table(("Key", "Built-in", ""), rows)


def flags_part() -> str:
    """The options, but not as argparse prints them, which changes with Python."""
    rows = (
        (
            f"`{' '.join((*action.option_strings[-1:], action.metavar or ''))}`".replace(" `", "`"),
            (action.help or "").replace("%(prog)s", "dsv4-chat"),
        )
        for action in _parser()._actions
    )
    return table(("Argument", ""), rows)


def parts() -> dict[str, str]:
    commands = ((f"`{line.keys}`", line.help) for line in command_lines())
    return {
        "keys": keys_part(),
        "commands": table(("Command", ""), commands),
        "settings": settings_part(),
        "flags": flags_part(),
    }


def with_parts(text: str) -> str:
    for name, part in parts().items():
        begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n{part}\n{end}{rest.split(end)[1]}"
    return text


def test_tables_are_those_of_the_program() -> None:
    text = README.read_text(encoding="utf-8")
    expected = with_parts(text)
    if os.environ.get("UPDATE_README") == "1":
        README.write_text(expected, encoding="utf-8")
        return
    assert text == expected


def test_every_place_that_has_keys_is_listed() -> None:
    """A screen or widget that binds keys, and is not in PLACES, is not in the README."""
    folder = Path(dsv4_chat.__file__).parent
    names = [
        ".".join(("dsv4_chat", *path.relative_to(folder).with_suffix("").parts))
        for path in folder.rglob("*.py")
        if path.stem not in ("__init__", "__main__")
    ]
    found = {
        item
        for name in names
        for item in vars(importlib.import_module(name)).values()
        if isinstance(item, type)
        and issubclass(item, DOMNode)
        and item.__module__ == name
        and "BINDINGS" in item.__dict__
    }
    assert found == {owner for owners in PLACES.values() for owner in owners}


def test_pictures_are_there_and_small() -> None:
    pictures = re.findall(r"!\[[^]]+\]\(([^)]+)\)", README.read_text(encoding="utf-8"))
    assert len(pictures) == 3
    for picture in pictures:
        path = (README.parent / picture).resolve()
        assert path.read_text(encoding="utf-8").startswith("<svg")
        assert path.stat().st_size < MAX_PICTURE_BYTES


def test_every_theme_is_named() -> None:
    text = README.read_text(encoding="utf-8")
    assert [name for name in THEME_NAMES if f"`{name}`" not in text] == []

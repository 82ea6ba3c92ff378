"""Keys and commands, as they are: read from the bindings and from the registry of commands.

The idea: nothing is written here twice, so the help cannot be wrong. A key without a description is
not for the user and is left out.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dsv4_chat.commands import COMMANDS

_NAMES: Final = {
    "escape": "Esc",
    "question_mark": "?",
    "slash": "/",
    "pageup": "PgUp",
    "pagedown": "PgDn",
    "delete": "Del",
}

_KEYS: Final = 25
"""Columns of the keys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySection:
    """Bindings under a heading, such as those of one screen."""

    title: str
    bindings: Sequence[BindingType]


@dataclass(frozen=True, slots=True, kw_only=True)
class HelpLine:
    """What to press or type, and what it does."""

    keys: str
    """`Ctrl+R`, several separated by commas; or the usage of a command."""
    help: str


def key_text(key: str) -> str:
    """A key as it is printed on a keyboard: `ctrl+r` is `Ctrl+R`."""
    return "+".join(_NAMES.get(part, part.capitalize()) for part in key.split("+"))


def key_lines(bindings: Iterable[BindingType]) -> list[HelpLine]:
    """The keys that have a description; those that do the same share a line."""
    keys: dict[str, list[str]] = {}
    for binding in Binding.make_bindings(bindings):
        if binding.description and not binding.system:
            shown = binding.key_display or key_text(binding.key)
            keys.setdefault(binding.description, []).append(shown)
    return [
        HelpLine(keys=", ".join(dict.fromkeys(names)), help=text) for text, names in keys.items()
    ]


def command_lines() -> list[HelpLine]:
    """Every slash command."""
    return [HelpLine(keys=spec.usage, help=spec.help) for spec in COMMANDS]


class HelpScreen(ModalScreen[None]):
    """Keys by screen, then the commands.

    Args:
        sections: the bindings of the app, in the order they are shown.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f1,ctrl+g,ctrl+c", "close", "Close the help", priority=True),
    ]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; }
    HelpScreen > Vertical {
        width: 90; max-width: 96%; height: auto; max-height: 94%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    HelpScreen VerticalScroll {
        height: auto; max-height: 100%; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
    }
    """

    def __init__(self, sections: Sequence[KeySection] = ()) -> None:
        super().__init__()
        self._sections = tuple(sections)

    def compose(self) -> ComposeResult:
        """Draw a box that scrolls."""
        with Vertical() as box:
            box.border_title = "Help"
            box.border_subtitle = "Up Down PgUp PgDn scroll, Esc closes"
            with VerticalScroll():
                yield Static(id="text")

    def on_resize(self, _event: events.Resize) -> None:
        """Fit the lines to the width."""
        self.call_after_refresh(self._draw)

    def action_close(self) -> None:
        """Go back to where the help was asked for."""
        self.dismiss(None)

    def _draw(self) -> None:
        width = self.query_one(VerticalScroll).scrollable_content_region.width
        self.query_one("#text", Static).update(help_text(self._sections, width))


def help_text(sections: Iterable[KeySection], width: int) -> Content:
    """Everything as one text: a widget for each line would take a quarter of a second to show.

    Args:
        sections: bindings under headings.
        width: columns; longer explanations go on below themselves.
    """
    tables = [(section.title, key_lines(section.bindings)) for section in sections]
    pieces: list[tuple[str, str]] = []
    for title, lines in (*tables, ("Commands, typed as a prompt", command_lines())):
        pieces.append((f"{title}\n", "bold $accent"))
        for line in lines:
            text = textwrap.wrap(line.help, max(width - _KEYS, 20))
            begin = f"{line.keys:<{_KEYS - 1}} "
            pieces.append((begin, "bold"))
            pieces.append(
                (f"\n{'':{_KEYS}}".join(text if len(begin) == _KEYS else ["", *text]), "")
            )
            pieces.append(("\n", ""))
        pieces.append(("\n", ""))
    return Content.assemble(*pieces).rstrip()

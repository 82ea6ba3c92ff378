"""Pictures of screens, stored as SVG and compared character by character.

`UPDATE_SCREENS=1 pytest tests/tui` stores what is drawn instead. What a failed comparison drew lies
in build/screens/, beside the message with the lines of text that differ.

Own code instead of pytest-textual-snapshot: that one starts and ends the app itself, so that one
test can neither compare at several moments of a scenario nor set up a scripted model around it, and
its report stores the environment of whoever ran the tests.
"""

from __future__ import annotations

import difflib
import html
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeAlias

from textual.app import App
from textual.pilot import Pilot
from textual.widgets import Input, TextArea

CompareScreen: TypeAlias = Callable[[Pilot[None], str], Awaitable[None]]
"""Type of the fixture `compare_screen`."""
FOLDER = Path(__file__).parent / "screens"
DRAWN = Path(__file__).resolve().parents[2] / "build" / "screens"


async def compare(pilot: Pilot[None], name: str) -> None:
    """Compare what is on the screen now with screens/NAME.svg."""
    await pilot.pause()
    await pilot.wait_for_scheduled_animations()
    freeze_cursors(pilot.app)
    await pilot.pause()
    drawn = pilot.app.export_screenshot(simplify=True)
    stored = FOLDER / f"{name}.svg"
    if os.environ.get("UPDATE_SCREENS") == "1":
        FOLDER.mkdir(exist_ok=True)
        stored.write_text(drawn, encoding="utf-8")
        return
    expected = stored.read_text(encoding="utf-8") if stored.exists() else ""
    if drawn != expected:
        DRAWN.mkdir(parents=True, exist_ok=True)
        picture = DRAWN / f"{name}.svg"
        picture.write_text(drawn, encoding="utf-8")
        raise AssertionError(
            f"{stored.name} is not what is drawn (see {picture}; UPDATE_SCREENS=1 stores it):\n"
            + (difference(expected, drawn) or "the text is the same, the style or size is not")
        )


def freeze_cursors(app: App[None]) -> None:
    """Stop the blinking, which would draw a picture that depends on the moment."""
    for widget in app.screen.query("Input, TextArea"):
        if isinstance(widget, Input | TextArea):
            widget.cursor_blink = False


def text_of(svg: str) -> list[str]:
    """The lines of text of a picture, without their style."""
    lines: dict[float, list[str]] = {}
    for y, text in re.findall(r'<text class="[^"]*" x="[^"]*" y="([^"]*)"[^>]*>([^<]*)', svg):
        lines.setdefault(float(y), []).append(html.unescape(text).replace("\xa0", " "))
    return ["".join(pieces).rstrip() for _, pieces in sorted(lines.items())]


def difference(expected: str, drawn: str) -> str:
    """The lines of text that differ; empty when only styles do."""
    return "\n".join(
        difflib.unified_diff(text_of(expected), text_of(drawn), "stored", "drawn", lineterm="", n=1)
    )

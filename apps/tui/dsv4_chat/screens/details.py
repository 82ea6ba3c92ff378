"""What runs and where its memory goes: engine, memory, experts, kernels and notes.

The idea: the text is made by one pure function from what the model says of itself. The model may be
busy with a reply; until it answers, the screen shows what is known without asking.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, ClassVar, Final, TypeAlias

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from dsv4_chat.plain_text import drawable
from dsv4_chat.units import bytes_text
from edgedsv4 import Dsv4Error

if TYPE_CHECKING:
    from textual import events

    from dsv4_chat.chat_model import ModelStatus

Details: TypeAlias = Mapping[str, object]

_LABELS: Final = {
    "mapped_weights": "weights, mapped",
    "mapped_experts": "experts, mapped",
    "resident_weights": "weights, in memory",
    "kv_allocated": "KV cache",
    "kv_used": "KV cache, filled",
    "checkpoints": "turn checkpoints",
    "workspace": "working memory",
    "budget": "budget",
    "identity_sha256": "identity",
}
_COUNTS: Final = ("sessions",)
"""Entries of the memory report that are no bytes."""
_BAR: Final = 20
_LABEL: Final = 23
"""Columns before a value."""


class DetailsScreen(ModalScreen[None]):
    """Show what the model says of itself, again every few seconds.

    Args:
        read: asks the model; waits while it is busy.
        status: what is known at once.
        seconds: between two askings.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,f2,ctrl+c", "close", "Close the details", priority=True),
        Binding("r", "refresh", "Ask the model again"),
        Binding("c", "copy", "Copy everything as JSON, for a report"),
    ]
    DEFAULT_CSS = """
    DetailsScreen { align: center middle; }
    DetailsScreen > Vertical {
        width: 110; max-width: 96%; height: auto; max-height: 94%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    DetailsScreen VerticalScroll {
        height: auto; max-height: 100%; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
    }
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Details]],
        status: Callable[[], ModelStatus],
        *,
        seconds: float = 2.0,
    ) -> None:
        super().__init__()
        self._read, self._status, self._seconds = read, status, seconds
        self._details: Details = {}
        self._is_reading = False
        self._failure = ""

    def compose(self) -> ComposeResult:
        """Draw a box that scrolls."""
        with Vertical() as box:
            box.border_title = "Details"
            box.border_subtitle = "R refresh, C copy, Esc close"
            with VerticalScroll():
                yield Static(id="text")

    def on_mount(self) -> None:
        """Ask now and then again."""
        self.query_one(VerticalScroll).focus()
        self.action_refresh()
        self.set_interval(self._seconds, self.action_refresh)

    def on_resize(self, _event: events.Resize) -> None:
        """Fit the lines to the new width."""
        self.call_after_refresh(self._draw)

    def action_refresh(self) -> None:
        """Draw what is known, and ask unless an answer is on its way."""
        self._draw()
        if not self._is_reading:
            self._is_reading = True
            self._ask()

    def action_copy(self) -> None:
        """Copy what the model said, as JSON."""
        self.app.copy_to_clipboard(json.dumps(self._details, indent=1, default=str))
        self.notify("The details are copied")

    def action_close(self) -> None:
        """Go back to the chat."""
        self.dismiss(None)

    @work
    async def _ask(self) -> None:
        try:
            self._details, self._failure = await self._read(), ""
        except Dsv4Error as error:
            self._failure = str(error)
        finally:
            self._is_reading = False
        self._draw()

    def _width(self) -> int:
        return self.query_one(VerticalScroll).scrollable_content_region.width

    def _draw(self) -> None:
        parts = details_text(self._details, self._status(), self._width())
        if self._failure:
            parts = Content.assemble((f"{drawable(self._failure)}\n\n", "$text-error"), parts)
        elif not self._details:
            waits = ("The model answers as soon as its reply is written.\n\n", "$text-muted")
            parts = Content.assemble(waits, parts)
        self.query_one("#text", Static).update(parts)


def details_text(details: Details, status: ModelStatus, width: int) -> Content:
    """Everything as lines under headings; parts that are not known are left out.

    Args:
        details: as `ChatModel.details` returns them, or empty.
        status: of the same model.
        width: columns; longer values go on below themselves.
    """
    engine = _section(details, "engine")
    kernels, notes = _section(engine, "kernels"), engine.get("notes")
    sections = {
        "Context": _context_lines(status),
        "Memory": _memory_lines(_section(details, "memory")),
        "Experts by tier": _tier_lines(status),
        "Notes": _note_lines(notes),
        "Kernels": _kernel_lines(kernels),
        "Session": _plain_lines(_section(details, "session"), leave_out=()),
        "Model": _plain_lines(engine, leave_out=("kernels", "notes")),
    }
    pieces: list[str | Content | tuple[str, str]] = []
    for heading, lines in sections.items():
        text = "\n".join(_wrapped(label, value, width) for label, value in lines)
        if text:
            pieces += [(f"{heading}\n", "bold $accent"), text, "\n\n"]
    return Content.assemble(*pieces[:-1])


def _section(details: Details, name: str) -> Details:
    part = details.get(name)
    return part if isinstance(part, Mapping) else {}


def _wrapped(label: str, value: str, width: int) -> str:
    """A label and its value; a value without one takes the whole width."""
    begin = f"  {label:<{_LABEL - 3}} " if label else "  - "
    room = max(width - len(begin), 20)
    return begin + f"\n{'':{len(begin)}}".join(textwrap.wrap(drawable(value), room) or [""])


def _label(key: str) -> str:
    return _LABELS.get(key, key.replace("_", " "))


def _plain_lines(part: Details, leave_out: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    for key, value in part.items():
        if key not in leave_out:
            is_count = isinstance(value, int) and not isinstance(value, bool)
            yield (_label(key), f"{value:,}" if is_count else str(value))


def _context_lines(status: ModelStatus) -> Iterator[tuple[str, str]]:
    if status.capacity:
        share = status.length / status.capacity
        text = f"{_bar(share)} {status.length:,} of {status.capacity:,} tokens"
        yield ("filled", text)
        yield ("KV cache", bytes_text(status.kv_bytes))


def _memory_lines(memory: Details) -> Iterator[tuple[str, str]]:
    """Bytes with their share of the largest part; the budget is the frame, no part."""
    sizes = {key: value for key, value in memory.items() if isinstance(value, int | float)}
    parts = {key: size for key, size in sizes.items() if key not in (*_COUNTS, "budget")}
    largest = max(parts.values(), default=0)
    for key, size in sizes.items():
        if key in _COUNTS:
            yield (_label(key), f"{size:,}")
        elif key == "budget":
            yield (_label(key), f"{'':{_BAR}} {bytes_text(size)}")
        else:
            yield (_label(key), f"{_bar(size / largest if largest else 0)} {bytes_text(size)}")


def _tier_lines(status: ModelStatus) -> Iterator[tuple[str, str]]:
    for name, rate in status.tiers:
        yield (name, f"{_bar(rate)} {rate:.1%} of experts needed")


def _kernel_lines(kernels: Details) -> Iterator[tuple[str, str]]:
    by_backend: dict[str, list[str]] = {}
    for operation, backend in kernels.items():
        by_backend.setdefault(str(backend), []).append(operation)
    for backend, operations in by_backend.items():
        yield (backend, ", ".join(operations))


def _note_lines(notes: object) -> Iterator[tuple[str, str]]:
    if isinstance(notes, list | tuple):
        for note in notes:
            yield ("", str(note))


def _bar(share: float) -> str:
    """A bar of `_BAR` columns in plain characters, which every terminal and locale has."""
    filled = round(min(max(share, 0.0), 1.0) * _BAR)
    return "#" * filled + "." * (_BAR - filled)

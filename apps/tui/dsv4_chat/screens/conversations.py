"""The saved conversations: search as you type, open, rename, delete, export.

The idea: the search line keeps the focus, so letters always search; everything else is a key that
writes no letter. Disk is read in a thread, and a newer search replaces an older one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, cast

from rich.cells import cell_len, set_cell_size
from textual import events, work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from dsv4_chat.plain_text import drawable
from dsv4_chat.screens.ask_text import AskTextScreen
from dsv4_chat.screens.confirm import Answer, ConfirmScreen
from edgedsv4 import Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.commands import ExportFormat
    from dsv4_chat.store import ConversationSummary, Store

_EXPORTS = (
    Answer(id="md", key="m", label="Markdown", help="to read"),
    Answer(id="json", key="j", label="JSON", help="everything, other answers included"),
)
_DELETE = (
    Answer(id="delete", key="d", label="Delete", help="it cannot be brought back"),
    Answer(id="keep", key="k", label="Keep"),
)


class ConversationsScreen(ModalScreen[str | None]):
    """List the conversations; the result is the id of the one to open, or None.

    Renaming and deleting are done here, in the store, and told by messages; exporting is asked for.

    Args:
        store: where they are kept.
        current: id of the conversation that is shown; it is marked.
        busy: id of the one that a reply is being written in; it is not deleted.
        query: what is searched for at first.
        clock: seconds since 1970; what the dates are relative to.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "open", "Open the marked conversation", priority=True),
        Binding("down", "mark(1)", "Mark the next one", priority=True),
        Binding("up", "mark(-1)", "Mark the one before", priority=True),
        Binding("pagedown", "mark(10)", "Ten further", priority=True),
        Binding("pageup", "mark(-10)", "Ten back", priority=True),
        Binding("ctrl+r,f2", "rename", "Rename it", priority=True),
        Binding("ctrl+d,f8", "delete", "Delete it, after a question", priority=True),
        Binding("ctrl+e", "export", "Export it as Markdown or JSON", priority=True),
        Binding("escape", "back", "Empty the search, or close", priority=True),
        Binding("ctrl+o,ctrl+c", "close", "Close the list", priority=True),
    ]
    DEFAULT_CSS = """
    ConversationsScreen { align: center middle; }
    ConversationsScreen > Vertical {
        width: 100; max-width: 96%; height: 90%;
        border: round $primary; background: $surface; padding: 0 1;
    }
    ConversationsScreen Input { margin: 1 0; }
    ConversationsScreen OptionList {
        height: 1fr; background: $surface; scrollbar-size-vertical: 1; scrollbar-gutter: stable;
    }
    ConversationsScreen OptionList > .option-list--option-highlighted {
        color: $block-cursor-foreground; background: $block-cursor-background;
        text-style: $block-cursor-text-style;
    }
    ConversationsScreen #says { color: $text-muted; height: auto; }
    ConversationsScreen #says.failed { color: $error; }
    """

    class Renamed(Message):
        """A conversation has another title."""

        def __init__(self, conversation_id: str, title: str) -> None:
            self.conversation_id, self.title = conversation_id, title
            super().__init__()

    class Deleted(Message):
        """A conversation is gone from the store."""

        def __init__(self, conversation_id: str) -> None:
            self.conversation_id = conversation_id
            super().__init__()

    class ExportWanted(Message):
        """A conversation is to be written to a file."""

        def __init__(self, conversation_id: str, export_format: ExportFormat) -> None:
            self.conversation_id, self.format = conversation_id, export_format
            super().__init__()

    def __init__(
        self,
        store: Store,
        *,
        current: str | None = None,
        busy: str | None = None,
        query: str = "",
        clock: Callable[[], float] = time.time,
    ) -> None:
        super().__init__()
        self._store, self._current, self._busy = store, current, busy
        self._query, self._clock = query, clock
        self._found: Sequence[ConversationSummary] = ()

    def compose(self) -> ComposeResult:
        """Draw the search line over the list."""
        with Vertical() as box:
            box.border_title = "Conversations"
            box.border_subtitle = (
                "Enter open, Ctrl+R rename, Ctrl+D delete, Ctrl+E export, Esc close"
            )
            yield Input(
                self._query,
                placeholder="Search titles and texts",
                compact=True,
                select_on_focus=False,
                id="search",
            )
            listed = OptionList(compact=True)
            listed.can_focus = False  # letters always search
            yield listed
            yield Static(id="says")

    def on_mount(self) -> None:
        """Fill the list."""
        self._search(mark=self._current)

    def on_input_changed(self, event: Input.Changed) -> None:
        """Search for what is typed."""
        event.stop()
        if event.value != self._query:
            self._query = event.value
            self._search()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Open what was clicked."""
        event.stop()
        self.dismiss(event.option_id)

    def on_resize(self, _event: events.Resize) -> None:
        """Fit the lines to the new width."""
        self.call_after_refresh(self._draw, None)

    def action_open(self) -> None:
        """Close with the marked conversation."""
        if marked := self._marked():
            self.dismiss(marked.id)

    def action_mark(self, step: int) -> None:
        """Move the mark, not beyond the ends."""
        listed = self.query_one(OptionList)
        if self._found:
            place = (listed.highlighted or 0) + step
            listed.highlighted = min(max(place, 0), len(self._found) - 1)

    def action_back(self) -> None:
        """Empty the search; close when it is empty."""
        search = self.query_one("#search", Input)
        if search.value:
            search.value = ""
        else:
            self.dismiss(None)

    def action_close(self) -> None:
        """Close without opening one."""
        self.dismiss(None)

    @work
    async def action_rename(self) -> None:
        """Ask for another title, and store it."""
        marked = self._marked()
        if marked is None:
            return
        title = await self.app.push_screen_wait(AskTextScreen("New title", marked.title))
        if title is None or title == marked.title:
            return
        told = self.Renamed(marked.id, title)
        if await self._stored(lambda: self._store.rename(marked.id, title), told):
            self._search(mark=marked.id)

    @work
    async def action_delete(self) -> None:
        """Delete the marked conversation after a question."""
        marked = self._marked()
        if marked is None:
            return
        if marked.id == self._busy:
            self._say("A reply is being written there; stop it first.", failed=True)
            return
        answer = await self.app.push_screen_wait(
            ConfirmScreen(f"Delete “{_title(marked)}”?", _DELETE, marked="keep")
        )
        if answer != "delete":
            return
        told = self.Deleted(marked.id)
        if await self._stored(lambda: self._store.delete(marked.id), told):
            self._search(mark=self._neighbour(marked.id))

    @work
    async def action_export(self) -> None:
        """Ask for the format, and tell the app."""
        marked = self._marked()
        if marked is None:
            return
        answer = await self.app.push_screen_wait(
            ConfirmScreen(f"Export “{_title(marked)}” as", _EXPORTS)
        )
        if answer is not None:
            self.post_message(self.ExportWanted(marked.id, cast("ExportFormat", answer)))

    @work(exclusive=True, group="search")
    async def _search(self, mark: str | None = None) -> None:
        """Show what the store finds; an older search that still runs is forgotten."""
        try:
            self._found = await asyncio.to_thread(self._store.list, self._query)
        except Dsv4Error as error:
            self._found = ()
            self._draw(None)
            self._say(str(error), failed=True)
        else:
            self._draw(mark)
            self._say(self._summary())

    async def _stored(self, change: Callable[[], None], told: Message) -> bool:
        """Change the store and tell the app; says what failed."""
        app = self.app

        def work() -> None:
            # Told from the thread: closing the list ends this worker, never the change.
            change()
            app.post_message(told)

        try:
            await asyncio.to_thread(work)
        except Dsv4Error as error:
            self._say(str(error), failed=True)
            return False
        return True

    def _draw(self, mark: str | None) -> None:
        """Write the lines anew; `mark` is the id to mark, None keeps the place."""
        listed = self.query_one(OptionList)
        place = listed.highlighted or 0
        width = listed.scrollable_content_region.width
        now = self._clock()
        listed.clear_options()
        listed.add_options(
            Option(self._line(summary, width, now), id=summary.id) for summary in self._found
        )
        if not self._found:
            return
        ids = [summary.id for summary in self._found]
        place = ids.index(mark) if mark in ids else min(place, len(ids) - 1)
        listed.highlighted = place

    def _line(self, summary: ConversationSummary, width: int, now: float) -> Content:
        """Mark, title, turns and date in the width of the list; the place found below them."""
        turns = f"{summary.turns} turn{'' if summary.turns == 1 else 's'}"
        end = f"  {turns:>10}  {when_text(summary.updated, now):>10} "
        begin = "* " if summary.id == self._current else "  "
        title = _fitted(_title(summary), width - len(begin) - cell_len(end))
        line = Content(f"{begin}{title}{end}")
        found = " ".join(drawable(summary.excerpt).split())
        if not found or found == _title(summary):
            return line
        return Content(f"{line.plain}\n      {_fitted(found, width - 6)}")

    def _marked(self) -> ConversationSummary | None:
        place = self.query_one(OptionList).highlighted
        return None if place is None or place >= len(self._found) else self._found[place]

    def _neighbour(self, conversation_id: str) -> str | None:
        """The conversation that takes the mark when this one goes: the next, else the last."""
        ids = [summary.id for summary in self._found]
        place = ids.index(conversation_id) if conversation_id in ids else 0
        rest = ids[place + 1 :] or ids[:place][-1:]
        return rest[0] if rest else None

    def _summary(self) -> str:
        if not self._found:
            return "Nothing holds all of these words." if self._query else "No conversations yet."
        count = len(self._found)
        return f"{count} conversation{'' if count == 1 else 's'}; * is the one on the screen"

    def _say(self, text: str, *, failed: bool = False) -> None:
        says = self.query_one("#says", Static)
        says.set_class(failed, "failed")
        says.update(Content(text))


def when_text(seconds: float, now: float) -> str:
    """A moment in at most ten columns: `14:05`, `Mon 14:05`, `12 Mar`, `2025-03-12`."""
    then, today = time.localtime(seconds), time.localtime(now)
    if then[:3] == today[:3]:
        return time.strftime("%H:%M", then)
    if 0 <= now - seconds < 6 * 86400:
        return time.strftime("%a %H:%M", then)
    return time.strftime("%d %b" if then.tm_year == today.tm_year else "%Y-%m-%d", then)


def _title(summary: ConversationSummary) -> str:
    return " ".join(drawable(summary.title).split()) or "(no title)"


def _fitted(text: str, width: int) -> str:
    """The text in exactly that many columns, with an ellipsis where it was cut."""
    width = max(width, 1)
    return (
        text + " " * (width - cell_len(text))
        if cell_len(text) <= width
        else (set_cell_size(text, width - 1) + "…")
    )

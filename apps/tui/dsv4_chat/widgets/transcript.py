"""The turns of a conversation, of which only those near the view exist as widgets.

The idea: a window over the list of turns. Scrolling towards its edge mounts more turns there and
removes them at the other edge, so that memory and layout stay the same for any length. The view
follows the end only while it is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final

from textual.containers import VerticalScroll
from textual.widget import Widget
from textual.widgets import Static

from dsv4_chat.widgets.turn import Turn

if TYPE_CHECKING:
    from dsv4_chat.conversation import Node

PAGE_TURNS: Final = 8
"""Turns that are mounted at once when the view comes near an edge."""
PAGE_CHARACTERS: Final = 6_000
"""A page ends early at this much text."""
MAX_CHARACTERS: Final = 24_000
"""Text of mounted turns beyond which the far edge is given up."""
EDGE_LINES: Final = 3
"""Lines from an edge at which more is mounted."""


def size_of(node: Node) -> int:
    """Characters of a turn, at least some for its frame."""
    return len(node.content) + len(node.reasoning) + 200


class Transcript(VerticalScroll, can_focus=False):
    """A window over the turns.

    Args:
        make_turn: the widget of a node.
    """

    def __init__(self, make_turn: Callable[[Node], Turn]) -> None:
        super().__init__(id="transcript")
        self._make_turn = make_turn
        self._turns: list[Node] = []
        self._first = self._last = 0
        self._is_moving = False
        self._above = Static("", classes="more-turns", markup=False)
        self._below = Static("", classes="more-turns", markup=False)

    @property
    def mounted_turns(self) -> list[Turn]:
        """The turns that exist as widgets, oldest first."""
        return list(self.query(Turn))

    def turn_of(self, node_id: int) -> Turn | None:
        """The widget of a node; None when it is not mounted."""
        return next((turn for turn in self.query(Turn) if turn.node.id == node_id), None)

    def has(self, node: Node) -> bool:
        """Whether a turn is among those shown, mounted or not."""
        return any(shown is node for shown in reversed(self._turns))

    async def show(self, nodes: Sequence[Node], *extra: Widget) -> None:
        """Show other turns from their end, with other widgets behind them."""
        self._is_moving = True
        try:
            with self.app.batch_update():
                await self.remove_children()
                self._turns = list(nodes)
                self._last = len(self._turns)
                self._first = self._page_before(self._last)
                window = self._turns[self._first : self._last]
                await self.mount_all(
                    [self._above, *(self._make_turn(node) for node in window), self._below, *extra]
                )
                self._say_what_is_hidden()
        finally:
            self._is_moving = False
        self.follow()

    async def add(self, node: Node) -> Turn:
        """Show one more turn at the end, and go there."""
        self._turns.append(node)
        if self._last < len(self._turns) - 1:
            await self._show_last()
        else:
            self._last += 1
            await self.mount(self._make_turn(node), before=self._below)
            await self._drop_above(keep=2)
        self.follow()
        turn = self.turn_of(node.id)
        assert turn is not None  # it was just mounted
        return turn

    async def cut(self, count: int) -> None:
        """Keep only the first turns."""
        self._turns = self._turns[:count]
        if self._first >= count:
            await self._show_last()
        else:
            kept = {id(node) for node in self._turns}
            gone = [turn for turn in self.mounted_turns if id(turn.node) not in kept]
            self._last = min(self._last, count)
            await self._remove(gone)
        self.follow()

    async def remove_extra(self, kind: type[Widget]) -> None:
        """Remove what stands beside the turns."""
        await self.query_children(kind).remove()

    async def mount_extra(self, widget: Widget) -> None:
        """Put something behind the turns, and go there."""
        await self.mount(widget)
        self.follow()

    def follow(self) -> None:
        """Go to the end, and stay there while text comes."""
        self.anchor()

    async def go_to_start(self) -> None:
        """Show the first turns."""
        if self._first:
            await self._show_window(0, self._page_behind(0))
        self.release_anchor()
        self.scroll_home(animate=False)

    async def go_to_end(self) -> None:
        """Show the last turns."""
        if self._last < len(self._turns):
            await self._show_last()
        self.follow()
        self.scroll_end(animate=False)

    def watch_scroll_y(self, old: float, new: float) -> None:
        """Mount more turns when the view comes near an edge of the window."""
        super().watch_scroll_y(old, new)
        if self._is_moving or not self.is_mounted:
            return
        if new < old and new <= EDGE_LINES and self._first:
            self._is_moving = True
            self.call_later(self._extend_above)
        elif new > old and new >= self.max_scroll_y - EDGE_LINES and self._last < len(self._turns):
            self._is_moving = True
            self.call_later(self._extend_below)

    def _page_before(self, end: int) -> int:
        """First turn of a page that ends at a place; at least one turn."""
        start, size = end, 0
        while start and end - start < PAGE_TURNS and (start == end or size < PAGE_CHARACTERS):
            start -= 1
            size += size_of(self._turns[start])
        return start

    def _page_behind(self, start: int) -> int:
        """Place behind a page that starts at a turn."""
        end, size = start, 0
        while (
            end < len(self._turns)
            and end - start < PAGE_TURNS
            and (start == end or size < PAGE_CHARACTERS)
        ):
            size += size_of(self._turns[end])
            end += 1
        return end

    async def _show_last(self) -> None:
        await self._show_window(self._page_before(len(self._turns)), len(self._turns))

    async def _show_window(self, first: int, last: int) -> None:
        """Show these turns and no others."""
        self._is_moving = True
        try:
            with self.app.batch_update():
                await self.query_children(Turn).remove()
                self._first, self._last = first, last
                turns = [self._make_turn(node) for node in self._turns[first:last]]
                await self.mount_all(turns, before=self._below)
                self._say_what_is_hidden()
        finally:
            self._is_moving = False

    async def _extend_above(self) -> None:
        kept = self.mounted_turns[0] if self.mounted_turns else None
        before = 0 if kept is None else kept.virtual_region.y - self.scroll_offset.y
        start = self._page_before(self._first)
        turns = [self._make_turn(node) for node in self._turns[start : self._first]]
        with self.app.batch_update():
            await self.mount_all(turns, after=self._above)
            self._first = start
            await self._drop_below()
            self._say_what_is_hidden()
        self.call_after_refresh(self._keep_in_place, kept, before)

    async def _extend_below(self) -> None:
        kept = self.mounted_turns[-1] if self.mounted_turns else None
        before = 0 if kept is None else kept.virtual_region.y - self.scroll_offset.y
        end = self._page_behind(self._last)
        turns = [self._make_turn(node) for node in self._turns[self._last : end]]
        with self.app.batch_update():
            await self.mount_all(turns, before=self._below)
            self._last = end
            await self._drop_above(keep=len(turns) + 1)
            self._say_what_is_hidden()
        self.call_after_refresh(self._keep_in_place, kept, before)

    def _keep_in_place(self, kept: Widget | None, before: int) -> None:
        """Put a turn back where it was on the screen before others came above it."""
        if kept is not None and kept.is_mounted:
            self.scroll_to(y=kept.virtual_region.y - before, animate=False, force=True)
        self._is_moving = False

    async def _drop_above(self, keep: int) -> None:
        """Remove turns at the upper edge while there are too many; the last ones stay."""
        turns = self.mounted_turns
        size = sum(size_of(turn.node) for turn in turns)
        gone: list[Turn] = []
        while len(turns) - len(gone) > keep and size > MAX_CHARACTERS:
            size -= size_of(turns[len(gone)].node)
            gone.append(turns[len(gone)])
        self._first += len(gone)
        await self._remove(gone)

    async def _drop_below(self) -> None:
        """Remove turns at the lower edge while there are too many."""
        turns = self.mounted_turns
        size = sum(size_of(turn.node) for turn in turns)
        gone: list[Turn] = []
        while turns and size > MAX_CHARACTERS and len(turns) > PAGE_TURNS:
            last = turns[-1]
            if last.node.state == "streaming":
                break
            size -= size_of(last.node)
            gone.append(turns.pop())
        self._last -= len(gone)
        await self._remove(gone)

    async def _remove(self, turns: Sequence[Turn]) -> None:
        for turn in turns:
            await turn.remove()
        self._say_what_is_hidden()

    def _say_what_is_hidden(self) -> None:
        behind = len(self._turns) - self._last
        for line, count, where in (
            (self._above, self._first, "earlier"),
            (self._below, behind, "later"),
        ):
            line.display = count > 0
            line.update(f"· {count:,} {where} turn{'s' if count != 1 else ''} ·")

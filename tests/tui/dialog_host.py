"""An app around one dialog, which notes its result and its messages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

from textual.app import App
from textual.message import Message
from textual.pilot import Pilot
from textual.screen import Screen

from dsv4_chat.themes import use_theme

if TYPE_CHECKING:
    from dsv4_chat.screens.conversations import ConversationsScreen


OPEN = "still open"


class DialogHost(App[None]):
    """Shows a dialog; nothing is behind it."""

    ENABLE_COMMAND_PALETTE = False

    def __init__(self, dialog: Screen[Any], theme: str) -> None:
        super().__init__()
        self._dialog, self._name = dialog, theme
        self.results: list[Any] = []
        self.told: list[Message] = []

    def on_mount(self) -> None:
        use_theme(self, self._name)
        self.push_screen(self._dialog, self.results.append)

    def on_conversations_screen_renamed(self, event: ConversationsScreen.Renamed) -> None:
        self.told.append(event)

    def on_conversations_screen_deleted(self, event: ConversationsScreen.Deleted) -> None:
        self.told.append(event)

    def on_conversations_screen_export_wanted(
        self, event: ConversationsScreen.ExportWanted
    ) -> None:
        self.told.append(event)


@asynccontextmanager
async def shown(
    dialog: Screen[Any], size: tuple[int, int] = (80, 24), theme: str = "dark"
) -> AsyncIterator[Pilot[None]]:
    """A pilot of an app that shows the dialog."""
    app = DialogHost(dialog, theme)
    async with app.run_test(size=size) as pilot:
        await settled(pilot)
        yield pilot


async def result_after(pilot: Pilot[None], dialog: Screen[Any], keys: list[str]) -> Any:
    """What another dialog returns when it has seen these keys; `OPEN` when it is still there.

    Many cases in one app: starting one takes longer than a case.
    """
    results: list[Any] = []
    await pilot.app.push_screen(dialog, results.append)
    await settled(pilot)
    await pilot.press(*keys)
    await settled(pilot)
    if results:
        return results[0]
    dialog.dismiss(None)
    await pilot.pause()
    return OPEN


async def settled(pilot: Pilot[None]) -> None:
    """Wait until what was pressed has been worked off, searches included."""
    await pilot.pause()
    while any(worker.group == "search" and not worker.is_finished for worker in pilot.app.workers):
        await asyncio.sleep(0.005)
    await pilot.pause()


def results_of(pilot: Pilot[None]) -> list[Any]:
    """What the dialog returned so far; empty while it is open."""
    app = pilot.app
    assert isinstance(app, DialogHost)
    return app.results


def told_to(pilot: Pilot[None]) -> list[Message]:
    """Messages that reached the app."""
    app = pilot.app
    assert isinstance(app, DialogHost)
    return app.told

"""The whole app with a scripted model, for tests that press keys."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scripted_model import ScriptedModel
from stored_screens import text_of
from textual.pilot import Pilot
from textual.screen import Screen

from dsv4_chat.app import ChatApp, Surroundings
from dsv4_chat.settings import Settings
from dsv4_chat.widgets.card import Card

if TYPE_CHECKING:
    from dsv4_chat.conversation import Node
    from dsv4_chat.screens.chat import ChatScreen
    from dsv4_chat.store import Store
    from dsv4_chat.widgets.prompt_input import PromptInput

PATIENCE_SECONDS = 20.0
"""How long a condition may take to come true; never waited for in a test that passes."""


@dataclass
class Chat:
    """An app and its pilot."""

    app: ChatApp
    pilot: Pilot[None]
    model: ScriptedModel

    @property
    def screen(self) -> ChatScreen:
        return self.app.chat

    @property
    def prompt(self) -> PromptInput:
        return self.app.chat.prompt

    @property
    def path(self) -> list[Node]:
        return self.app.keeper.current.path()

    @property
    def said(self) -> list[str]:
        """Contents of the shown turns."""
        return [node.content for node in self.path]

    @property
    def toasts(self) -> list[str]:
        """What was told for a moment."""
        return [notification.message for notification in self.app._notifications]

    @property
    def cards(self) -> list[Card]:
        return list(self.app.chat.query(Card))

    async def until(self, holds: Callable[[], object]) -> None:
        """Wait for a condition."""
        for _ in range(int(PATIENCE_SECONDS / 0.01)):
            if holds():
                return
            await self.pilot.pause(0.01)
        raise AssertionError(f"did not come true; the screen shows:\n{self.shown}")

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)

    async def type(self, text: str) -> None:
        """Insert a text, and let the app take note."""
        self.prompt.insert_at_cursor(text)
        await self.pilot.pause()

    async def ask(self, text: str) -> None:
        """Send a question and wait for the end of the reply."""
        asked = len(self.model.calls)
        await self.type(text)
        await self.press("enter")
        await self.until(lambda: len(self.model.calls) > asked)
        await self.idle()

    async def idle(self) -> None:
        """Wait until nothing is being written and every step is done."""
        groups = ("dialogue", "reply", "command")

        def is_idle() -> bool:
            busy = [w for w in self.app.workers if w.group in groups and not w.is_finished]
            return self.screen.dialogue.run is None and not busy

        await self.pilot.pause()
        await self.until(is_idle)
        await self.pilot.pause()

    async def command(self, line: str) -> None:
        """Type a slash command and wait until it is done."""
        self.prompt.put(line)
        await self.pilot.pause()
        self.prompt.close_completions()
        await self.press("enter")
        await self.idle()

    async def command_opens(self, line: str, screen: type[Screen[Any]]) -> None:
        """Type a slash command and wait for its screen."""
        await self.type(line)
        await self.press("enter")
        await self.until(lambda: isinstance(self.app.screen, screen))

    @property
    def shown(self) -> str:
        """The text on the screen."""
        return "\n".join(text_of(self.app.export_screenshot(simplify=True)))


@asynccontextmanager
async def chatting(
    model: ScriptedModel | None = None,
    settings: Settings | None = None,
    *,
    size: tuple[int, int] = (80, 24),
    store: Store | None = None,
    folder: Path | None = None,
    is_open: bool = True,
    editor: str = "true",
) -> AsyncIterator[Chat]:
    """Run the app; with `is_open` wait until the model is."""
    model = model or ScriptedModel(clock=Ticks())
    around = Surroundings(store=store, clock=Ticks(), editor=editor)
    if folder is not None:
        around.folder = folder
    app = ChatApp(model, settings or Settings(), around)
    async with app.run_test(size=size) as pilot:
        chat = Chat(app, pilot, model)
        if is_open:
            await chat.until(lambda: app.facts is not None)
        await asyncio.sleep(0)
        await pilot.pause()
        yield chat


class Ticks:
    """A clock that stands still until it is moved: nothing on the screen depends on the speed."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

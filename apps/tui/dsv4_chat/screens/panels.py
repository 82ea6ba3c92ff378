"""What opens above the chat, and what becomes of its result.

The idea: the other screens know neither the app nor each other; this is the one place that gives
them what they need and acts on what they return.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from dsv4_chat.export import write_export
from dsv4_chat.screens.confirm import Answer, ConfirmScreen
from dsv4_chat.screens.conversations import ConversationsScreen
from dsv4_chat.screens.details import DetailsScreen
from dsv4_chat.screens.help import HelpScreen, KeySection
from dsv4_chat.screens.sampling import ReplyChoices, SamplingScreen
from dsv4_chat.store_errors import StoreError
from dsv4_chat.widgets.prompt_input import PromptInput
from dsv4_chat.widgets.turn import Turn
from edgedsv4 import Dsv4Error

if TYPE_CHECKING:
    from dsv4_chat.app import ChatApp
    from dsv4_chat.commands import ExportFormat
    from dsv4_chat.screens.chat import ChatScreen

_DELETE = (
    Answer(id="delete", key="d", label="Delete", help="it cannot be brought back"),
    Answer(id="keep", key="k", label="Keep"),
)


class Panels:
    """Opens screens above the chat.

    Args:
        app: store, settings and model.
        chat: the screen below.
    """

    def __init__(self, app: ChatApp, chat: ChatScreen) -> None:
        self._app = app
        self._chat = chat
        self.titles: tuple[str, ...] = ()
        """Of the saved conversations, newest first."""

    async def read_store(self) -> None:
        """Read titles for `/open`, and earlier prompts for Up."""
        store = self._app.store
        if store is None:
            return
        try:
            found = await asyncio.to_thread(store.list)
            prompts = await asyncio.to_thread(store.prompts, self._app.settings.history)
        except StoreError as error:
            self._chat.tell(str(error), is_error=True)
            return
        self.titles = tuple(summary.title for summary in found if summary.title)
        self._chat.history.extend(prompts)

    async def conversations(self, query: str = "") -> None:
        """List the saved conversations, or open the one that has this title."""
        store, chat = self._app.store, self._chat
        if store is None:
            chat.tell("Conversations are not kept in this run.")
            return
        current = chat.dialogue.conversation.id
        chosen: str | None = None
        if query:
            try:
                found = await asyncio.to_thread(store.list, query)
            except StoreError as error:
                chat.tell(str(error), is_error=True)
                return
            exact = [summary for summary in found if summary.title == query] or found
            chosen = exact[0].id if len(exact) == 1 else None
        if chosen is None:
            busy = current if chat.dialogue.run is not None else None
            screen = ConversationsScreen(
                store,
                current=current,
                busy=busy,
                query=query,
                clock=chat.dialogue.conversation.clock,
            )
            chosen = await self._app.push_screen_wait(screen)
        if chosen is not None:
            chat.dialogue.perform(chat.dialogue.open(chosen))
        await self.read_store()

    async def sampling(self) -> None:
        """Change how replies are made."""
        conversation, settings = self._chat.dialogue.conversation, self._app.settings
        now = ReplyChoices(
            sampling=conversation.sampling,
            thinking=conversation.thinking,
            system=conversation.system,
        )
        defaults = ReplyChoices(
            sampling=settings.sampling_options(),
            thinking=settings.thinking,
            system=settings.system,
        )
        modes = self._chat.choices().modes
        chosen = await self._app.push_screen_wait(SamplingScreen(now, defaults, modes))
        if chosen is not None:
            conversation.sampling, conversation.system = chosen.sampling, chosen.system
            conversation.thinking = chosen.thinking
            await self._app.keeper.save_options()
            self._chat.refresh_status()

    async def help(self) -> None:
        """Show keys and commands."""
        sections = (
            KeySection(title="Chat", bindings=(*self._chat.BINDINGS, *self._app.BINDINGS)),
            KeySection(title="In the prompt", bindings=PromptInput.BINDINGS),
            KeySection(title="On a turn (Shift+Tab goes there)", bindings=Turn.BINDINGS),
        )
        await self._app.push_screen_wait(HelpScreen(sections))

    async def details(self) -> None:
        """Show what runs and where its memory goes."""
        await self._app.push_screen_wait(DetailsScreen(self._app.details, self._app.model.status))

    async def delete_current(self) -> None:
        """Delete the shown conversation, after a question."""
        conversation, store = self._chat.dialogue.conversation, self._app.store
        if store is None or not conversation.nodes:
            self._chat.tell("There is nothing to delete.")
            return
        question = f"Delete “{conversation.title}”?"
        if await self._app.push_screen_wait(ConfirmScreen(question, _DELETE)) != "delete":
            return
        await self._chat.dialogue.stop_and_wait()
        try:
            await asyncio.to_thread(store.delete, conversation.id)
        except StoreError as error:
            self._chat.tell(str(error), is_error=True)
            return
        self._chat.dialogue.perform(self._chat.dialogue.deleted(conversation.id))
        await self.read_store()

    async def export(self, conversation_id: str, export_format: ExportFormat) -> None:
        """Write a saved conversation to a file named after its title."""
        store = self._app.store
        if store is None:
            return
        try:
            conversation = await asyncio.to_thread(store.load, conversation_id)
            path = await asyncio.to_thread(
                write_export, conversation, export_format, folder=self._app.folder
            )
        except Dsv4Error as error:
            self._chat.tell(str(error), is_error=True)
        else:
            self._chat.tell(f"Written to {path}")

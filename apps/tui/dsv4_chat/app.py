"""The app: it owns the model's thread, the settings and the conversation that is shown.

The idea: everything that outlives a screen is here and nothing is drawn here. The model is opened
behind the first screen, and leaving saves what is worth saving but never waits for long.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import textual.constants
from textual.app import App, SuspendNotSupported
from textual.binding import Binding, BindingType
from textual.screen import Screen

from dsv4_chat.chat_model import Progress
from dsv4_chat.conversation_keeper import ConversationKeeper
from dsv4_chat.end_signals import when_asked_to_end
from dsv4_chat.messages import ModelOpened, OpeningAdvanced, OpeningFailed
from dsv4_chat.model_thread import ModelThread
from dsv4_chat.screens.chat import ChatScreen
from dsv4_chat.themes import use_theme
from edgedsv4 import ConfigError, Dsv4Error, StorageError

if TYPE_CHECKING:
    import asyncio

    from textual.driver import Driver

    from dsv4_chat.chat_model import ChatModel, ModelFacts
    from dsv4_chat.screens.conversations import ConversationsScreen
    from dsv4_chat.settings import Settings
    from dsv4_chat.store import Store

REPORT_SECONDS = 0.05
"""Shortest time between two messages about how far the model is loaded."""
CLOSING_SECONDS = 1.0
"""How long leaving waits for the model to stop."""


@dataclass(slots=True, kw_only=True)
class Surroundings:
    """What the app is given from outside."""

    store: Store | None = None
    """Where conversations are kept; None keeps none."""
    editor: str = "vi"
    """Command of the external editor."""
    folder: Path = field(default_factory=Path.cwd)
    """What relative files are relative to."""
    clock: Callable[[], float] = time.perf_counter
    """Seconds, any origin; for speeds."""
    notices: tuple[str, ...] = ()
    """What the start has to tell, shown once."""


class ChatApp(App[None]):
    """The terminal chat.

    Args:
        model: not open yet.
        settings: of this run.
        surroundings: store, editor, folder and clock.
    """

    TITLE = "dsv4-chat"
    ENABLE_COMMAND_PALETTE = False
    CSS_PATH = "app.tcss"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("ctrl+q", "leave", "Quit; the conversation is saved", priority=True),
    ]

    def __init__(
        self, model: ChatModel, settings: Settings, surroundings: Surroundings | None = None
    ) -> None:
        super().__init__()
        around = surroundings or Surroundings()
        self.model = model
        self.settings = settings
        self.store = around.store
        self.editor = around.editor
        self.folder = around.folder
        self.clock = around.clock
        self.thread = ModelThread()
        self.keeper = ConversationKeeper(settings, around.store, self._complain)
        self.facts: ModelFacts | None = None
        """Of the open model; None before."""
        self.opening: Progress | None = Progress(phase="start", done=0, total=0)
        """How far it is loaded; None when it does not load."""
        self.chat = ChatScreen(self)
        self._notices = around.notices
        self._reported = 0.0
        self._is_leaving = False
        self._status = 0

    def on_mount(self) -> None:
        """Show the chat, then load the model behind it."""
        use_theme(self, self.settings.theme)
        self.thread.start()
        when_asked_to_end(self.end)
        for notice in self._notices:
            self.notify(notice, severity="warning", markup=False)
        self.call_after_refresh(self.open_model)

    def get_driver_class(self) -> type[Driver]:
        """The driver that lasts, where there is one for this system."""
        if os.name != "posix" or textual.constants.DRIVER is not None:
            return super().get_driver_class()
        from dsv4_chat.terminal import TerminalDriver

        return TerminalDriver

    def get_default_screen(self) -> Screen[None]:
        """The chat is the only screen below the others."""
        return self.chat

    def open_model(self) -> None:
        """Load the model; the chat screen is told how it goes."""
        self.opening = Progress(phase="load libraries", done=0, total=0)
        self.run_worker(self._open(), group="model")

    def cancel_opening(self) -> bool:
        """Stop loading; whether the model loads."""
        if self.opening is None:
            return False
        self.model.cancel()
        return True

    async def reopen_model(self) -> None:
        """Close a model whose device is lost, and load it again."""
        if self.opening is not None:
            return
        self.facts = None
        self.keeper.forget_state()
        with suppress(Dsv4Error):
            await self.thread.submit(self.model.close)
        self.open_model()

    async def details(self) -> dict[str, object]:
        """What runs and where its memory goes.

        Raises:
            Dsv4Error: the model is not open.
        """
        if self.facts is None:
            raise ConfigError("the model is not loaded yet")
        return await self.thread.submit(self.model.details)

    def save_state(self) -> asyncio.Future[None] | None:
        """Save what the model has evaluated, before the conversation is left.

        Returns:
            What to await for the file; None when there is nothing to save.
        """
        owner = self.keeper.state_to_save()
        if self.facts is None or owner is None:
            return None
        return self.thread.submit(lambda: self.keeper.save_state(self.model, owner))

    async def load_state(self, conversation_id: str) -> bool:
        """Give the model the saved state of a conversation; whether there is one."""
        if self.facts is None:
            return False
        return await self.thread.submit(lambda: self.keeper.load_state(self.model, conversation_id))

    def edit_outside(self, text: str) -> str:
        """Let the external editor change a text; the screen comes back when it is closed.

        Raises:
            StorageError: it cannot be started, it failed, or what it wrote cannot be read.
        """
        with tempfile.TemporaryDirectory(prefix="dsv4-chat-") as folder:
            path = Path(folder) / "prompt.md"
            path.write_text(text, encoding="utf-8")
            try:
                command = [*shlex.split(self.editor), str(path)]
                status: int | OSError
                with self.suspend():
                    # An error that left this block would leave the screen away.
                    try:
                        status = subprocess.run(command, check=False).returncode
                    except OSError as error:
                        status = error
                if isinstance(status, OSError):
                    raise status
                if status:
                    raise StorageError(f"ended with status {status}", path=self.editor)
                return path.read_text(encoding="utf-8").removesuffix("\n")
            except (OSError, ValueError) as error:
                if isinstance(error, StorageError):
                    raise
                what = f"{error}; choose one with editor in the settings or $VISUAL"
                raise StorageError(what, path=self.editor) from error
            except SuspendNotSupported as error:
                raise StorageError("needs a terminal of its own", path=self.editor) from error

    def on_conversations_screen_renamed(self, event: ConversationsScreen.Renamed) -> None:
        """The shown conversation may be the one that was renamed in the list."""
        if event.conversation_id == self.keeper.current.id:
            self.keeper.current.title = event.title
            self.chat.refresh_status()

    def on_conversations_screen_deleted(self, event: ConversationsScreen.Deleted) -> None:
        """It may be the one that was deleted."""
        dialogue = self.chat.dialogue
        dialogue.perform(dialogue.deleted(event.conversation_id))

    async def on_conversations_screen_export_wanted(
        self, event: ConversationsScreen.ExportWanted
    ) -> None:
        """One of the list is to be written to a file."""
        await self.chat.panels.export(event.conversation_id, event.format)

    async def action_leave(self) -> None:
        """Leave; a second time without saving what takes long."""
        if self._is_leaving:
            self.model.cancel()
            self.exit(return_code=self._status)
            return
        self._is_leaving = True
        self.run_worker(self._leave(), group="leave")

    def end(self, status: int) -> None:
        """Leave as with the key, because a signal asks for it or the terminal is gone."""
        # A terminal that is closed says so twice.
        if not (self._is_leaving or self._status):
            self._status = status
            self.call_later(self.action_leave)

    async def _leave(self) -> None:
        await self.chat.stop_and_wait(seconds=CLOSING_SECONDS)
        await self.keeper.save_options()
        if not self._status and self.chat.dialogue.would_lose():
            self._is_leaving = False
            return
        if self.facts is not None:
            saved = self.save_state()
            if saved is not None:
                self.notify("Saving the conversation; Ctrl+Q again leaves at once", timeout=60)
                await saved
            await self.thread.submit(self.model.close)
        else:
            self.model.cancel()
        self.exit(return_code=self._status)

    async def _open(self) -> None:
        try:
            facts = await self.thread.submit(lambda: self.model.open(self._report))
        except Exception as error:  # noqa: BLE001  # shown on a card; logged by the thread
            self.opening = None
            self.chat.post_message(OpeningFailed(error))
        else:
            self.opening = None
            self.facts = facts
            self.chat.post_message(ModelOpened(facts))

    def _report(self, progress: Progress) -> None:
        """From the model's thread: how far it is loaded."""
        previous, self.opening = self.opening, progress
        now = time.monotonic()
        is_new_phase = previous is None or previous.phase != progress.phase
        if is_new_phase or now - self._reported >= REPORT_SECONDS:
            self._reported = now
            self.chat.post_message(OpeningAdvanced(progress))

    def _complain(self, what: str) -> None:
        self.notify(
            what, title="The conversation is not saved", severity="error", timeout=10, markup=False
        )

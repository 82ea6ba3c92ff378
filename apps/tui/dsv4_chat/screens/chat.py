"""The chat: transcript over prompt over one status line, and the keys that act on them.

The idea: this screen only turns keys and messages into steps of the `Dialogue`, and shows what it
is told. It never waits for the model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.screen import Screen
from textual.widgets import Static

from dsv4_chat.advice import Advice, advice_on_opening
from dsv4_chat.code_blocks import code_blocks
from dsv4_chat.command_completion import complete, usage_of
from dsv4_chat.commands import Choices, is_command, parse_command
from dsv4_chat.dialogue import Dialogue, versions_of
from dsv4_chat.pastes import Pastes
from dsv4_chat.plain_text import drawable
from dsv4_chat.prompt_history import PromptHistory
from dsv4_chat.screens.chat_commands import run_command
from dsv4_chat.screens.chat_status import status_facts
from dsv4_chat.screens.panels import Panels
from dsv4_chat.themes import THEME_NAMES
from dsv4_chat.widgets.card import Card
from dsv4_chat.widgets.prompt_input import CompletionList, PromptInput, PromptNote
from dsv4_chat.widgets.status_bar import StatusBar
from dsv4_chat.widgets.transcript import Transcript
from dsv4_chat.widgets.turn import Turn
from dsv4_chat.widgets.welcome import Welcome
from edgedsv4 import ConfigError, StorageError

if TYPE_CHECKING:
    from dsv4_chat.app import ChatApp
    from dsv4_chat.conversation import Node
    from dsv4_chat.messages import (
        CardChosen,
        ModelOpened,
        OpeningAdvanced,
        OpeningFailed,
        PromptChanged,
        PromptSubmitted,
        SuggestionChosen,
        VersionWanted,
    )

STATUS_SECONDS = 0.2
"""Time between two looks at the model's memory."""
KEYS_IDLE = "Enter send · Ctrl+N new chat · F1 help"
KEYS_BUSY = "Esc stop · F1 help"
QUIT_SECONDS = 2.0
"""Within this time a second Ctrl+C leaves."""


class ChatScreen(Screen[None]):
    """The conversation and its prompt.

    Args:
        owner: model, store and settings.
    """

    AUTO_FOCUS = "#prompt"
    VERTICAL_BREAKPOINTS = [(0, "-low"), (9, "-tall")]  # noqa: RUF012  # as Textual declares it
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "back", "Stop the reply; close a list; back to the prompt"),
        Binding("ctrl+c", "interrupt", "Stop the reply; clear the prompt; twice: quit"),
        Binding("ctrl+r", "regenerate", "Another answer to the last question"),
        Binding("ctrl+e", "edit", "Edit the last question, or the focused one"),
        Binding("ctrl+n", "new", "New chat"),
        Binding("ctrl+o", "conversations", "Saved conversations"),
        Binding("ctrl+f", "fork", "Go on in a copy, up to the focused turn"),
        Binding("ctrl+y", "copy_answer", "Copy the last answer"),
        Binding("ctrl+b", "copy_code", "Copy a code block; again for the next"),
        Binding("ctrl+t", "thinking", "Next thinking mode"),
        Binding("ctrl+p", "sampling", "Sampling and system message"),
        Binding("ctrl+x", "editor", "Write the prompt in $EDITOR"),
        Binding("ctrl+l", "attach", "Attach a text file"),
        Binding("f1,ctrl+g", "help", "This help"),
        Binding("f2", "details", "Engine, memory, kernels"),
        Binding("pageup", "page(-1)", "Scroll up"),
        Binding("pagedown", "page(1)", "Scroll down"),
        Binding("ctrl+home", "edge(-1)", "First turn"),
        Binding("ctrl+end", "edge(1)", "Last turn"),
    ]

    def __init__(self, owner: ChatApp) -> None:
        super().__init__()
        self.owner = owner
        settings = owner.settings
        self.pastes = Pastes(settings.paste_lines, settings.paste_characters)
        self.history = PromptHistory(settings.history)
        self.transcript = Transcript(self._make_turn)
        self.dialogue = Dialogue(owner, self)
        completions = CompletionList()
        self.prompt = PromptInput(self.pastes, self.history, completions)
        self._completions = completions
        self._title = Static("", id="title", markup=False)
        self._note = PromptNote()
        self._status = StatusBar()
        self.panels = Panels(owner, self)
        self._code_place = 0
        self._interrupted = -QUIT_SECONDS

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield self._title
        yield self.transcript
        yield self._completions
        yield self._note
        yield self.prompt
        yield self._status

    async def on_mount(self) -> None:
        """Draw the empty conversation, and begin to look at the model's memory."""
        self.set_interval(STATUS_SECONDS, self.refresh_status)
        await self.show_conversation()
        self.run_worker(self._read_store(), group="store")

    # What the dialogue shows.

    async def show_conversation(self) -> None:
        """Draw the conversation from its end, or the welcome view when it is empty."""
        path = self.dialogue.conversation.path()
        self._code_place = 0
        if path:
            await self.transcript.show(path)
        else:
            welcome = Welcome(self.owner.settings.model)
            await self.transcript.show([], welcome)
            self.transcript.anchor(False)
            self._fill_welcome(welcome)
        self.refresh_status()

    async def clear_cards(self) -> None:
        """Remove the welcome view and what is settled."""
        await self.transcript.remove_extra(Card)
        await self.transcript.remove_extra(Welcome)

    async def show_card(self, advice: Advice, *, takes_focus: bool = False) -> None:
        """Say what went wrong, behind the last turn."""
        await self.transcript.remove_extra(Card)
        card = Card(advice)
        await self.transcript.mount_extra(card)
        if not (takes_focus and card.focus_choice()):
            self.prompt.focus()
        self.refresh_status()

    def finish_turn(self, node: Node) -> None:
        """A reply has ended."""
        turn = self.transcript.turn_of(node.id)
        if turn is not None:
            turn.finish()
        self._code_place = 0
        self.refresh_status()

    def give_back(self, typed: str) -> None:
        """Put a prompt that was not sent back, before what was typed since."""
        if typed:
            since = self.prompt.text
            self.prompt.put(f"{typed}\n{since}" if since and since != typed else typed)

    def begin_edit(self, text: str) -> None:
        """Put a question into the prompt to change it."""
        self.prompt.put(text)
        self.prompt.focus()
        self.note("Editing an earlier question: Enter sends it anew, Esc lets it be.")

    def note(self, text: str) -> None:
        """Show a line above the prompt; an empty one hides it."""
        self._note.say(text)

    def tell(self, text: str, *, is_error: bool = False) -> None:
        """Show something for a moment that needs no answer."""
        severity = "error" if is_error else "information"
        self.notify(drawable(text), severity=severity, markup=False)  # type: ignore[arg-type]  # a literal

    async def painted(self) -> None:
        """Wait until what has changed is on the screen."""
        painted = asyncio.Event()
        if self.call_after_refresh(painted.set):
            await painted.wait()

    async def stop_and_wait(self, *, seconds: float) -> None:
        """End the reply, waiting for it at most this long."""
        try:
            await asyncio.wait_for(self.dialogue.stop_and_wait(), seconds)
        except TimeoutError:
            self.tell("The reply could not be stopped in time.")

    def choices(self) -> Choices:
        """What commands can take at this moment."""
        facts = self.owner.facts
        return Choices(
            themes=THEME_NAMES,
            modes=("none",) if facts is None else facts.thinking_modes,
            titles=self.panels.titles,
            sampling=self.dialogue.conversation.sampling,
            folder=self.owner.folder,
        )

    # Messages.

    def on_opening_advanced(self, event: OpeningAdvanced) -> None:
        """Show how far the model is loaded."""
        for welcome in self.query(Welcome):
            welcome.show_progress(event.progress)
        self.refresh_status()

    async def on_model_opened(self, _event: ModelOpened) -> None:
        """Show the model, and send what waits for it."""
        await self.transcript.remove_extra(Card)
        for welcome in self.query(Welcome):
            self._fill_welcome(welcome)
        self.refresh_status()
        self.dialogue.perform(self._model_ready())

    async def on_opening_failed(self, event: OpeningFailed) -> None:
        """Say why the model is not loaded, and what to do."""
        for welcome in self.query(Welcome):
            welcome.show_stopped()
        self.dialogue.take_back()
        await self.show_card(advice_on_opening(event.error, self.owner.settings.model))

    def on_prompt_submitted(self, event: PromptSubmitted) -> None:
        """Send a question, or do a command."""
        if is_command(event.typed):
            self._command(event.typed)
        else:
            self.dialogue.perform(self.dialogue.send(event.text, event.typed))

    def on_suggestion_chosen(self, event: SuggestionChosen) -> None:
        """Ask one of the things to try."""
        self.prompt.focus()
        self.history.add(event.text)
        self.dialogue.perform(self.dialogue.send(event.text, event.text))

    def on_prompt_changed(self, event: PromptChanged) -> None:
        """Offer ways to go on with a command."""
        text = event.before_cursor
        is_whole = text == self.prompt.text
        found = complete(text, self.choices()) if is_whole and text.startswith("/") else []
        self._completions.offer(found)
        spec = usage_of(text) if is_whole else None
        if self.dialogue.editing is None and self.dialogue.queued is None:
            self.note("" if spec is None else f"{spec.usage}: {spec.help}")

    async def on_card_chosen(self, event: CardChosen) -> None:
        """Do what a card offers."""
        dialogue = self.dialogue
        self.prompt.focus()
        if event.choice == "quit":
            await self.owner.action_leave()
        elif event.choice == "model":
            await self.owner.reopen_model()
        elif event.choice == "new":
            dialogue.perform(dialogue.new())
        else:
            await self.transcript.remove_extra(Card)
            step = dialogue.drop_and_ask if event.choice == "drop" else dialogue.ask_again
            dialogue.perform(step())

    def on_version_wanted(self, event: VersionWanted) -> None:
        """Show another version of a turn."""
        self.dialogue.perform(self.dialogue.show_version(event.node_id, event.step))

    def on_key(self, event: events.Key) -> None:
        """A letter typed anywhere goes to the prompt."""
        if event.is_printable and event.character and self.focused is not self.prompt:
            event.stop()
            self.prompt.focus()
            self.prompt.insert_at_cursor(event.character)

    def on_paste(self, event: events.Paste) -> None:
        """So does a paste."""
        self.prompt.focus()
        self.prompt.insert_long(event.text)

    # Keys.

    def action_back(self) -> None:
        """Close the list, stop the reply or the loading, leave an edit, or go to the prompt."""
        if self.prompt.close_completions() or self.dialogue.stop() or self.dialogue.take_back():
            pass
        elif self.dialogue.leave_edit():
            self.note("")
            self.prompt.put("")
        elif self.focused is not self.prompt:
            self.prompt.focus()
        else:
            self.owner.cancel_opening()
        self.refresh_status()

    async def action_interrupt(self) -> None:
        """Copy a selection, stop the reply, clear the prompt; twice on an empty one: leave."""
        selected = self.get_selected_text() or self.prompt.selected_text
        if selected:
            self.copy(selected, "the selection")
            self.clear_selection()
        elif self.dialogue.stop():
            self.refresh_status()
        elif self.prompt.text:
            if self.dialogue.leave_edit():
                self.note("")
            self.prompt.clear_into_history()
        elif self.owner.clock() - self._interrupted < QUIT_SECONDS:
            await self.owner.action_leave()
        else:
            self._interrupted = self.owner.clock()
            self.tell("Ctrl+C again leaves; the conversation is saved.")

    def action_regenerate(self) -> None:
        """Answer the focused or the last question again."""
        self.dialogue.perform(self.dialogue.regenerate(self._focused_node()))

    def action_edit(self) -> None:
        """Change the focused or the last question."""
        self.dialogue.perform(self.dialogue.edit(self._focused_node()))

    def action_new(self) -> None:
        """Begin an empty conversation."""
        self.prompt.focus()
        self.dialogue.perform(self.dialogue.new())

    def action_fork(self) -> None:
        """Copy the conversation up to the focused turn."""
        self.dialogue.perform(self.dialogue.fork(self._focused_node()))

    def action_copy_answer(self) -> None:
        """Copy the focused turn or the last answer."""
        node = self._chosen_answer()
        if node is None:
            self.tell("There is no answer to copy.")
        else:
            self.copy(node.content, "the answer" if node.role == "assistant" else "the question")

    def action_copy_code(self, number: int | None = None) -> None:
        """Copy a code block of the last answer; without a number the next one."""
        node = self._chosen_answer()
        blocks = [] if node is None else code_blocks(node.content)
        if not blocks:
            self.tell("The answer has no code block.")
            return
        if number is not None and number > len(blocks):
            self.tell(f"The answer has {len(blocks)} code blocks.", is_error=True)
            return
        place = (self._code_place if number is None else number - 1) % len(blocks)
        self._code_place = place + 1
        self.copy(blocks[place], f"code block {place + 1} of {len(blocks)}")

    async def action_thinking(self) -> None:
        """Choose the next thinking mode of the model."""
        modes = self.choices().modes
        if len(modes) < 2:
            self.tell("This model has no thinking modes." if self.owner.facts else "Still loading.")
            return
        current = self.dialogue.conversation.thinking
        place = modes.index(current) if current in modes else -1
        await self.set_thinking(modes[(place + 1) % len(modes)])

    async def set_thinking(self, mode: str | int) -> None:
        """Choose a thinking mode for the next replies."""
        self.dialogue.conversation.thinking = mode
        await self.owner.keeper.save_options()
        self.tell(f"Thinking: {mode}")
        self.refresh_status()

    def action_conversations(self) -> None:
        """List the saved conversations."""
        self._open(self.panels.conversations())

    def action_sampling(self) -> None:
        """Change sampling and system message."""
        self._open(self.panels.sampling())

    def action_help(self) -> None:
        """Show keys and commands."""
        self._open(self.panels.help())

    def action_details(self) -> None:
        """Show what runs and where its memory goes."""
        self._open(self.panels.details())

    async def attach(self, path: Path) -> None:
        """Put a placeholder for a text file into the prompt.

        Raises:
            StorageError: it cannot be read, or is no text.
        """
        mark = await asyncio.to_thread(self.pastes.attach, path)
        self.prompt.insert_at_cursor(f"{mark} ")
        self.prompt.focus()

    def action_attach(self) -> None:
        """Begin the command that attaches a file: it completes paths."""
        self.prompt.focus()
        self.prompt.put("/attach ")

    def action_editor(self) -> None:
        """Write the prompt in the external editor."""
        try:
            text = self.owner.edit_outside(self.prompt.text)
        except StorageError as error:
            self.tell(str(error), is_error=True)
        else:
            self.prompt.put(text)
        self.prompt.focus()

    def action_page(self, step: int) -> None:
        """Scroll the transcript by a page."""
        if step < 0:
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    async def action_edge(self, step: int) -> None:
        """Go to the first or last turn."""
        await (self.transcript.go_to_start() if step < 0 else self.transcript.go_to_end())

    def copy(self, text: str, what: str) -> None:
        """Put a text into the clipboard, through the terminal."""
        self.app.copy_to_clipboard(text)
        self.tell(f"Copied {what}: {len(text):,} characters.")

    def refresh_status(self) -> None:
        """Draw title, status line and the hint of the prompt anew."""
        if not self.is_mounted:
            return
        conversation, run = self.dialogue.conversation, self.dialogue.run
        title = conversation.title or "New chat"
        self._title.update(drawable(title))
        self.prompt.border_subtitle = KEYS_IDLE if run is None else KEYS_BUSY
        self._status.facts = status_facts(self.owner, self.dialogue)

    def _open(self, panel: Coroutine[object, object, None]) -> None:
        if self.is_current:
            self.run_worker(panel, group="panel")

    def _command(self, typed: str) -> None:
        try:
            command = parse_command(typed, self.choices())
        except ConfigError as error:
            self.prompt.put(typed)
            self.tell(str(error), is_error=True)
        else:
            self.run_worker(run_command(self, command), group="command")

    def _make_turn(self, node: Node) -> Turn:
        conversation = self.dialogue.conversation
        versions = versions_of(conversation, node)
        return Turn(
            node,
            version=(versions.index(node) + 1, len(versions)),
            show_thinking=self.owner.settings.show_thinking,
            is_sent=node not in conversation.dropped(),
        )

    def _fill_welcome(self, welcome: Welcome) -> None:
        owner = self.owner
        if owner.facts is not None:
            welcome.show_facts(owner.facts, next(iter(self.panels.titles), ""))
        elif owner.opening is not None:
            welcome.show_progress(owner.opening)
        else:
            welcome.show_stopped()

    async def _model_ready(self) -> None:
        conversation = self.dialogue.conversation
        if conversation.nodes:
            await self.owner.load_state(conversation.id)
        await self.dialogue.send_queued()

    async def _read_store(self) -> None:
        await self.panels.read_store()
        if self.owner.facts is not None:
            for welcome in self.query(Welcome):
                self._fill_welcome(welcome)

    def _focused_node(self) -> int | None:
        focused = self.focused
        return focused.node.id if isinstance(focused, Turn) else None

    def _chosen_answer(self) -> Node | None:
        focused = self.focused
        if isinstance(focused, Turn):
            return focused.node
        path = self.dialogue.conversation.path()
        answers = [node for node in path if node.role == "assistant" and node.content]
        return answers[-1] if answers else None

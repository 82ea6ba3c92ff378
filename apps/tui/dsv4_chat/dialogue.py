"""Questions and replies: asked, shown, stopped, asked again, and what happens when they fail.

The idea: every step that changes the conversation runs here, one after the other; only a reply runs
beside them, and each step but sending stops it first. The screen turns keys into these steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import TYPE_CHECKING

from textual.worker import Worker, WorkerCancelled

from dsv4_chat.advice import advice_on_full_context, advice_on_reply
from dsv4_chat.reply_run import Question, ReplyRun
from dsv4_chat.store_errors import StoreError
from edgedsv4 import ContextFullError

if TYPE_CHECKING:
    from dsv4_chat.app import ChatApp
    from dsv4_chat.conversation import Conversation, Node
    from dsv4_chat.screens.chat import ChatScreen

logger = logging.getLogger(__name__)

PARTIAL_SECONDS = 5.0
"""Time between two writes of a reply in progress: what a crash loses of it."""

Again = Callable[[], Awaitable[None]]


class Dialogue:
    """The steps of one chat screen.

    Args:
        app: model, thread and keeper.
        view: where it is shown.
    """

    def __init__(self, app: ChatApp, view: ChatScreen) -> None:
        self._app = app
        self._view = view
        self._keeper = app.keeper
        self.run: ReplyRun | None = None
        """The reply in progress."""
        self.editing: int | None = None
        """The question that the prompt's text replaces."""
        self.queued: tuple[str, str] | None = None
        """What is sent once the model is loaded, and how it was typed."""
        self._worker: Worker[None] | None = None
        self._lock = asyncio.Lock()
        self._again: Again | None = None
        self._warned: str | None = None
        """The conversation that is not saved and may be left all the same."""
        self._failed_question: Node | None = None
        """The question that left the shown path when it failed."""

    @property
    def conversation(self) -> Conversation:
        """The one that is shown."""
        return self._keeper.current

    def perform(self, step: Coroutine[object, object, None]) -> None:
        """Do a step behind those that wait already."""
        self._view.run_worker(self._in_turn(step), group="dialogue")

    def stop(self) -> bool:
        """End the reply at its next token; whether there was one."""
        if self.run is None:
            return False
        self.run.stop()
        return True

    async def stop_and_wait(self) -> None:
        """End the reply, and wait until its turn is complete."""
        if self.stop() and self._worker is not None:
            try:
                await self._worker.wait()
            except WorkerCancelled:
                logger.debug("the reply was cancelled with the app")

    async def send(self, text: str, typed: str) -> None:
        """Ask a question; it is queued while the model loads."""
        view, conversation = self._view, self.conversation
        if self.run is not None:
            view.give_back(typed)
            view.tell("A reply is being written; Esc stops it.")
            return
        if self._app.facts is None:
            self._queue(text, typed)
            return
        view.note("")
        editing, self.editing = self.editing, None
        if editing is not None and editing in conversation.nodes:
            question = conversation.edit(editing, text)
            await view.transcript.cut(len(conversation.path()) - 1)
        else:
            question = self._unanswered(text) or conversation.append("user", text)
        self._again = lambda: self._send_again(text, typed)
        await self._ask(question, typed=typed)

    async def send_queued(self) -> None:
        """The model is loaded: ask what waits."""
        queued, self.queued = self.queued, None
        self._view.note("")
        if queued is not None:
            await self.send(*queued)

    def take_back(self) -> bool:
        """Put a queued question back into the prompt; whether there was one."""
        queued, self.queued = self.queued, None
        if queued is not None:
            self._view.note("")
            self._view.give_back(queued[1])
        return queued is not None

    async def regenerate(self, node_id: int | None) -> None:
        """Answer a question again: that of this turn, or the last one."""
        await self.stop_and_wait()
        if not self._has_model():
            return
        conversation = self.conversation
        path = conversation.path()
        place = next((i for i, node in enumerate(path) if node.id == node_id), len(path) - 1)
        while place >= 0 and path[place].role == "assistant":
            place -= 1
        if place < 0:
            self._view.tell("There is no question to answer again.")
            return
        previous = conversation.active
        conversation.rewind(path[place].id)
        self._again = lambda: self.regenerate(node_id)
        await self._view.transcript.cut(place + 1)
        await self._ask(path[place], previous=previous)

    async def edit(self, node_id: int | None) -> None:
        """Take a question back into the prompt: that of this turn, or the last one."""
        path = self.conversation.path()
        questions = [node for node in path if node.role == "user"]
        chosen = next((node for node in questions if node.id == node_id), None)
        if chosen is None and questions:
            chosen = questions[-1]
        if chosen is None:
            self._view.tell("There is no question to edit.")
            return
        self.editing = chosen.id
        self._view.begin_edit(chosen.content)

    def leave_edit(self) -> bool:
        """Let the edited question be; whether one was edited."""
        was_editing, self.editing = self.editing is not None, None
        return was_editing

    async def fork(self, node_id: int | None) -> None:
        """Go on in a copy of the conversation up to this turn, or all of it."""
        await self.stop_and_wait()
        conversation = self.conversation
        last = conversation.active if node_id is None else node_id
        if last is None:
            self._view.tell("There is nothing to fork yet.")
            return
        await self._keeper.save_options()
        self._app.save_state()
        self._keeper.fork(last)
        await self._keeper.save_whole()
        await self.show()
        self._view.tell("This is a copy; the original is kept under Ctrl+O.")

    async def new(self) -> None:
        """Begin an empty conversation."""
        await self.stop_and_wait()
        await self._keeper.save_options()
        if self.would_lose():
            return
        if self.conversation.nodes:
            self._app.save_state()
            self._keeper.new()
        await self.show()

    async def open(self, conversation_id: str) -> None:
        """Go on with a saved conversation."""
        if conversation_id == self.conversation.id:
            return
        await self.stop_and_wait()
        await self._keeper.save_options()
        if self.would_lose():
            return
        try:
            self._app.save_state()
            await self._keeper.load(conversation_id)
        except StoreError as error:
            self._view.tell(str(error), is_error=True)
            return
        await self.show()
        await self._app.load_state(conversation_id)

    def would_lose(self) -> bool:
        """Whether leaving loses turns that could not be saved; said once, then it is wanted."""
        conversation = self.conversation.id
        if not self._keeper.is_behind or self._warned == conversation:
            return False
        self._warned = conversation
        self._view.tell(
            "This conversation is not saved and would be lost: /export md FILE writes it elsewhere;"
            " the same key again leaves it.",
            is_error=True,
        )
        return True

    async def deleted(self, conversation_id: str) -> None:
        """A conversation is gone from the disk; the shown one goes from the screen as well."""
        self._keeper.forget(conversation_id)
        if conversation_id == self.conversation.id:
            await self.stop_and_wait()
            self._keeper.new()
            await self.show()

    async def show_version(self, node_id: int, step: int) -> None:
        """Show the version of a turn before or behind the one that is shown."""
        await self.stop_and_wait()
        conversation = self.conversation
        versions = versions_of(conversation, conversation.node(node_id))
        place = next((i for i, node in enumerate(versions) if node.id == node_id), 0) + step
        if not 0 <= place < len(versions):
            return
        conversation.select(versions[place].id)
        await self._keeper.save_options()
        await self.show()
        turn = self._view.transcript.turn_of(versions[place].id)
        if turn is not None:
            turn.focus()

    async def drop_and_ask(self) -> None:
        """Leave out the older half of the questions, and ask again."""
        conversation, failed = self.conversation, self._failed_question
        if failed is not None:
            conversation.rewind(failed.id)
        questions = _questions_sent(conversation)
        conversation.drop_oldest_turns(max(questions // 2, 1))
        if failed is not None:
            conversation.rewind(failed.parent)
        await self._keeper.save_options()
        again = self._again
        await self.show()
        self._again = again
        await self.ask_again()

    async def ask_again(self) -> None:
        """Do what failed last once more."""
        again, self._again = self._again, None
        if again is not None:
            await again()

    async def show(self) -> None:
        """Draw the conversation anew."""
        self.editing = None
        self._again = self._failed_question = None
        self._view.note("")
        await self._view.show_conversation()

    async def _in_turn(self, step: Coroutine[object, object, None]) -> None:
        async with self._lock:
            await step

    def _queue(self, text: str, typed: str) -> None:
        if self._app.opening is None:
            self._view.give_back(typed)
            self._view.tell("The model is not loaded; the card above says what can be done.")
        else:
            self.queued = (text, typed)
            self._view.note("Will be sent once the model is loaded; Esc takes it back.")

    def _has_model(self) -> bool:
        if self._app.facts is None:
            self._view.tell("The model is not loaded yet.")
        return self._app.facts is not None

    def _unanswered(self, text: str) -> Node | None:
        """The same question at this place that failed before, to be asked once more."""
        conversation = self.conversation
        for node in conversation.children(conversation.active):
            answers = conversation.children(node.id)
            is_same = node.role == "user" and node.content == text
            if is_same and all(answer.is_empty for answer in answers):
                conversation.rewind(node.id)
                return node
        return None

    async def _send_again(self, text: str, typed: str) -> None:
        if self._view.prompt.text == typed:
            self._view.prompt.put("")
        await self.send(text, typed)

    async def _ask(self, question: Node, *, typed: str = "", previous: int | None = None) -> None:
        conversation, self._failed_question = self.conversation, None
        await self._view.clear_cards()
        if not self._view.transcript.has(question):
            await self._view.transcript.add(question)
        await self._keeper.save_turn(question)
        asked = Question.of(conversation)
        answer = conversation.append("assistant", state="streaming")
        run = ReplyRun(self._app.model, self._app.thread, answer, self._app.clock)
        self.run = run
        await self._view.transcript.add(answer)
        await self._keeper.save_turn(answer)
        self._keeper.evaluated()
        self._worker = self._view.run_worker(
            self._reply(run, asked, typed, previous), group="reply"
        )

    async def _reply(
        self, run: ReplyRun, asked: Question, typed: str, previous: int | None
    ) -> None:
        node = run.node
        saved = self._app.clock()

        async def show() -> None:
            nonlocal saved
            if self._app.clock() - saved > PARTIAL_SECONDS:
                saved = self._app.clock()
                await self._keeper.save_partial(node)
            turn = self._view.transcript.turn_of(node.id)
            if turn is not None:
                await turn.catch_up(run.thinking_tokens)
                await self._view.painted()

        try:
            outcome = await run.run(asked, show)
        except Exception as error:  # noqa: BLE001  # shown on a card; logged by the thread
            self.run = None
            await self._failed(node, error, typed, previous)
            return
        node.outcome = outcome
        node.state = "stopped" if outcome.finish_reason == "cancelled" else "complete"
        self.run = None
        self._view.finish_turn(node)
        await self._keeper.save_turn(node)
        status = self._app.model.status()
        if outcome.finish_reason == "length" and 0 < status.capacity <= status.length + 1:
            self._again = None
            can_drop = _questions_sent(self.conversation) > 1
            await self._view.show_card(advice_on_full_context(can_drop=can_drop))

    async def _failed(self, node: Node, error: Exception, typed: str, previous: int | None) -> None:
        conversation = self.conversation
        node.state = "failed"
        if node.is_empty:
            if previous is not None:
                conversation.select(previous)
            elif node.parent is not None:
                conversation.rewind(conversation.node(node.parent).parent)
                self._failed_question = conversation.node(node.parent)
            await self._keeper.save_turn(node)
            await self._view.show_conversation()
            self._view.give_back(typed)
        else:
            self._again = lambda: self.regenerate(None)
            self._view.finish_turn(node)
            await self._keeper.save_turn(node)
        await self._show_card(error)

    async def _show_card(self, error: Exception) -> None:
        questions = _questions_sent(self.conversation) + (self._failed_question is not None)
        advice = advice_on_reply(error, can_drop=questions > 1)
        await self._view.show_card(advice, takes_focus=isinstance(error, ContextFullError))


def _questions_sent(conversation: Conversation) -> int:
    sent = conversation.path()[len(conversation.dropped()) :]
    return sum(node.role == "user" for node in sent)


def versions_of(conversation: Conversation, node: Node) -> list[Node]:
    """The turns at the place of this one that have something to show, oldest first."""
    return [
        other
        for other in conversation.siblings(node.id)
        if other is node or not (other.role == "assistant" and other.is_empty)
    ]

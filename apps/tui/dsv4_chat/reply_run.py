"""One reply from the question to its end: asked in the model's thread, shown frame by frame.

The idea: the loop below is the only place where what the model says enters the conversation and the
screen, so the order of both is that of the model, whatever the speed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dsv4_chat.reply_feed import ReplyFeed
from edgedsv4 import Message, PromptOptions, SamplingOptions, ToolCall

if TYPE_CHECKING:
    from dsv4_chat.chat_model import ChatModel, Progress, ReplyOutcome, ReplyPart
    from dsv4_chat.conversation import Conversation, Node
    from dsv4_chat.model_thread import ModelThread

FRAME_SECONDS: Final = 1 / 20
"""Pause between two updates of the screen."""
DRAWING_SHARE: Final = 2.0
"""After an update that took long, the pause is this many times as long, for the keys."""


@dataclass(frozen=True, slots=True)
class Question:
    """What the model is asked."""

    messages: tuple[Message, ...]
    sampling: SamplingOptions
    prompt: PromptOptions

    @classmethod
    def of(cls, conversation: Conversation) -> Question:
        """The shown path of a conversation, with its options."""
        return cls(
            tuple(conversation.to_messages()),
            conversation.sampling,
            PromptOptions(thinking=conversation.thinking),
        )


class ReplyRun:
    """A reply in progress.

    Args:
        model: asked in `thread`.
        thread: the model's.
        node: the turn that the reply becomes.
        clock: seconds, any origin.
    """

    def __init__(
        self,
        model: ChatModel,
        thread: ModelThread,
        node: Node,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.node = node
        self.feed = ReplyFeed(clock)
        self.is_stopping = False
        self.thinking_tokens = 0
        """Tokens of the thinking so far."""
        self._model = model
        self._thread = thread

    def stop(self) -> None:
        """End the reply at its next token; what came so far stays."""
        self.is_stopping = True
        self._model.cancel()

    async def run(self, question: Question, show: Callable[[], Awaitable[None]]) -> ReplyOutcome:
        """Ask, and call `show` whenever the node has grown; it returns when that is on the screen.

        Raises:
            Dsv4Error: the reply failed; what came before has been shown.
        """
        asked = self._thread.submit(lambda: self._ask(question))
        while True:
            is_done = asked.done()  # before the feed is emptied, so that nothing comes behind it
            began = time.perf_counter()
            if parts := self.feed.drain():
                for part in parts:
                    self._take(part)
                await show()
            if is_done:
                return asked.result()
            pause = max(FRAME_SECONDS, DRAWING_SHARE * (time.perf_counter() - began))
            await asyncio.wait((asked,), timeout=pause)

    def _ask(self, question: Question) -> ReplyOutcome:
        return self._model.reply(
            question.messages, question.sampling, question.prompt, self.feed.add, self._advance
        )

    def _advance(self, progress: Progress) -> None:
        self.feed.advance(progress)
        if self.is_stopping:
            self._model.cancel()  # a cancel before the call began did not count

    def _take(self, part: ReplyPart) -> None:
        node = self.node
        if part.kind == "text":
            node.content += part.text
        elif part.kind == "thinking":
            node.reasoning += part.text
            self.thinking_tokens = part.tokens
        else:
            call_id = part.call_id or f"call_{len(node.tool_calls)}"
            call = ToolCall(id=call_id, name=part.name, arguments=part.arguments)
            node.tool_calls = (*node.tool_calls, call)

"""One turn of the transcript: a question, an answer with its thinking and tool calls, a result.

The idea: a turn draws a `Node` and knows nothing else. It can have the focus, so that a key can act
on it; what the key does is the screen's business.
"""

from __future__ import annotations

import json
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.events import Click
from textual.widget import Widget
from textual.widgets import Static

from dsv4_chat.messages import VersionWanted
from dsv4_chat.plain_text import drawable
from dsv4_chat.widgets.answer_text import AnswerText, PlainText

if TYPE_CHECKING:
    from dsv4_chat.conversation import Node

SHOWN_LINES: Final = 24
SHOWN_CHARACTERS: Final = 3000
"""Lines and characters of a question before it is folded."""
MAX_CALL_LINES: Final = 40
"""Lines of a tool call's arguments or result that are shown."""


class Thinking(Vertical):
    """Muted text behind a line that folds it and counts its tokens.

    Args:
        text: what was thought already.
        tokens: how many that were; 0 when not known.
        is_open: whether it is unfolded.
    """

    def __init__(self, text: str, tokens: int, *, is_open: bool) -> None:
        super().__init__(classes="thinking")
        self.tokens = tokens
        self._head = Static(classes="thinking-head", markup=False)
        self._body = PlainText(text, classes="thinking-body")
        self._body.display = self.is_open = is_open

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        yield self._head
        yield self._body

    def on_mount(self) -> None:
        """Fill in what is known."""
        self._show_head()

    def grow(self, text: str, tokens: int) -> None:
        """More was thought."""
        self.tokens = tokens
        self._show_head()
        self._body.grow(text)

    def toggle(self) -> None:
        """Fold or unfold."""
        self.is_open = not self.is_open
        self._body.display = self.is_open
        self._show_head()

    def on_click(self, event: Click) -> None:
        """A click does what the key does."""
        if event.widget is self._head:
            event.stop()
            self.toggle()

    def _show_head(self) -> None:
        count = f" · {self.tokens:,} tokens" if self.tokens else ""
        self._head.update(f"{'▾' if self.is_open else '▸'} Thinking{count}")


class ToolCard(Static):
    """A tool call, or the result of one.

    Args:
        title: name of the tool, or what it is.
        text: JSON or any other text.
    """

    def __init__(self, title: str, text: str) -> None:
        super().__init__(drawable(pretty(text)), classes="tool-card", markup=False)
        self.border_title = Content(drawable(title)).markup


class Turn(Vertical, can_focus=True):
    """One turn.

    Args:
        node: what it shows.
        version: its place among its siblings, from 1, and how many there are.
        show_thinking: whether thinking that streams is unfolded.
        is_sent: whether the model still gets to read it.
    """

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "app.focus_previous", "Turn above", show=False),
        Binding("down", "app.focus_next", "Turn below", show=False),
        Binding("left", "version(-1)", "Older version", show=False),
        Binding("right", "version(1)", "Newer version", show=False),
        Binding("enter,space", "unfold", "Fold or unfold", show=False),
    ]

    def __init__(
        self,
        node: Node,
        *,
        version: tuple[int, int] = (1, 1),
        show_thinking: bool = True,
        is_sent: bool = True,
    ) -> None:
        super().__init__(classes=f"turn {node.role}")
        self.node = node
        self._version = version
        self._show_thinking = show_thinking
        self._thinking: Thinking | None = None
        self._answer: AnswerText | None = None
        self._foot = Static(classes="turn-foot", markup=False)
        self._can_fold = node.role == "user" and (
            node.content.count("\n") >= SHOWN_LINES or len(node.content) > SHOWN_CHARACTERS
        )
        self._is_folded = self._can_fold
        self._question = PlainText(self._question_text(), classes="question")
        self._is_drawn = False
        self._thought = self._said = self._called = 0
        self.set_class(not is_sent, "dropped")

    def compose(self) -> ComposeResult:
        """Lay out the parts."""
        node = self.node
        self._note_shown()
        if node.role == "user":
            yield self._question
        elif node.role == "tool":
            yield ToolCard("result", node.content)
        else:
            if node.reasoning:
                yield self._new_thinking(node.reasoning, self._thinking_tokens())
            if node.content.strip():
                self._answer = AnswerText(node.content.lstrip("\n"))
                if node.state != "streaming":
                    self._answer.finish()
                yield self._answer
            for call in node.tool_calls:
                yield ToolCard(call.name, call.arguments)
        yield self._foot

    def on_mount(self) -> None:
        """Fill in what is known."""
        self._is_drawn = True
        self.refresh_foot()

    async def catch_up(self, thinking_tokens: int = 0) -> None:
        """Show what the node has and the turn does not show yet."""
        if not self._is_drawn:
            return  # it is being composed, and will show everything
        node = self.node
        thought, said = node.reasoning[self._thought :], node.content[self._said :]
        calls = node.tool_calls[self._called :]
        self._note_shown()
        self.refresh_foot()
        if thought:
            if self._thinking is None:
                await self.mount(self._new_thinking("", 0), before=self._place)
            if self._thinking is not None:
                self._thinking.grow(thought, thinking_tokens)
        if self._answer is not None:
            self._answer.grow(said)
        elif node.content.strip():
            self._answer = AnswerText(node.content.lstrip("\n"))
            await self.mount(self._answer, before=self._place)
        for call in calls:
            await self.mount(ToolCard(call.name, call.arguments), before=self._foot)

    def finish(self) -> None:
        """The answer is complete: fold its thinking, and say how it ended."""
        if self._answer is not None:
            self._answer.finish()
        if self._thinking is not None:
            self._thinking.tokens = self._thinking_tokens() or self._thinking.tokens
            if self._thinking.is_open:
                self._thinking.toggle()
        self.refresh_foot()

    def show_version(self, version: tuple[int, int]) -> None:
        """Its place among its siblings has changed."""
        self._version = version
        self.refresh_foot()

    def refresh_foot(self) -> None:
        """Say again how the turn ended and which version it is."""
        text = foot_of(self.node, self._version)
        self._foot.update(text)
        self._foot.display = bool(text)

    def action_version(self, step: int) -> None:
        """Ask for an older or newer version of this turn."""
        if self._version[1] > 1:
            self.post_message(VersionWanted(self.node.id, step))

    async def action_unfold(self) -> None:
        """Fold or unfold what can be."""
        if self._thinking is not None:
            self._thinking.toggle()
        elif self._can_fold:
            self._is_folded = not self._is_folded
            shown, self._question = (
                self._question,
                PlainText(self._question_text(), classes="question"),
            )
            await self.mount(self._question, before=self._foot)
            await shown.remove()

    def _note_shown(self) -> None:
        node = self.node
        self._thought, self._said = len(node.reasoning), len(node.content)
        self._called = len(node.tool_calls)

    @property
    def _place(self) -> Widget:
        """What thinking and text come before: the first tool call, or the line below."""
        cards = self.query_children(ToolCard)
        return cards.first() if cards else self._foot

    def _new_thinking(self, text: str, tokens: int) -> Thinking:
        is_open = self._show_thinking and self.node.state == "streaming"
        self._thinking = Thinking(text, tokens, is_open=is_open)
        return self._thinking

    def _thinking_tokens(self) -> int:
        return self.node.outcome.thinking_tokens if self.node.outcome is not None else 0

    def _question_text(self) -> str:
        text = self.node.content
        if not self._is_folded:
            return text
        head = "\n".join(text.split("\n", SHOWN_LINES // 2)[: SHOWN_LINES // 2])
        head = head[: SHOWN_CHARACTERS // 2]
        lines = text[len(head) :].count("\n")
        more = f"{lines:,} more lines" if lines else f"{len(text) - len(head):,} more characters"
        return f"{head}\n▸ {more}; Enter unfolds them"


def foot_of(node: Node, version: tuple[int, int]) -> str:
    """The muted line below a turn; empty when there is nothing to say."""
    pieces = []
    if version[1] > 1:
        pieces.append(f"◀ {version[0]}/{version[1]} ▶")
    if node.state == "streaming" and node.is_empty:
        pieces.append("…")
    elif node.role == "assistant":
        pieces += _ending(node)
    return " · ".join(pieces)


def _ending(node: Node) -> list[str]:
    outcome = node.outcome
    marks = {"stopped": "■ stopped", "failed": "✗ failed"}
    pieces = [marks[node.state]] if node.state in marks else []
    if outcome is None:
        return pieces
    if outcome.finish_reason == "length" and node.state == "complete":
        pieces.append("■ cut off at the token limit")
    if outcome.generated_tokens:
        pieces.append(f"{outcome.generated_tokens:,} tokens")
        if outcome.tokens_per_second:
            pieces.append(f"{outcome.tokens_per_second:,.1f} tokens/s")
    if outcome.drafts:
        pieces.append(outcome.drafts)
    if outcome.experts:
        pieces.append(outcome.experts)
    return pieces


def pretty(text: str) -> str:
    """JSON indented, other text as it is; both cut at `MAX_CALL_LINES`."""
    with suppress(ValueError, RecursionError):  # no JSON: shown as it is
        text = json.dumps(json.loads(text), ensure_ascii=False, indent=2)
    lines = text.split("\n")
    if len(lines) > MAX_CALL_LINES:
        lines = [*lines[:MAX_CALL_LINES], f"… {len(lines) - MAX_CALL_LINES:,} more lines"]
    return "\n".join(lines)

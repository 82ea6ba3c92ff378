"""A conversation as a tree of turns, of which one path is shown and sent to the model.

Nothing that was said is ever lost by going back: regenerating and editing add a sibling beside the
old turn, and the active leaf says which path counts. The tree knows neither model nor disk; what
the model has already evaluated is found by the model from the messages alone.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, TypeAlias

from edgedsv4 import ConfigError, Message, SamplingOptions, ToolCall

if TYPE_CHECKING:
    from dsv4_chat.chat_model import ReplyOutcome

NodeRole = Literal["user", "assistant", "tool"]
NodeState = Literal["complete", "streaming", "stopped", "failed"]
Thinking: TypeAlias = str | int

TITLE_LENGTH = 60
"""Characters of a title that is taken from the first question."""


@dataclass(slots=True, kw_only=True)
class Node:
    """One turn. Content, reasoning, calls, state and outcome change while a reply streams."""

    id: int
    """Unique in its conversation, growing."""
    parent: int | None
    """The turn before; None for a first turn."""
    role: NodeRole
    content: str = ""
    reasoning: str = ""
    """Thinking of an assistant turn."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant turn."""
    tool_call_id: str | None = None
    """The call that a tool turn answers."""
    state: NodeState = "complete"
    """`stopped`: cut off by the user or the end of the program; `failed`: by an error."""
    outcome: ReplyOutcome | None = None
    """How an assistant turn ended; None while it streams and after a crash."""
    created: float = 0.0
    """Seconds since 1970."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was said, so that nothing of it is sent."""
        return not (self.content or self.reasoning or self.tool_calls)


@dataclass(slots=True, kw_only=True)
class Conversation:
    """A tree of turns and how replies are made.

    Methods that take a node id raise `ConfigError` when the conversation has no such turn.
    """

    id: str = field(default_factory=lambda: str(uuid.uuid4()))
    title: str = ""
    """Empty until the first question, which then gives it."""
    created: float = 0.0
    """Seconds since 1970, as `updated`."""
    updated: float = 0.0
    system: str = ""
    """System message; empty for none."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    thinking: Thinking = "none"
    """`PromptOptions.thinking` of the next reply."""
    nodes: dict[int, Node] = field(default_factory=dict)
    """All turns by id, in the order they were added."""
    active: int | None = None
    """Last turn of the path that is shown; None when it is empty."""
    context_start: int | None = None
    """First turn that is sent to the model; None, or a turn of another path, for the whole one."""
    clock: Callable[[], float] = field(default=time.time, repr=False, compare=False)
    _children: dict[int | None, list[int]] = field(
        init=False, repr=False, compare=False, default_factory=dict
    )
    _last_id: int = field(init=False, repr=False, compare=False, default=0)

    def __post_init__(self) -> None:
        for node in self.nodes.values():
            self._children.setdefault(node.parent, []).append(node.id)
        self._last_id = max(self.nodes, default=0)
        if not self.created:
            self.created = self.clock()
        self.updated = self.updated or self.created

    def node(self, node_id: int) -> Node:
        """The turn of an id."""
        node = self.nodes.get(node_id)
        if node is None:
            raise ConfigError(f"the conversation has no turn {node_id}")
        return node

    def path(self) -> list[Node]:
        """The turns that are shown, oldest first."""
        return self._path_to(self.active)

    def append(
        self,
        role: NodeRole,
        content: str = "",
        *,
        reasoning: str = "",
        tool_calls: tuple[ToolCall, ...] = (),
        state: NodeState = "complete",
    ) -> Node:
        """Add a turn behind the active one; it becomes the active one."""
        node = self._add(self.active, role, content)
        node.reasoning, node.tool_calls, node.state = reasoning, tool_calls, state
        self._take_title()
        return node

    def append_result(self, tool_call_id: str, content: str) -> Node:
        """Add the result of a tool call behind the active turn."""
        node = self.append("tool", content)
        node.tool_call_id = tool_call_id
        return node

    def edit(self, node_id: int, text: str) -> Node:
        """Say a turn differently: a sibling with the new text, which becomes the active turn."""
        old = self.node(node_id)
        node = self._add(old.parent, old.role, text)
        node.tool_call_id = old.tool_call_id
        self._take_title()
        return node

    def rewind(self, node_id: int | None) -> None:
        """End the shown path with this turn; a reply appended then is a sibling of the old one.

        None shows an empty path.
        """
        self.active = None if node_id is None else self.node(node_id).id
        self.touch()

    def select(self, node_id: int) -> None:
        """Show the path through this turn, and behind it the newest turn of each place."""
        node = self.node(node_id)
        while replies := self.children(node.id):
            node = replies[-1]
        self.active = node.id
        self.touch()

    def children(self, node_id: int | None) -> list[Node]:
        """The turns behind one, oldest first; behind None the first turns."""
        return [self.nodes[child] for child in self._children.get(node_id, ())]

    def siblings(self, node_id: int) -> list[Node]:
        """The turns at the place of this one, itself included, oldest first."""
        return self.children(self.node(node_id).parent)

    def fork(self, node_id: int) -> Conversation:
        """A new conversation with a copy of the path up to and including a turn."""
        shared = self._path_to(self.node(node_id).id)
        forked = Conversation(
            title=f"{self.title} (fork)" if self.title else "",
            system=self.system,
            sampling=self.sampling,
            thinking=self.thinking,
            clock=self.clock,
        )
        places: dict[int, int] = {}
        for node in shared:
            copy = forked.append(
                node.role,
                node.content,
                reasoning=node.reasoning,
                tool_calls=node.tool_calls,
                state="stopped" if node.state == "streaming" else node.state,
            )
            copy.tool_call_id, copy.outcome, copy.created = (
                node.tool_call_id,
                node.outcome,
                node.created,
            )
            places[node.id] = copy.id
        if self.context_start is not None:
            forked.context_start = places.get(self.context_start)
        return forked

    def drop_oldest_turns(self, count: int) -> int:
        """Leave the oldest questions of the path, with their answers, out of what is sent.

        They stay in the conversation, and at least the last question is sent.

        Returns:
            Questions dropped, at most `count`.
        """
        questions = [node for node in self._sent() if node.role == "user"]
        dropped = min(count, len(questions) - 1)
        if dropped <= 0:
            return 0
        self.context_start = questions[dropped].id
        self.touch()
        return dropped

    def dropped(self) -> list[Node]:
        """The turns of the path that are not sent any more, oldest first."""
        path = self.path()
        return path[: len(path) - len(self._sent())]

    def to_messages(self, *, with_dropped: bool = False) -> list[Message]:
        """What the model is asked: the system message and the turns of the path.

        A turn without content and a reply that streams are left out, and what was dropped unless
        it is asked for.
        """
        messages = [Message("system", self.system)] if self.system else []
        return messages + [
            _message(node)
            for node in (self.path() if with_dropped else self._sent())
            if node.state != "streaming" and not (node.role == "assistant" and node.is_empty)
        ]

    def touch(self) -> None:
        """Note that the conversation changed now."""
        self.updated = max(self.clock(), self.updated)

    def _add(self, parent: int | None, role: NodeRole, content: str) -> Node:
        self.touch()
        node_id = self._last_id = self._last_id + 1
        node = Node(id=node_id, parent=parent, role=role, content=content, created=self.updated)
        self.nodes[node_id] = node
        self._children.setdefault(parent, []).append(node_id)
        self.active = node_id
        return node

    def _path_to(self, node_id: int | None) -> list[Node]:
        path = []
        while node_id is not None:
            node = self.nodes[node_id]
            path.append(node)
            node_id = node.parent
        return path[::-1]

    def _sent(self) -> list[Node]:
        path = self.path()
        starts = [place for place, node in enumerate(path) if node.id == self.context_start]
        return path[starts[0] :] if starts else path

    def _take_title(self) -> None:
        if not self.title:
            self.title = title_of(node.content for node in self.path() if node.role == "user")


def title_of(questions: Iterable[str]) -> str:
    """A title from the first question that has text: its first line, shortened; else empty."""
    for question in questions:
        lines = [" ".join(line.split()) for line in question.splitlines() if line.strip()]
        if lines:
            line = "".join(ch for ch in lines[0] if ch.isprintable())
            return line if len(line) <= TITLE_LENGTH else f"{line[: TITLE_LENGTH - 1].rstrip()}…"
    return ""


def _message(node: Node) -> Message:
    if node.role == "tool":
        return Message("tool", node.content, tool_call_id=node.tool_call_id)
    if node.role == "user":
        return Message("user", node.content)
    return Message("assistant", node.content, reasoning=node.reasoning, tool_calls=node.tool_calls)

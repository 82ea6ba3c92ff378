"""What a conversation is made of, before and after rendering: records checked when made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Literal, get_args

from edgedsv4.errors import ConfigError
from edgedsv4.text.special_tokens import TASK_TOKENS

Role = Literal["system", "developer", "user", "assistant", "tool", "latest_reminder"]
Section = Literal["content", "thinking", "tool_calls"]
Schema = Mapping[str, object]

ROLES: tuple[str, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of prompt text; a special piece is exactly one added token of the vocabulary."""

    text: str
    is_special: bool = False


@dataclass(frozen=True, slots=True)
class ContentPart:
    """One part of list content: text, or the name of a kind that has no text (`image_url`)."""

    text: str = ""
    kind: str = "text"


@dataclass(frozen=True, slots=True)
class ToolCall:
    """One call of a tool, as an assistant turn holds it."""

    id: str
    """Ties the result to its call; never rendered."""
    name: str
    arguments: str = "{}"
    """JSON text, an object as a rule; anything else is passed on as it is."""


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Raises:
        ConfigError: an unknown role or task, or a field on a role that cannot carry it.
    """

    role: str
    """`system`, `developer`, `user`, `assistant`, `tool` or `latest_reminder`."""
    content: str | tuple[ContentPart, ...] = ""
    """Text, or parts that are joined by an empty line."""
    _: KW_ONLY
    reasoning: str = ""
    """The thinking of an assistant turn."""
    tool_calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant turn, in order."""
    tool_call_id: str | None = None
    """The call that a tool message answers."""
    tools: tuple[Schema, ...] = ()
    """Function schemas that a developer message brings along."""
    task: str | None = None
    """Quick task of a user or developer message: a key of `special_tokens.TASK_TOKENS`."""
    is_prefix: bool = False
    """The reply continues this (last, assistant) message."""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise ConfigError(f"role must be one of {', '.join(ROLES)}, found {self.role!r}")
        if self.task is not None and self.task not in TASK_TOKENS:
            raise ConfigError(f"task must be one of {', '.join(TASK_TOKENS)}, found {self.task!r}")
        carried = (
            ("reasoning", bool(self.reasoning), ("assistant",)),
            ("tool_calls", bool(self.tool_calls), ("assistant",)),
            ("is_prefix", self.is_prefix, ("assistant",)),
            ("tool_call_id", self.tool_call_id is not None, ("tool",)),
            ("tools", bool(self.tools), ("developer",)),
            ("task", self.task is not None, ("user", "developer")),
        )
        for name, is_set, roles in carried:
            if is_set and self.role not in roles:
                raise ConfigError(
                    f"{name} belongs to {' and '.join(roles)} messages,"
                    f" found on a message of role {self.role!r}"
                )


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered conversation."""

    pieces: tuple[Piece, ...]
    """The text in order; neighbouring plain pieces are already joined."""
    opens_in: Section
    """Section of the reply that the prompt leaves open; where `ReplyParser` has to start."""
    is_continuation: bool = False
    """The open section already holds text of the assistant, so leading newlines count."""
    awaits_reply: bool = True
    """False when the conversation ends in a finished assistant turn."""

    @property
    def text(self) -> str:
        """The whole prompt as one string."""
        return "".join(piece.text for piece in self.pieces)

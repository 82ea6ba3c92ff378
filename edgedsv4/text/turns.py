"""Messages grouped into the turns of the prompt encoding.

Consecutive user and tool messages are one `<｜User｜>` turn; the results of several calls stand in
the order of the calls.
"""

# ruff: noqa: RUF001, RUF002 (the full-width bar is part of the token texts)

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from edgedsv4.text.messages import ContentPart, Message, Piece

_IMAGE_KINDS = ("image", "image_url")
_IMAGE_TOKENS = {"v4-vision": "<｜image｜>", "v4.1": "<｜deepseek_image｜>"}


@dataclass(slots=True)
class Turn:
    """One turn; `messages` holds more than one only for the role `user`."""

    role: str
    messages: list[Message] = field(default_factory=list)
    call_order: dict[str, int] = field(default_factory=dict)
    """Call id -> position, of the last assistant turn with calls before this one."""

    @property
    def task(self) -> str | None:
        """Quick task that this turn asks for."""
        return self.messages[-1].task

    @property
    def is_user_like(self) -> bool:
        """Whether the model answers it: reasoning before the last such turn may be dropped."""
        return self.role in ("user", "developer", "system")


def group_turns(messages: Iterable[Message]) -> list[Turn]:
    """Group messages into turns; a message with a quick task ends its turn."""
    turns: list[Turn] = []
    call_order: dict[str, int] = {}
    for message in messages:
        role = "user" if message.role == "tool" else message.role
        if role == "user" and turns and turns[-1].role == "user" and turns[-1].task is None:
            turns[-1].messages.append(message)
        else:
            turns.append(Turn(role, [message], call_order))
        if message.tool_calls:
            call_order = {call.id: i for i, call in enumerate(message.tool_calls)}
    return turns


def user_pieces(turn: Turn, variant: str) -> list[Piece]:
    """The content of a user or developer turn: parts joined by an empty line."""
    results = [m for m in turn.messages if m.role == "tool"]
    ordered = iter(sorted(results, key=lambda m: turn.call_order.get(m.tool_call_id or "", 0)))
    pieces: list[Piece] = []
    for i, slot in enumerate(turn.messages):
        pieces += [Piece("\n\n")] if i else []
        if slot.role == "tool":
            content = content_pieces(next(ordered).content, variant)
            pieces += [Piece("<tool_result>"), *content, Piece("</tool_result>")]
        else:
            pieces += content_pieces(slot.content, variant)
    return pieces


def content_pieces(content: str | Sequence[ContentPart], variant: str) -> list[Piece]:
    """Content as pieces, one per part and separator.

    An image is the placeholder token of a variant that has one; any other kind without text reads
    `[Unsupported KIND]`.
    """
    if isinstance(content, str):
        return [Piece(content)]
    pieces: list[Piece] = []
    for part in content:
        pieces += [Piece("\n\n")] if pieces else []
        if part.kind == "text":
            pieces.append(Piece(part.text))
        elif part.kind in _IMAGE_KINDS and variant in _IMAGE_TOKENS:
            pieces.append(Piece(_IMAGE_TOKENS[variant], is_special=True))
        else:
            pieces.append(Piece(f"[Unsupported {part.kind}]"))
    return pieces


def plain_text(content: str | Sequence[ContentPart]) -> str:
    """Content of a message that holds text only, as one string."""
    return "".join(piece.text for piece in content_pieces(content, "v4"))

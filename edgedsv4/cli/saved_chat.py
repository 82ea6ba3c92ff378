"""Conversations in saved sessions: the messages go into the session's note, as JSON.

So one file is a whole conversation, and the session in it knows the tokens of each reply. The note
is read like any JSON from outside; what is no conversation of this command is refused.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import Message, Session


def save_chat(session: Session, path: str, system: str | None, messages: Sequence[Message]) -> None:
    """Saves the session with its conversation.

    Raises:
        ConfigError, StorageError, CancelledError: as `Session.save`.
    """
    first = [] if system is None else [edgedsv4.Message("system", system)]
    entries = [_entry(message) for message in (*first, *messages)]
    session.note = json.dumps({"messages": entries}).encode() if entries else b""
    session.save(path)


def load_chat(session: Session, path: str) -> tuple[str | None, list[Message]]:
    """Takes over a saved session; its system message and its conversation.

    Raises:
        ConfigError: the file holds a session, but no conversation; the session has taken it over.
        SnapshotError, ContextFullError, StorageError, CancelledError: as `Session.load`.
    """
    session.load(path)
    if not session.note:
        return None, []
    try:
        messages = edgedsv4.messages_from_json(json.loads(session.note))
    except (ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(f"{path} holds no conversation of `edgedsv4 chat`: {error}") from error
    if messages[0].role == "system" and isinstance(messages[0].content, str):
        return messages[0].content, messages[1:]
    return None, messages


def _entry(message: Message) -> dict[str, object]:
    """A message as `messages_from_json` reads it."""
    entry: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        entry["reasoning_content"] = message.reasoning
    if message.tool_calls:
        entry["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    return entry

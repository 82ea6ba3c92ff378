"""A conversation as a file for people (Markdown) or for programs (JSON).

Markdown holds the path that is shown. JSON holds the whole tree and, as `messages`, that path in
the form of chat completions, which `edgedsv4 render` and other programs read.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from dsv4_chat.store_rows import sampling_json, storable
from edgedsv4 import Message, StorageError

if TYPE_CHECKING:
    from dsv4_chat.conversation import Conversation, Node

ExportKind = Literal["md", "json"]

FORMAT_VERSION = 1
_HEADINGS = {"user": "You", "assistant": "Assistant", "tool": "Tool result"}
_MARKS = {"stopped": "*(stopped)*", "failed": "*(failed)*", "streaming": "*(unfinished)*"}
_NAME_LENGTH = 48
_NAMES_TRIED = 1000


def to_markdown(conversation: Conversation, *, with_thinking: bool = True) -> str:
    """The shown path as Markdown, thinking folded."""
    parts = [f"# {' '.join(conversation.title.split()) or 'Conversation'}"]
    parts.append(f"*{_date(conversation.created)}*")
    if conversation.system:
        parts += ["## System", conversation.system.strip("\n")]
    for node in conversation.path():
        parts += [f"## {_HEADINGS[node.role]}", *_turn(node, with_thinking=with_thinking)]
    return storable("\n\n".join(parts) + "\n")


def to_json(conversation: Conversation) -> str:
    """Everything of the conversation as one JSON document."""
    document = {
        "format": "dsv4-chat",
        "version": FORMAT_VERSION,
        "id": conversation.id,
        "title": conversation.title,
        "created": conversation.created,
        "updated": conversation.updated,
        "system": conversation.system,
        "sampling": _sampling(conversation),
        "thinking": conversation.thinking,
        "active": conversation.active,
        "context_start": conversation.context_start,
        "messages": [
            _message_json(message) for message in conversation.to_messages(with_dropped=True)
        ],
        "turns": [dataclasses.asdict(node) for node in conversation.nodes.values()],
    }
    return storable(json.dumps(document, ensure_ascii=False, indent=2, allow_nan=False)) + "\n"


def write_export(
    conversation: Conversation,
    kind: ExportKind,
    path: Path | None = None,
    *,
    folder: Path | None = None,
) -> Path:
    """Write a conversation into a new file; an existing one is never touched.

    Args:
        conversation: what to write.
        kind: `md` or `json`.
        path: the file; None makes a name of the title.
        folder: where a made name is put; None for the working directory.

    Returns:
        The file.

    Raises:
        StorageError: it exists, or cannot be written.
    """
    text = to_markdown(conversation) if kind == "md" else to_json(conversation)
    if path is not None:
        _write_new(path.expanduser(), text)
        return path.expanduser()
    stem = file_stem(conversation.title)
    for number in range(1, _NAMES_TRIED):
        name = f"{stem}{'' if number == 1 else f'-{number}'}.{kind}"
        made = (folder or Path()) / name
        if not made.exists():
            _write_new(made, text)
            return made
    raise StorageError("a thousand exports of this name are there; name a file", path=stem)


def file_stem(title: str) -> str:
    """A file name for a title, without suffix: letters, digits and dashes of any script."""
    words = "-".join(re.findall(r"\w+", title.lower()))
    return words[:_NAME_LENGTH].strip("-_") or "conversation"


def _write_new(path: Path, text: str) -> None:
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise StorageError(
            "this file exists; name another one", path=path, errno=error.errno
        ) from error
    except OSError as error:
        raise StorageError(error.strerror or str(error), path=path, errno=error.errno) from error


def _turn(node: Node, *, with_thinking: bool) -> list[str]:
    parts = []
    if node.reasoning and with_thinking:
        tokens = node.outcome.thinking_tokens if node.outcome is not None else 0
        count = f" ({tokens:,} tokens)" if tokens else ""
        reasoning = node.reasoning.strip("\n")
        parts += [f"<details><summary>Thinking{count}</summary>", reasoning, "</details>"]
    if node.content:
        content = node.content.strip("\n")
        parts.append(_fenced(content) if node.role == "tool" else content)
    for call in node.tool_calls:
        parts += [f"Call of `{call.name}`:", _fenced(_pretty(call.arguments), "json")]
    if node.state in _MARKS:
        parts.append(_MARKS[node.state])
    return parts


def _fenced(text: str, language: str = "") -> str:
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def _pretty(arguments: str) -> str:
    try:
        return json.dumps(json.loads(arguments), ensure_ascii=False, indent=2)
    except ValueError:
        return arguments


def _date(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def _sampling(conversation: Conversation) -> dict[str, object]:
    """The sampling options; JSON has no infinity, so a ban is the text `-inf`."""
    biases = conversation.sampling.logit_bias
    shown = {str(key): bias if math.isfinite(bias) else str(bias) for key, bias in biases.items()}
    return {**sampling_json(conversation.sampling), "logit_bias": shown}


def _message_json(message: Message) -> dict[str, object]:
    fields: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        fields["reasoning_content"] = message.reasoning
    if message.tool_calls:
        fields["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for call in message.tool_calls
        ]
    if message.tool_call_id is not None:
        fields["tool_call_id"] = message.tool_call_id
    return fields

"""Validation documents in a file: one JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.text.messages import Message, ToolCall
from pocket.documents import Check, Document


@dataclass(frozen=True, slots=True)
class Item:
    """One document of a validation set."""

    set_name: str
    seed: int
    document: Document


def validation_path(path: Path) -> Path:
    """The file itself, given it or its folder."""
    return path if path.suffix == ".jsonl" else path / "validation.jsonl"


def write_items(path: Path, items: Iterable[Item]) -> int:
    """Write the file, complete or not at all.

    Args:
        path: file to write (a name that ends in `.jsonl`), or a folder for `validation.jsonl`.
        items: what to write.

    Returns:
        Number of documents.
    """
    path = validation_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    count = 0
    with partial.open("w", encoding="utf-8") as handle:
        for item in items:
            handle.write(json.dumps(_to_json(item)) + "\n")
            count += 1
    partial.replace(path)
    return count


def read_items(path: Path) -> Iterator[Item]:
    """The documents of a validation file.

    Args:
        path: the file, or its folder.

    Raises:
        FormatError: a line is not a validation document.
    """
    path = validation_path(path)
    with path.open(encoding="utf-8") as handle:
        for number, line in enumerate(handle, 1):
            try:
                yield _from_json(json.loads(line))
            except (ValueError, KeyError, TypeError, ConfigError) as error:
                raise FormatError(
                    f"line {number} is no validation document: {error}", path=path
                ) from error


def _to_json(item: Item) -> dict[str, object]:
    document = item.document
    return {
        "set": item.set_name,
        "seed": item.seed,
        "task": document.task,
        "thinking": document.thinking,
        "messages": [_message_to_json(message) for message in document.messages],
        "text": document.text,
        "tools": list(document.tools),
        "checks": [
            {"message": i, "expected": check.expected, "scorer": check.scorer}
            for i, check in document.checks.items()
        ],
        "nats": document.nats,
        "answer_nats": document.answer_nats,
        "floor_is_exact": document.floor_is_exact,
    }


def _message_to_json(message: Message) -> dict[str, object]:
    value: dict[str, object] = {"role": message.role, "content": message.content}
    if message.reasoning:
        value["reasoning"] = message.reasoning
    if message.tool_calls:
        value["tool_calls"] = [[call.id, call.name, call.arguments] for call in message.tool_calls]
    if message.tool_call_id is not None:
        value["tool_call_id"] = message.tool_call_id
    return value


def _from_json(value: Mapping[str, object]) -> Item:
    document = Document(
        task=str(value["task"]),
        messages=tuple(_message_from_json(message) for message in _objects(value["messages"])),
        text=str(value["text"]),
        thinking=str(value["thinking"]),
        tools=tuple(_objects(value["tools"])),
        checks={
            _integer(check["message"]): Check(str(check["expected"]), str(check["scorer"]))
            for check in _objects(value["checks"])
        },
        nats=_number(value["nats"]),
        answer_nats=_number(value["answer_nats"]),
        floor_is_exact=bool(value["floor_is_exact"]),
    )
    return Item(str(value["set"]), _integer(value["seed"]), document)


def _message_from_json(value: Mapping[str, object]) -> Message:
    calls = value.get("tool_calls", [])
    if not isinstance(calls, list):
        raise TypeError("tool_calls must be a list")
    call_id = value.get("tool_call_id")
    return Message(
        str(value["role"]),
        str(value["content"]),
        reasoning=str(value.get("reasoning", "")),
        tool_calls=tuple(ToolCall(*map(str, call)) for call in calls),
        tool_call_id=None if call_id is None else str(call_id),
    )


def _objects(value: object) -> list[Mapping[str, object]]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise TypeError("expected a list of objects")
    return value


def _integer(value: object) -> int:
    if not isinstance(value, int):
        raise TypeError(f"expected an integer, found {value!r}")
    return value


def _number(value: object) -> float:
    if not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, found {value!r}")
    return float(value)

"""Conversations from JSON in the shape of OpenAI's chat completions; a fault names its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from edgedsv4.errors import ConfigError
from edgedsv4.text.dsml import tool_schemas
from edgedsv4.text.messages import ROLES, ContentPart, Message, Schema, ToolCall

_CHAT_KEYS = ("messages", "tools", "response_format", "tool_choice")


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation with what the document said beside its messages."""

    messages: list[Message]
    tools: tuple[Schema, ...] = ()
    response_format: Mapping[str, object] | None = None
    tool_choice: str | Mapping[str, object] = "auto"


def messages_from_json(document: object) -> list[Message]:
    """The messages of a parsed JSON document; see `chat_from_json`."""
    return chat_from_json(document).messages


def chat_from_json(document: object) -> Chat:
    """Read a conversation from parsed JSON.

    Args:
        document: a list of messages, or an object with `messages` and optionally `tools`,
            `response_format` and `tool_choice`. A message has `role`, `content` (text, null, or a
            list of parts), and where its role allows `reasoning_content`, `tool_calls`,
            `tool_call_id`, `tools`, `task` and `prefix`.

    Raises:
        ConfigError: any malformed shape; the message starts with the path, such as
            `messages[2].tool_calls[0].function.name`.
    """
    if isinstance(document, Mapping):
        unknown = sorted(str(key) for key in document if key not in _CHAT_KEYS)
        if unknown:
            raise ConfigError(f"{unknown[0]}: unknown key, expected {', '.join(_CHAT_KEYS)}")
        fields = document
    else:
        fields = {"messages": document}
    messages = [
        _message(_object(entry, f"messages[{i}]"), f"messages[{i}]")
        for i, entry in enumerate(_list(fields.get("messages"), "messages"))
    ]
    if not messages:
        raise ConfigError("messages must hold at least one message, found none")
    response_format = fields.get("response_format")
    choice = fields.get("tool_choice")
    return Chat(
        messages=messages,
        tools=tool_schemas(_optional_list(fields, "tools", "tools")),
        response_format=None
        if response_format is None
        else _object(response_format, "response_format"),
        tool_choice="auto"
        if choice is None
        else (choice if isinstance(choice, str) else _object(choice, "tool_choice")),
    )


def _message(entry: Mapping[str, object], path: str) -> Message:
    role = entry.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise ConfigError(f"{path}.role must be one of {', '.join(ROLES)}, found {role!r}")
    calls = _optional_list(entry, "tool_calls", f"{path}.tool_calls")
    try:
        return Message(
            role,
            _content(entry.get("content"), f"{path}.content"),
            reasoning=_optional_text(entry, "reasoning_content", path) or "",
            tool_calls=tuple(
                _tool_call(_object(call, where), where)
                for call, where in ((c, f"{path}.tool_calls[{i}]") for i, c in enumerate(calls))
            ),
            tool_call_id=_optional_text(entry, "tool_call_id", path),
            tools=tool_schemas(_optional_list(entry, "tools", f"{path}.tools"), f"{path}.tools"),
            task=_optional_text(entry, "task", path),
            is_prefix=_flag(entry.get("prefix"), f"{path}.prefix"),
        )
    except ConfigError as error:
        text = str(error)
        raise error if text.startswith(path) else ConfigError(f"{path}: {text}") from error


def _content(value: object, path: str) -> str | tuple[ContentPart, ...]:
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be text, null or a list of parts, found {_kind(value)}")
    return tuple(_part(part, f"{path}[{i}]") for i, part in enumerate(value))


def _part(value: object, path: str) -> ContentPart:
    if isinstance(value, str):
        return ContentPart(value)
    part = _object(value, path)
    kind = _text(part.get("type"), f"{path}.type")
    if kind != "text":
        return ContentPart(kind=kind)
    return ContentPart(_text(part.get("text"), f"{path}.text"))


def _tool_call(entry: Mapping[str, object], path: str) -> ToolCall:
    function = _object(entry.get("function"), f"{path}.function")
    name = _text(function.get("name"), f"{path}.function.name")
    if not name:
        raise ConfigError(f"{path}.function.name must not be empty")
    arguments = function.get("arguments", "{}")
    return ToolCall(
        id=_optional_text(entry, "id", path) or "",
        name=name,
        arguments=_text(arguments, f"{path}.function.arguments"),
    )


def _object(value: object, path: str) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} must be an object, found {_kind(value)}")
    return value


def _list(value: object, path: str) -> Sequence[object]:
    if not isinstance(value, (list, tuple)):
        raise ConfigError(f"{path} must be a list, found {_kind(value)}")
    return value


def _optional_list(entry: Mapping[str, object], key: str, path: str) -> Sequence[object]:
    value = entry.get(key)
    return [] if value is None else _list(value, path)


def _text(value: object, path: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{path} must be a string, found {_kind(value)}")
    return value


def _optional_text(entry: Mapping[str, object], key: str, path: str) -> str | None:
    value = entry.get(key)
    return None if value is None else _text(value, f"{path}.{key}")


def _flag(value: object, path: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{path} must be true or false, found {_kind(value)}")
    return bool(value)


def _kind(value: object) -> str:
    names = {type(None): "null or nothing", dict: "an object", list: "a list", str: "a string"}
    return names.get(type(value), repr(value))

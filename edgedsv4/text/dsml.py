"""DSML, the markup of tool calls: tag names, the tool block of the prompt, calls of past turns.

Only the `｜DSML｜` inside a tag is an added token; the rest of a tag, and everything a caller
supplied, is plain text.
Source: `encoding_dsv4.py` of the DeepSeek-V4 and V4.1 checkpoints. Nothing is escaped, as there.
"""

# ruff: noqa: RUF001, RUF002 (the full-width bar is part of the token texts)

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from edgedsv4.errors import ConfigError
from edgedsv4.text.messages import Piece, Schema, ToolCall
from edgedsv4.text.special_tokens import DSML, END_THINK, THINK

_TOOL_BLOCK = """## Tools

You have access to a set of tools to help answer the user's question. \
You can invoke tools by writing a "<｜DSML｜{block}>" block like the following:

<｜DSML｜{block}>
<｜DSML｜{invoke} name="$TOOL_NAME">
<｜DSML｜{parameter} name="$PARAMETER_NAME" string="true|false">\
$PARAMETER_VALUE</｜DSML｜{parameter}>
...
</｜DSML｜{invoke}>
<｜DSML｜{invoke} name="$TOOL_NAME2">
...
</｜DSML｜{invoke}>
</｜DSML｜{block}>

String parameters should be specified as is and set `string="true"`. \
For all other types (numbers, booleans, arrays, objects), pass the value in JSON format \
and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside \
<think>...</think> BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
_TOOL_BLOCK_END = (
    "\n\nYou MUST strictly follow the above defined tool name and parameter schemas"
    " to invoke tool calls.\n"
)
_SPECIAL = re.compile(f"({re.escape(DSML)}|{re.escape(THINK)}|{re.escape(END_THINK)})")


@dataclass(frozen=True, slots=True)
class TagNames:
    """What follows `｜DSML｜` inside the tags of one variant."""

    block: str
    invoke: str
    parameter: str


V4_TAGS = TagNames("tool_calls", "invoke", "parameter")
V41_TAGS = TagNames(" calls", " invoke", " parameter")


def tag_names(variant: str) -> TagNames:
    """The tag names of a prompt variant; those of V4.1 carry a leading space."""
    return V41_TAGS if variant == "v4.1" else V4_TAGS


def template_pieces(text: str) -> list[Piece]:
    """Split text of the template: its `｜DSML｜`, `<think>`, `</think>` are added tokens."""
    parts = _SPECIAL.split(text)
    return [Piece(part, bool(i % 2)) for i, part in enumerate(parts) if part]


def to_json(value: object) -> str:
    """JSON as the models were trained on: `", "` and `": "`, key order kept, letters not escaped.

    Raises:
        ConfigError: a value JSON cannot hold.
    """
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(f"not representable as JSON: {error}") from error


def tool_block(tools: Sequence[Schema], tags: TagNames) -> list[Piece]:
    """The pieces that announce tools to the model, ending in one newline.

    Args:
        tools: function schemas, already checked by `tool_schemas`.
        tags: names of the variant.
    """
    head = _TOOL_BLOCK.format(block=tags.block, invoke=tags.invoke, parameter=tags.parameter)
    lines = "\n".join(to_json(tool) for tool in tools)
    return [*template_pieces(head), Piece(lines), Piece(_TOOL_BLOCK_END)]


def tool_schemas(tools: Iterable[object], where: str = "tools") -> tuple[Schema, ...]:
    """Check tool definitions, and take them out of OpenAI's `{"function": …}` wrapper.

    Args:
        tools: one mapping per tool, with a `name`.
        where: name of the list in messages.

    Raises:
        ConfigError: an entry that is not an object, has no name, or cannot be written as JSON.
    """
    if isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Iterable):
        raise ConfigError(f"{where} must be a list of objects, found {type(tools).__name__}")
    return tuple(_tool_schema(tool, f"{where}[{i}]") for i, tool in enumerate(tools))


def _tool_schema(tool: object, where: str) -> Schema:
    if isinstance(tool, Mapping) and "function" in tool and "name" not in tool:
        tool, where = tool["function"], f"{where}.function"
    if not isinstance(tool, Mapping):
        raise ConfigError(f"{where} must be an object, found {type(tool).__name__}")
    name = tool.get("name")
    if not isinstance(name, str) or not name:
        raise ConfigError(f"{where}.name must be a non-empty string, found {name!r}")
    try:
        to_json(tool)
    except ConfigError as error:
        raise ConfigError(f"{where} ({name}) is {error}") from error
    return tool


def call_block(calls: Sequence[ToolCall], tags: TagNames) -> list[Piece]:
    """The pieces of an assistant turn's calls, led by the empty line after the content."""
    pieces = [Piece("\n\n"), *_tag(tags.block), Piece("\n")]
    for call in calls:
        pieces += [*_tag(f'{tags.invoke} name="{call.name}"'), Piece("\n")]
        pieces += _parameters(call.arguments, tags)
        pieces += [Piece("\n"), *_tag(tags.invoke, is_closing=True), Piece("\n")]
    return [*pieces, *_tag(tags.block, is_closing=True)]


def open_call_block(tags: TagNames) -> list[Piece]:
    """The opening of a call block, for a prompt that demands a call."""
    return [Piece("\n\n"), *_tag(tags.block), Piece("\n")]


def _tag(inner: str, *, is_closing: bool = False) -> list[Piece]:
    return [Piece("</" if is_closing else "<"), Piece(DSML, is_special=True), Piece(f"{inner}>")]


def _parameters(arguments: str, tags: TagNames) -> list[Piece]:
    pieces: list[Piece] = []
    for name, value in _argument_items(arguments):
        is_string = isinstance(value, str)
        flag = "true" if is_string else "false"
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        pieces += [Piece("\n")] if pieces else []
        pieces += _tag(f'{tags.parameter} name="{name}" string="{flag}"')
        pieces += [Piece(text), *_tag(tags.parameter, is_closing=True)]
    return pieces


def _argument_items(arguments: str) -> list[tuple[str, object]]:
    """Name and value of each argument; text that is no JSON object goes whole to `arguments`."""
    try:
        value = json.loads(arguments)
        # Writing it back can still fail: an integer too long for `str`, nesting too deep.
        json.dumps(value)
    except (ValueError, RecursionError):
        value = None
    if isinstance(value, dict):
        return list(value.items())
    return [("arguments", arguments)]

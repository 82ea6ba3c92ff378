"""Render a conversation into the exact prompt the models were trained on.

Only what the template writes becomes a control token: the text of messages, names and schemas is
always plain, so a user cannot type one. Source: `encoding_dsv4.py` of the DeepSeek-V4, V4-0731 and
V4.1 checkpoints, and `deepseek-recipe` 0.2.0 where it is stricter (system messages, prefixes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from edgedsv4.errors import ConfigError
from edgedsv4.text.dsml import (
    TagNames,
    call_block,
    open_call_block,
    tag_names,
    to_json,
    tool_block,
    tool_schemas,
)
from edgedsv4.text.effort import Effort, Thinking, Variant, resolve_effort
from edgedsv4.text.messages import (
    ContentPart,
    Message,
    Piece,
    Prompt,
    Schema,
    Section,
    ToolCall,
)
from edgedsv4.text.special_tokens import (
    ASSISTANT,
    BOS,
    END_THINK,
    EOS,
    LATEST_REMINDER,
    SYSTEM,
    TASK_TOKENS,
    THINK,
    USER,
)
from edgedsv4.text.turns import Turn, content_pieces, group_turns, plain_text, user_pieces

__all__ = [
    "ContentPart",
    "Message",
    "Piece",
    "Prompt",
    "PromptOptions",
    "ToolCall",
    "render_prompt",
]

_RESPONSE_FORMAT = (
    "\n\n## Response Format:\n\nYou MUST strictly adhere to the following schema to reply:\n"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """Choices of one rendering; `render_prompt` checks them against the variant."""

    thinking: Effort = "high"
    """Thinking mode or effort, see `effort.resolve_effort`; `none` turns thinking off."""
    tools: Sequence[Schema] = ()
    """Tools the model may call: function schemas, bare or in OpenAI's wrapper."""
    tool_choice: str | Mapping[str, object] = "auto"
    """`auto`, `none`, `required`, or OpenAI's object that names a function.

    A demanded call excludes thinking."""
    response_format: Mapping[str, object] | None = None
    """JSON schema of the reply, bare or in OpenAI's `json_schema` wrapper.

    OpenAI's `text` and `json_object` add nothing to the prompt."""
    drop_thinking: bool = True
    """Leave out the reasoning before the last question; never done when tools are defined."""
    continue_final: bool = False
    """The reply continues the last, assistant message; same as its `is_prefix`."""


def render_prompt(
    messages: Sequence[Message],
    *,
    variant: Variant | str = "v4",
    options: PromptOptions | None = None,
) -> Prompt:
    """Render a conversation.

    Args:
        messages: at least one message, oldest first.
        variant: `v4`, `v4-0731`, `v4-vision` or `v4.1`.
        options: thinking mode, tools and the rest; None takes the defaults.

    Raises:
        ConfigError: no messages, a prefix that is not the last assistant message, a mode the
            variant lacks, tools or a response format that are not JSON objects, or a demanded call
            that cannot be made.
    """
    if not messages:
        raise ConfigError("messages must hold at least one message, found none")
    return _Renderer.of(messages, variant, options or PromptOptions()).render(messages)


@dataclass(slots=True)
class _Renderer:
    """One rendering: the resolved options and the pieces written so far."""

    variant: str
    tags: TagNames
    thinking: Thinking
    tools: tuple[Schema, ...]
    schema: Mapping[str, object] | None
    demands_call: bool
    is_prefix: bool
    keeps_reasoning: bool
    pieces: list[Piece] = field(default_factory=list)
    opens_in: Section = "content"
    is_continuation: bool = False

    @classmethod
    def of(cls, messages: Sequence[Message], variant: str, options: PromptOptions) -> _Renderer:
        thinking = resolve_effort(options.thinking, variant)
        is_prefix = _check_prefix(messages, options.continue_final)
        tools = tool_schemas(options.tools)
        demands_call = _demands_call(options.tool_choice, tools)
        if demands_call and (thinking.is_on or is_prefix):
            raise ConfigError(
                "tool_choice can demand a call only with thinking none and a new turn,"
                f" found thinking {options.thinking!r}{' and a prefix' if is_prefix else ''}"
            )
        if options.tool_choice == "none":
            tools = ()
        has_tools = bool(tools) or any(message.tools for message in messages)
        return cls(
            variant=variant,
            tags=tag_names(variant),
            thinking=thinking,
            tools=tools,
            schema=_response_schema(options.response_format),
            demands_call=demands_call,
            is_prefix=is_prefix,
            keeps_reasoning=has_tools or not options.drop_thinking,
        )

    def render(self, messages: Sequence[Message]) -> Prompt:
        self._special(BOS)
        turns = self._open_v41(messages) if self.variant == "v4.1" else self._open_v4(messages)
        last_question = _last_question(turns)
        if self.thinking.is_on and not self.keeps_reasoning:
            # As in the encoder: after merging, and only this internal role.
            turns = [
                turn
                for i, turn in enumerate(turns)
                if turn.role != "developer" or i >= last_question
            ]
            last_question = _last_question(turns)
        for i, turn in enumerate(turns):
            is_last = i == len(turns) - 1
            if turn.role == "assistant":
                self._assistant(
                    turn.messages[0],
                    task=_pending_task(turns[:i]),
                    with_reasoning=self.keeps_reasoning or i > last_question,
                    is_prefix=is_last and self.is_prefix,
                )
            else:
                self._question(turn)
        return self._close(messages[-1], _pending_task(turns))

    def _special(self, *texts: str) -> None:
        self.pieces += [Piece(text, is_special=True) for text in texts]

    def _plain(self, text: str) -> None:
        self.pieces.append(Piece(text))

    def _open_v4(self, messages: Sequence[Message]) -> list[Turn]:
        """Write what precedes the first turn, with all system messages of the conversation."""
        systems = [plain_text(m.content) for m in messages if m.role == "system"]
        self._plain(self.thinking.prefix)
        self._plain("\n\n".join(text for text in systems if text))
        self._announcements(self.tools, with_format=True)
        return group_turns(m for m in messages if m.role != "system")

    def _open_v41(self, messages: Sequence[Message]) -> list[Turn]:
        """Write the effort line and a leading system turn; empty system messages do not exist."""
        turns = group_turns(m for m in messages if m.role != "system" or plain_text(m.content))
        has_system = bool(turns) and turns[0].role == "system"
        text = plain_text(turns[0].messages[0].content) if has_system else ""
        if self.thinking.is_on or text or self.tools or self.schema is not None:
            self._special(SYSTEM)
            self._plain(self.thinking.prefix + text)
            self._announcements(self.tools, with_format=True)
        return turns[1:] if has_system else turns

    def _announcements(self, tools: Sequence[Schema], *, with_format: bool) -> None:
        if tools:
            self._plain("\n\n")
            self.pieces += tool_block(tools, self.tags)
        if with_format and self.schema is not None:
            self._plain(_RESPONSE_FORMAT + to_json(self.schema))

    def _question(self, turn: Turn) -> None:
        """Write a turn that is not the assistant's."""
        content = turn.messages[0].content
        if turn.role == "system":
            self._special(SYSTEM)
            self._plain(plain_text(content))
        elif turn.role == "latest_reminder":
            self._special(LATEST_REMINDER)
            self._plain(plain_text(content))
        else:
            self._special(USER)
            self.pieces += user_pieces(turn, self.variant)
            self._announcements(tool_schemas(turn.messages[0].tools), with_format=False)

    def _header(self, task: str | None, *, thinks: bool) -> bool:
        """Write what stands before a reply; returns whether a thinking section is open."""
        if task is not None and task != "action":
            self._special(TASK_TOKENS[task])
            return False
        if task is not None:
            self._special(ASSISTANT, THINK if self.thinking.is_on else END_THINK, TASK_TOKENS[task])
            return False
        self._special(ASSISTANT, THINK if thinks else END_THINK)
        return thinks

    def _assistant(
        self, message: Message, *, task: str | None, with_reasoning: bool, is_prefix: bool
    ) -> None:
        content = content_pieces(message.content, self.variant)
        has_content = any(piece.text for piece in content)
        thinks = self._header(task, thinks=self.thinking.is_on and with_reasoning)
        if thinks:
            self._plain(message.reasoning)
        if is_prefix and thinks and not has_content:
            self.opens_in, self.is_continuation = "thinking", bool(message.reasoning)
            return
        if thinks:
            self._special(END_THINK)
        self.pieces += content
        if message.tool_calls:
            self.pieces += call_block(message.tool_calls, self.tags)
        if is_prefix:
            self.is_continuation = has_content
        else:
            self._special(EOS)

    def _close(self, last: Message, task: str | None) -> Prompt:
        """Open the reply, unless the last message is the assistant's own."""
        if last.role != "assistant":
            thinks = self._header(task, thinks=self.thinking.is_on)
            self.opens_in = "thinking" if thinks else "content"
            if self.demands_call:
                self.pieces += open_call_block(self.tags)
                self.opens_in = "tool_calls"
        return Prompt(
            pieces=_joined(self.pieces),
            opens_in=self.opens_in,
            is_continuation=self.is_continuation,
            awaits_reply=self.is_prefix or last.role != "assistant",
        )


def _joined(pieces: Sequence[Piece]) -> tuple[Piece, ...]:
    """Join neighbouring plain pieces: a run between two control tokens is tokenized as one."""
    joined: list[Piece] = []
    run: list[str] = []
    for piece in [*pieces, Piece("", is_special=True)]:
        if not piece.is_special:
            run.append(piece.text)
            continue
        text = "".join(run)
        joined += [Piece(text), piece] if text else [piece]
        run = []
    return tuple(joined[:-1])


def _last_question(turns: Sequence[Turn]) -> int:
    """Index of the last turn that the assistant answers; -1 without one."""
    return max((i for i, turn in enumerate(turns) if turn.is_user_like), default=-1)


def _pending_task(turns: Sequence[Turn]) -> str | None:
    """The quick task that a turn after `turns` answers; a reminder in between changes nothing."""
    for turn in reversed(turns):
        if turn.role != "latest_reminder":
            return turn.task
    return None


def _check_prefix(messages: Sequence[Message], continue_final: bool) -> bool:
    """Whether the last message is to be continued."""
    for i, message in enumerate(messages[:-1]):
        if message.is_prefix:
            raise ConfigError(f"messages[{i}] is a prefix, only the last message can be one")
    last = messages[-1]
    if continue_final and last.role != "assistant":
        raise ConfigError(
            f"continue_final needs an assistant message at the end, found role {last.role!r}"
        )
    is_prefix = last.is_prefix or continue_final
    if is_prefix and last.tool_calls:
        raise ConfigError("a message to be continued cannot hold tool calls")
    return is_prefix


def _demands_call(choice: str | Mapping[str, object], tools: Sequence[Schema]) -> bool:
    """Whether the reply must be a call; a named choice must name one of `tools`."""
    if choice in ("auto", "none"):
        return False
    names = [str(tool["name"]) for tool in tools]
    if isinstance(choice, Mapping):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, Mapping) else None
        if name not in names:
            raise ConfigError(
                f"tool_choice must name one of the tools ({', '.join(names)}), found {name!r}"
            )
        return True
    if choice != "required":
        raise ConfigError(
            "tool_choice must be auto, none, required or an object that names a function,"
            f" found {choice!r}"
        )
    if not names:
        raise ConfigError("tool_choice required needs at least one tool, found none")
    return True


def _response_schema(value: Mapping[str, object] | None) -> Mapping[str, object] | None:
    """The JSON schema inside a response format; None when it asks for no schema."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        raise ConfigError(f"response_format must be an object, found {type(value).__name__}")
    if value.get("type") in ("text", "json_object"):
        return None
    schema: object = value
    if value.get("type") == "json_schema":
        wrapper = value.get("json_schema")
        schema = wrapper.get("schema") if isinstance(wrapper, Mapping) else None
    if not isinstance(schema, Mapping):
        raise ConfigError("response_format.json_schema.schema must be an object")
    try:
        to_json(schema)
    except ConfigError as error:
        raise ConfigError(f"response_format is {error}") from error
    return schema

"""Functions of the header about conversations: messages to prompts, text of replies to events."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from edgedsv4 import (
    CancelledError,
    Chat,
    ConfigError,
    FormatError,
    Message,
    PromptOptions,
    ReplyParser,
    ThinkingEvent,
    ToolCall,
    ToolCallEvent,
    chat_from_json,
)
from edgedsv4.capi.bridge import AbiError, exported, ffi, lib
from edgedsv4.capi.exclusive import Exclusive
from edgedsv4.capi.handles import HandleTable
from edgedsv4.capi.model import engine_of
from edgedsv4.capi.values import (
    bounded,
    checked_size,
    put_text,
    put_tokens,
    read_struct,
    required,
    text_of,
    tokens_of,
    word,
    word_of,
    write_struct,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from edgedsv4 import Engine, Prompt, ReplyEvent

_MESSAGE = "dsv4_message"
_OPTIONS = "dsv4_prompt_options"
_NO_MESSAGE = ffi.new(f"{_MESSAGE} *")
_DEFAULTS = ffi.new(f"{_OPTIONS} *")
_DEFAULTS.struct_size = ffi.sizeof(_OPTIONS)
_DEFAULTS.thinking = word(str(PromptOptions().thinking))
_DEFAULTS.keep_thinking = not PromptOptions().drop_thinking
_MOST_MESSAGES = 1 << 20
_MOST_CALLS = 1 << 16
_SMALL_NUMBER = re.compile("[0-9]{1,4}")


class EventSink:
    """Hands the events of one reply to a callback; one record serves all of them.

    Args:
        callback: a `dsv4_event_fn`, or NULL.
        user: handed to it.
    """

    def __init__(self, callback: Any, user: Any) -> None:
        self._callback = callback
        self._user = user
        self._event = ffi.new("dsv4_event *")
        self._event.struct_size = ffi.sizeof("dsv4_event")

    def send(self, event: ReplyEvent, tokens: int = 0) -> bool:
        """Whether the callback wants no more."""
        if not self._callback:
            return False
        record = self._event
        record.tokens = tokens
        if isinstance(event, ToolCallEvent):
            return self._send_call(event)
        record.kind = (
            lib.DSV4_EVENT_THINKING if isinstance(event, ThinkingEvent) else lib.DSV4_EVENT_TEXT
        )
        data = event.text.encode("utf-8", "replace")
        record.text.data = buffer = ffi.from_buffer(data)
        record.text.size = len(buffer)
        return bool(lib.entry_event(self._callback, self._user, record))

    def _send_call(self, event: ToolCallEvent) -> bool:
        call = ffi.new("dsv4_event *", self._event[0])
        call.kind, call.index = lib.DSV4_EVENT_TOOL_CALL, event.index
        call.text = {"data": ffi.NULL, "size": 0}
        kept = []
        for name in ("id", "name", "arguments"):
            kept.append(ffi.from_buffer(getattr(event, name).encode("utf-8", "replace")))
            setattr(call, name, {"data": kept[-1], "size": len(kept[-1])})
        return bool(lib.entry_event(self._callback, self._user, call))


def messages_of(pointer: Any, count: int) -> list[Message]:
    """The messages of an array, whose elements are all as large as the first says."""
    if not 1 <= count <= _MOST_MESSAGES:
        what = f"count must be 1..{_MOST_MESSAGES} messages, found {count}"
        raise ConfigError(what, name="count")
    stride = checked_size(required(pointer, "messages").struct_size, _MESSAGE)
    start = ffi.cast("char *", pointer)
    messages = []
    for place in range(count):
        entry = ffi.cast(f"{_MESSAGE} *", start + place * stride)
        if entry.struct_size != stride:
            raise AbiError(
                f"messages[{place}].struct_size is {entry.struct_size}, messages[0] has {stride}"
            )
        messages.append(_message(read_struct(entry, _MESSAGE, _NO_MESSAGE), f"messages[{place}]"))
    return messages


def _message(entry: Any, name: str) -> Message:
    calls = []
    if entry.tool_call_count:
        required(entry.tool_calls, f"{name}.tool_calls")
    for place in range(bounded(entry.tool_call_count, f"{name}.tool_call_count", _MOST_CALLS)):
        call = entry.tool_calls[place]
        texts = [
            text_of(getattr(call, part), f"{name}.tool_calls[{place}].{part}")
            for part in ("id", "name", "arguments")
        ]
        calls.append(ToolCall(texts[0], texts[1], texts[2] or "{}"))
    try:
        return Message(
            text_of(entry.role, f"{name}.role"),
            text_of(entry.content, f"{name}.content"),
            reasoning=text_of(entry.reasoning, f"{name}.reasoning"),
            tool_calls=tuple(calls),
            tool_call_id=text_of(entry.tool_call_id, f"{name}.tool_call_id") or None,
            is_prefix=bool(entry.is_prefix),
        )
    except ConfigError as error:
        text = str(error)
        raise error if text.startswith(name) else ConfigError(f"{name}: {text}") from None


def prompt_options_of(pointer: Any) -> PromptOptions:
    """Prompt options of a struct, or the defaults for NULL."""
    if not pointer:
        return PromptOptions()
    struct = read_struct(pointer, _OPTIONS, _DEFAULTS)
    thinking = word_of(struct.thinking, "thinking")
    options = PromptOptions(
        thinking=int(thinking) if _SMALL_NUMBER.fullmatch(thinking) else thinking,
        drop_thinking=not struct.keep_thinking,
    )
    tools = _json_of(struct.tools_json, "tools_json", list)
    choice = _json_of(struct.tool_choice_json, "tool_choice_json", (str, dict))
    schema = _json_of(struct.response_format_json, "response_format_json", dict)
    if tools is not None:
        options = replace(options, tools=tools)
    if choice is not None:
        options = replace(options, tool_choice=choice)
    if schema is not None:
        options = replace(options, response_format=schema)
    return options


def _json_of(text: Any, name: str, kind: type | tuple[type, ...]) -> Any:
    """A JSON value of some kind; None for an empty text."""
    document = text_of(text, name)
    if not document:
        return None
    try:
        value = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{name} is not JSON: {error}", name=name) from None
    if not isinstance(value, kind):
        what = f"{name} holds {type(value).__name__}, which it cannot be"
        raise ConfigError(what, name=name)
    return value


def chat_of(text: Any, options: PromptOptions) -> tuple[list[Message], PromptOptions]:
    """A conversation as JSON, and the options with what it says beside its messages."""
    document = text_of(text, "chat")
    try:
        parsed = json.loads(document)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"chat is not JSON: {error}") from None
    chat = chat_from_json(parsed)
    return chat.messages, _with_chat(chat, options)


def _with_chat(chat: Chat, options: PromptOptions) -> PromptOptions:
    given = (options.tools, options.response_format)
    if any(given) or options.tool_choice != "auto":
        if chat.tools or chat.response_format or chat.tool_choice != "auto":
            raise ConfigError("tools and response_format stand in chat and in prompt; name one")
        return options
    return replace(
        options,
        tools=chat.tools,
        response_format=chat.response_format,
        tool_choice=chat.tool_choice,
    )


def _rendered(engine: Engine, messages: Any, count: int, options: Any) -> Prompt:
    return engine.render(messages_of(messages, count), prompt_options_of(options))


@exported
def dsv4_prompt_options_init(options: Any, struct_size: int) -> int:
    """The defaults of `PromptOptions`."""
    required(options, "options").struct_size = checked_size(struct_size, _OPTIONS)
    write_struct(options, _OPTIONS, ffi.new(f"{_OPTIONS} *", _DEFAULTS[0]))
    return 0


@exported
def dsv4_chat_render(
    engine: Any, messages: Any, count: int, options: Any, buffer: Any, capacity: int, size: Any
) -> int:
    """`Engine.render`."""
    prompt = _rendered(engine_of(engine), messages, count, options)
    return put_text(prompt.text, buffer, capacity, size)


@exported
def dsv4_chat_encode(
    engine: Any, messages: Any, count: int, options: Any, tokens: Any, capacity: int, size: Any
) -> int:
    """`Engine.render`, then `Tokenizer.encode_pieces`."""
    opened = engine_of(engine)
    prompt = _rendered(opened, messages, count, options)
    ids = opened.tokenizer.encode_pieces(prompt.pieces)
    return put_tokens(ids, tokens, capacity, size, length_name="size")


class _TokenParser:
    """A parser of tokens: decoder and parser of one reply."""

    def __init__(self, engine: Engine, prompt: Prompt) -> None:
        self.user = Exclusive("the parser")
        self._vocab_size = engine.config.vocab_size
        self._decoder = engine.tokenizer.stream()
        self._parser = ReplyParser(
            starts_in=prompt.opens_in,
            variant=engine.variant,
            is_continuation=prompt.is_continuation,
        )

    def push(self, token_ids: Iterable[int], sink: EventSink) -> bool:
        """Send the events of more tokens; whether the reply is complete."""
        for token_id in token_ids:
            if not 0 <= token_id < self._vocab_size:
                raise ConfigError(f"token ids must be 0..{self._vocab_size - 1}, found {token_id}")
            _send(self._parser.push(self._decoder.push(token_id)), sink)
        return self._parser.is_complete

    def finish(self, sink: EventSink) -> None:
        """Send what was held back."""
        _send([*self._parser.push(self._decoder.finish()), *self._parser.finish("stop")], sink)


def _send(events: Iterable[ReplyEvent], sink: EventSink) -> None:
    for event in events:
        if sink.send(event):
            raise CancelledError("stopped by the callback")


PARSERS: HandleTable[_TokenParser] = HandleTable(3, "parser")


def _parser_of(handle: Any) -> _TokenParser:
    return PARSERS.get(int(ffi.cast("uintptr_t", handle)))


@exported
def dsv4_parser_new(engine: Any, messages: Any, count: int, options: Any, out: Any) -> int:
    """A `ReplyParser` behind the prompt of a conversation."""
    required(out, "out")[0] = ffi.NULL
    opened = engine_of(engine)
    parser = _TokenParser(opened, _rendered(opened, messages, count, options))
    out[0] = ffi.cast("dsv4_parser *", PARSERS.add(parser))
    return 0


@exported
def dsv4_parser_push(
    parser: Any, tokens: Any, count: int, event: Any, user: Any, is_complete: Any
) -> int:
    """`ReplyParser.push`."""
    found = _parser_of(parser)
    with found.user.taken():
        is_done = found.push(tokens_of(tokens, count), EventSink(event, user))
        if is_complete:
            is_complete[0] = is_done
    return 0


@exported
def dsv4_parser_finish(parser: Any, event: Any, user: Any) -> int:
    """`ReplyParser.finish`."""
    found = _parser_of(parser)
    with found.user.taken():
        found.finish(EventSink(event, user))
    return 0


@exported
def dsv4_parser_free(parser: Any) -> int:
    """Forget a parser."""
    if parser:
        with _parser_of(parser).user.taken():
            PARSERS.remove(int(ffi.cast("uintptr_t", parser)))
    return 0

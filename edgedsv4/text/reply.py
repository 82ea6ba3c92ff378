"""Parse the text of a reply, as it is generated, into thinking, content and tool calls.

The result does not depend on how the text is cut into pieces: text that may still become a marker,
and newlines that may still belong to one, are held back until it is decided.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from edgedsv4.errors import ConfigError
from edgedsv4.text.dsml import tag_names
from edgedsv4.text.dsml_parser import CallMarkers, CallParser
from edgedsv4.text.messages import Section, ToolCall
from edgedsv4.text.scanner import MarkerSet, Scanner
from edgedsv4.text.special_tokens import DSML, END_THINK

_SECTIONS = ("content", "thinking", "tool_calls")


@dataclass(frozen=True, slots=True)
class TextEvent:
    """More of the content."""

    text: str


@dataclass(frozen=True, slots=True)
class ThinkingEvent:
    """More of the thinking."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallEvent:
    """A complete tool call."""

    index: int
    """Position among the calls of this reply, from 0."""
    id: str
    """`call_<index>`, for the tool message that answers it."""
    name: str
    arguments: str
    """A JSON object as text."""
    text: ClassVar[str] = ""
    """Always empty: a call prints nothing."""


ReplyEvent = TextEvent | ThinkingEvent | ToolCallEvent


@dataclass(frozen=True, slots=True)
class Reply:
    """Everything the events of a reply said."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: str
    """`tool_calls` if a call came out and the model stopped by itself, else the reason given to
    `ReplyParser.finish`; empty while the reply is unfinished."""


class ReplyParser:
    """Parses one reply; feed it with `push`, end it with `finish`, then read `reply`."""

    def __init__(
        self,
        *,
        starts_in: Section = "content",
        variant: str = "v4",
        is_continuation: bool = False,
    ) -> None:
        """Start a reply.

        Args:
            starts_in: the section that the prompt left open (`Prompt.opens_in`).
            variant: prompt variant, which decides the tag names.
            is_continuation: the section already holds text (`Prompt.is_continuation`), so leading
                newlines count.

        Raises:
            ConfigError: an unknown section.
        """
        if starts_in not in _SECTIONS:
            raise ConfigError(
                f"starts_in must be one of {', '.join(_SECTIONS)}, found {starts_in!r}"
            )
        self._markers = CallMarkers(tag_names(variant))
        self._section_ends = MarkerSet(
            [END_THINK, self._markers.open_block, self._markers.open_call]
        )
        self._scanner = Scanner()
        self._is_thinking = starts_in == "thinking"
        self._calls: CallParser | None = None
        if starts_in == "tool_calls":
            self._calls = CallParser(self._markers, self._scanner)
        self._newlines = _Newlines(has_begun=is_continuation)
        self._said = _Said()

    @property
    def is_complete(self) -> bool:
        """Whether the call block has ended: nothing that follows means anything."""
        return self._calls is not None and self._calls.is_closed

    @property
    def reply(self) -> Reply:
        """What has been said so far."""
        return self._said.reply()

    def push(self, text: str) -> list[ReplyEvent]:
        """Take in more of the reply.

        Args:
            text: the next decoded text, of any length; control tokens are already left out, but
                `<think>`, `</think>` and the DSML tags are in it.

        Returns:
            What became certain. Neighbouring events of one kind belong together.

        Raises:
            ConfigError: the reply is finished.
        """
        if self._said.finish_reason:
            raise ConfigError("the reply is finished; start another parser for the next one")
        self._scanner.feed(text)
        return self._said.record(self._sections())

    def finish(self, reason: str = "stop") -> list[ReplyEvent]:
        """End the reply.

        Text held back is given out, unless it is the start of a call block; a call that is not
        closed is dropped.

        Args:
            reason: why generation ended: `stop` when the model ended its turn, else for instance
                `length` or `cancelled`.
        """
        if self._said.finish_reason:
            return []
        events: list[ReplyEvent] = []
        rest = self._scanner.rest()
        if self._calls is None and not rest.startswith(f"<{DSML}"):
            events = self._text_events(self._newlines.push(rest) + self._newlines.finish())
        recorded = self._said.record(events)
        self._said.finish(reason)
        return recorded

    def _sections(self) -> list[ReplyEvent]:
        """Read on through thinking and content, up to a call block, and through that."""
        events: list[ReplyEvent] = []
        while self._calls is None:
            text, marker = self._scanner.take(self._section_ends)
            events += self._text_events(self._newlines.push(text))
            if marker is None:
                return events
            if marker != END_THINK:
                in_call = marker == self._markers.open_call
                self._calls = CallParser(self._markers, self._scanner, in_call=in_call)
            elif self._is_thinking:
                self._is_thinking = False
                self._newlines = _Newlines()
            else:
                events += self._text_events(self._newlines.keep())
        if self._calls.is_closed:
            self._scanner.rest()
        events += [
            self._said.call_event(call.name, call.arguments, i)
            for i, call in enumerate(self._calls.take_calls())
        ]
        return events

    def _text_events(self, text: str) -> list[ReplyEvent]:
        if not text:
            return []
        return [ThinkingEvent(text) if self._is_thinking else TextEvent(text)]


@dataclass(slots=True)
class _Newlines:
    """Drops the newlines at the start of a section, and holds back those that may end it."""

    has_begun: bool = False
    held: int = 0

    def push(self, text: str) -> str:
        """The part of `text` that is certain to be shown, after newlines held back before."""
        body = text.rstrip("\n")
        trailing = len(text) - len(body)
        if not body:
            self.held += trailing
            return ""
        shown = "\n" * self.held + body
        if not self.has_begun:
            shown = shown.lstrip("\n")
        self.has_begun, self.held = True, trailing
        return shown

    def finish(self) -> str:
        """The newlines held back, once it is clear that nothing follows them."""
        held, self.held = self.held, 0
        return "\n" * held if self.has_begun else ""

    def keep(self) -> str:
        """A dropped marker stands here: newlines so far stay held, later ones are not leading."""
        if not self.has_begun:
            self.held = 0
        self.has_begun = True
        return ""


@dataclass(slots=True)
class _Said:
    """Collects the events of a reply."""

    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    finish_reason: str = ""

    def call_event(self, name: str, arguments: str, offset: int) -> ToolCallEvent:
        index = len(self.calls) + offset
        return ToolCallEvent(index, f"call_{index}", name, arguments)

    def record(self, events: list[ReplyEvent]) -> list[ReplyEvent]:
        for event in events:
            if isinstance(event, TextEvent):
                self.text.append(event.text)
            elif isinstance(event, ThinkingEvent):
                self.reasoning.append(event.text)
            else:
                self.calls.append(ToolCall(event.id, event.name, event.arguments))
        return events

    def finish(self, reason: str) -> None:
        self.finish_reason = "tool_calls" if self.calls and reason == "stop" else reason

    def reply(self) -> Reply:
        return Reply(
            text="".join(self.text),
            reasoning="".join(self.reasoning),
            tool_calls=tuple(self.calls),
            finish_reason=self.finish_reason,
        )

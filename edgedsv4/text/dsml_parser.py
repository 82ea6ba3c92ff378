"""Tool calls read from a stream of DSML, one complete call at a time.

A call counts once it is closed: by its own tag, by the next call or by the end of the block. A
malformed call is dropped without harm to its neighbours, and a value ends only at its closing tag,
so it may hold any other markup. Source: the output format of DeepSeek-V4 and V4.1.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from typing import TYPE_CHECKING, NoReturn

from edgedsv4.text.scanner import MarkerSet, Scanner
from edgedsv4.text.special_tokens import DSML

if TYPE_CHECKING:
    from edgedsv4.text.dsml import TagNames

_NAME = re.compile(r"\s+name=\s*")
_KIND = re.compile(r'\s+string="(true|false)"\s*')


@dataclass(frozen=True, slots=True)
class ParsedCall:
    """A complete call."""

    name: str
    arguments: str
    """A JSON object as text."""


class CallMarkers:
    """The markers of one variant's call blocks."""

    def __init__(self, tags: TagNames) -> None:
        """Spell the markers out.

        Args:
            tags: tag names of the variant.
        """
        self.open_block = f"<{DSML}{tags.block}>"
        self.open_call = f'<{DSML}{tags.invoke} name="'
        self.open_parameter = f"<{DSML}{tags.parameter}"
        self.close_block = f"</{DSML}{tags.block}>"
        self.close_call = f"</{DSML}{tags.invoke}>"
        self.close_parameter = f"</{DSML}{tags.parameter}>"


class _State(Enum):
    BLOCK = auto()
    """Between calls; text is ignored."""
    CALL_NAME = auto()
    CALL_TAG = auto()
    """Behind the name of a call, before the end of its tag."""
    BODY = auto()
    PARAMETER_TAG = auto()
    """Before the name of a parameter."""
    PARAMETER_NAME = auto()
    PARAMETER_KIND = auto()
    """Behind the name of a parameter, before the end of its tag."""
    VALUE = auto()
    MALFORMED = auto()
    """In a call that is dropped; text is ignored."""
    CLOSED = auto()


class CallParser:
    """Reads the inside of one call block."""

    def __init__(self, markers: CallMarkers, scanner: Scanner, *, in_call: bool = False) -> None:
        """Start behind the opening of the block.

        Args:
            markers: of the variant.
            scanner: the text to read; shared with whoever found the block.
            in_call: start inside a call instead, behind its `name="`.
        """
        self._markers = markers
        self._scanner = scanner
        self._text = io.StringIO()
        self._name = ""
        self._body = ""
        self._parameter = ""
        self._is_string = False
        self._values: dict[str, object] = {}
        self._has_parameters = False
        self._state = _State.BLOCK
        between = (markers.open_call, markers.close_call, markers.close_block)
        quote, tag = MarkerSet(['"']), MarkerSet([">", "<"])
        self._steps: dict[_State, tuple[MarkerSet, Callable[[str, str], ParsedCall | None]]] = {
            _State.BLOCK: (MarkerSet(between), self._on_border),
            _State.CALL_NAME: (quote, self._on_call_name),
            _State.CALL_TAG: (tag, self._on_call_tag),
            _State.BODY: (MarkerSet((*between, markers.open_parameter)), self._on_body),
            _State.PARAMETER_TAG: (MarkerSet(['"', ">", "<"]), self._on_parameter_tag),
            _State.PARAMETER_NAME: (quote, self._on_parameter_name),
            _State.PARAMETER_KIND: (tag, self._on_parameter_kind),
            _State.VALUE: (MarkerSet([markers.close_parameter]), self._on_value),
            _State.MALFORMED: (MarkerSet(between), self._on_border),
        }
        if in_call:
            self._begin_call()

    @property
    def is_closed(self) -> bool:
        """Whether the block has ended; nothing behind it means anything."""
        return self._state is _State.CLOSED

    def take_calls(self) -> list[ParsedCall]:
        """The calls that became complete with the text the scanner holds."""
        found: list[ParsedCall] = []
        while not self.is_closed:
            markers, step = self._steps[self._state]
            text, marker = self._scanner.take(markers)
            if self._state not in (_State.BLOCK, _State.MALFORMED):
                self._text.write(text)
            if marker is None:
                break
            before = self._text.getvalue()
            self._text = io.StringIO()
            call = step(before, marker)
            if call is not None:
                found.append(call)
        return found

    def _begin_call(self) -> None:
        self._body, self._values, self._has_parameters = "", {}, False
        self._state = _State.CALL_NAME

    def _on_border(self, _text: str, marker: str) -> ParsedCall | None:
        """A call starts or ends, or the block ends."""
        if marker == self._markers.open_call:
            self._begin_call()
        elif marker == self._markers.close_block:
            self._state = _State.CLOSED
        else:
            self._state = _State.BLOCK
        return None

    def _on_call_name(self, text: str, _marker: str) -> ParsedCall | None:
        self._name = text
        self._state = _State.CALL_TAG
        return None

    def _on_call_tag(self, text: str, marker: str) -> ParsedCall | None:
        if marker == "<":
            self._drop_call(marker)
            return None
        if text.strip().endswith("/"):
            self._state = _State.BLOCK
            return ParsedCall(self._name, "{}")
        self._state = _State.BODY
        return None

    def _on_body(self, text: str, marker: str) -> ParsedCall | None:
        if not self._has_parameters:
            self._body = text
        if marker == self._markers.open_parameter:
            self._state = _State.PARAMETER_TAG
            return None
        arguments = self._arguments()
        name = self._name
        self._on_border("", marker)
        return None if arguments is None else ParsedCall(name, arguments)

    def _on_parameter_tag(self, text: str, marker: str) -> ParsedCall | None:
        if marker != '"' or not _NAME.fullmatch(text):
            self._drop_call(marker)
            return None
        self._state = _State.PARAMETER_NAME
        return None

    def _on_parameter_name(self, text: str, _marker: str) -> ParsedCall | None:
        self._parameter = text
        self._state = _State.PARAMETER_KIND
        return None

    def _on_parameter_kind(self, text: str, marker: str) -> ParsedCall | None:
        kind = _KIND.fullmatch(text)
        if marker == "<" or kind is None:
            self._drop_call(marker)
            return None
        self._is_string = kind[1] == "true"
        self._state = _State.VALUE
        return None

    def _on_value(self, text: str, _marker: str) -> ParsedCall | None:
        self._values[self._parameter] = text if self._is_string else _json_value(text)
        self._has_parameters = True
        self._state = _State.BODY
        return None

    def _drop_call(self, marker: str) -> None:
        """Ignore the rest of this call; a `<` in the middle of a tag may open the next thing."""
        if marker == "<":
            self._scanner.put_back(1)
        self._state = _State.MALFORMED

    def _arguments(self) -> str | None:
        """The call's arguments as JSON; None when the body is no arguments at all."""
        if self._has_parameters:
            return _dump(self._values)
        body = self._body.strip()
        value = _parsed(body) if body else {}
        return _dump(value) if isinstance(value, dict) else None


def _json_value(text: str) -> object:
    """The JSON value a text spells, or the text itself."""
    value = _parsed(text)
    return text if value is _NOT_JSON else value


_NOT_JSON = object()


def _parsed(text: str) -> object:
    """A JSON value that can be written back as valid Unicode JSON, or `_NOT_JSON`."""
    try:
        value: object = json.loads(text, parse_constant=_refuse)
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8")
    except (ValueError, RecursionError):
        return _NOT_JSON
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _dump(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)

"""Messages from the keyboard or a pipe: lines, joined where the user said that more follows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgedsv4.cli.sources import check_argument, stdin_lines
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4.cli.terminal import Terminal

_FENCE = '"""'
_FIRST_PROMPT = "> "
_NEXT_PROMPT = ". "


def read_messages(terminal: Terminal) -> Iterator[str]:
    """Messages until the input ends; with a prompt where both ends are a terminal."""
    if sys.stdin is not None and sys.stdin.isatty() and terminal.is_terminal:
        reader = _KeyboardLines(terminal)
        return Messages(reader)
    return Messages(stdin_lines())


class _KeyboardLines(Iterator[str]):
    """Lines typed at the terminal; Ctrl+C drops the line, twice in a row it leaves."""

    def __init__(self, terminal: Terminal) -> None:
        # Gives input() its editing keys and history where the library exists.
        with contextlib.suppress(ImportError):
            __import__("readline")
        self.prompt = _FIRST_PROMPT
        self._terminal = terminal

    def __next__(self) -> str:
        interrupted = False
        while True:
            try:
                return check_argument(input(self.prompt), "input")
            except EOFError:
                self._terminal.line()
                raise StopIteration from None
            except ConfigError as error:
                self._terminal.note(str(error))
            except KeyboardInterrupt:
                if interrupted:
                    raise
                interrupted = True
                self._terminal.line("\n(Ctrl+C again or /exit to leave)")


class Messages(Iterator[str]):
    """Joins continued lines (a backslash at the end) and blocks between triple quotes."""

    def __init__(self, lines: Iterator[str]) -> None:
        self._lines = lines

    def __next__(self) -> str:
        line = self._line(_FIRST_PROMPT)
        if line.startswith(_FENCE):
            return self._block(line.removeprefix(_FENCE))
        parts = []
        while line.endswith("\\"):
            parts.append(line[:-1])
            line = self._line(_NEXT_PROMPT, at_end="")
        return "\n".join([*parts, line])

    def _block(self, line: str) -> str:
        parts = []
        while not line.endswith(_FENCE):
            parts.append(line)
            line = self._line(_NEXT_PROMPT, at_end=_FENCE)
        return "\n".join([*parts, line.removesuffix(_FENCE)]).strip("\n")

    def _line(self, prompt: str, at_end: str | None = None) -> str:
        """The next line; after the last one `at_end`, or StopIteration when that is None."""
        if isinstance(self._lines, _KeyboardLines):
            self._lines.prompt = prompt
        line = next(self._lines, at_end)
        if line is None:
            raise StopIteration
        return line

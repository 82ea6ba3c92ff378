"""The terminal as it really is: it sends bytes that are no text, goes away, and asks to end.

The idea: Textual's own driver ends the program with a traceback, or leaves the terminal unusable,
where this one goes on or has the conversation saved first.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable
from contextlib import suppress
from typing import IO, TYPE_CHECKING, Any, Final, cast

from textual._parser import ParseError
from textual._xterm_parser import XTermParser
from textual.app import App
from textual.drivers.linux_driver import LinuxDriver

if TYPE_CHECKING:
    from io import TextIOWrapper

HANG_UP_STATUS: Final = 128 + signal.SIGHUP
READ_BYTES: Final = 4096
LOOK_SECONDS: Final = 0.1
"""How often the driver looks whether it is to end, and keys that may be half a sequence are due."""


class LastingFile:
    """A terminal to write to; what it cannot take any more is dropped.

    Args:
        file: the terminal.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        """Write; an error means that nobody is there to read."""
        # A part of a surrogate pair, as in a file name, is no text for a terminal either.
        with suppress(OSError, ValueError):
            self._file.write(text.encode("utf-8", "replace").decode("utf-8"))
        return len(text)

    def flush(self) -> None:
        """Hand on what was written."""
        with suppress(OSError, ValueError):
            self._file.flush()

    def fileno(self) -> int:
        """The descriptor of the terminal."""
        return self._file.fileno()


class TerminalDriver(LinuxDriver):
    """Draws on standard output, and takes every byte that comes.

    Args:
        app: its `end(status)` is called when nobody is at the terminal any more.
    """

    def __init__(
        self,
        app: App[Any],
        *,
        debug: bool = False,
        mouse: bool = True,
        size: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(app, debug=debug, mouse=mouse, size=size)
        # Standard error may lead to a file while the screen is still there.
        self._file = cast("TextIOWrapper", LastingFile(cast("IO[str]", sys.__stdout__)))

    def _end(self, status: int) -> None:
        end: Callable[[int], None] = getattr(self._app, "end", self._app.exit)
        end(status)

    def run_input_thread(self) -> None:
        """Read keys until the app ends or the terminal is gone."""
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        while not self.exit_event.is_set():
            if select.select([self.fileno], [], [], LOOK_SECONDS)[0]:
                data = _read(self.fileno)
                if not data:
                    self._app.call_later(self._end, HANG_UP_STATUS)
                    break
                for event in parser.feed(decode(data)):
                    self.process_message(event)
            for event in parser.tick():
                self.process_message(event)
        with suppress(EOFError, ParseError):
            for _ in parser.feed(""):
                pass


def _read(descriptor: int) -> bytes:
    """What there is; nothing when the terminal is gone."""
    try:
        return os.read(descriptor, READ_BYTES)
    except OSError:
        return b""

"""Where output goes: replies and reports to stdout, everything about the run to stderr.

One object holds both streams and what they can show (colour, a line that is rewritten), so that no
command asks for a terminal, an environment variable or a stream again.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

_MUTED = "\x1b[2m"
_PLAIN = "\x1b[0m"
_ERASE_LINE = "\r\x1b[K"
_REDRAW_SECONDS = 0.1


def visible(text: str) -> str:
    """The text with control characters but tab and newline spelled out, harmless to a terminal."""
    return "".join(
        ch
        if ch in "\n\t" or not (ord(ch) < 0x20 or 0x7F <= ord(ch) < 0xA0)
        else f"\\x{ord(ch):02x}"
        for ch in text
    )


def one_line(text: str) -> str:
    """The text as a single printable line."""
    return visible(" ".join(text.split()))


class Terminal:
    """Stdout and stderr of one command, with what each can show."""

    def __init__(self, out: TextIO, err: TextIO, environ: Mapping[str, str]) -> None:
        """Looks at the streams and at NO_COLOR, TERM and XDG_CACHE_HOME once."""
        self.out = out
        self.err = err
        is_dumb = environ.get("TERM", "") in ("", "dumb")
        self.is_terminal = out.isatty()
        self.has_colour = self.is_terminal and not is_dumb and not environ.get("NO_COLOR")
        self.shows_progress = err.isatty() and not is_dumb
        # The specification of base directories says that a relative one does not count.
        cache = environ.get("XDG_CACHE_HOME", "")
        self._cache_home = Path(cache) if cache.startswith("/") else None
        self._last_progress = 0.0
        self._progress_open = False

    @property
    def cache_folder(self) -> Path:
        """Where figures are kept that can be measured again."""
        home = self._cache_home or Path.home() / ".cache"
        return home / "edgedsv4"

    def write(self, text: str) -> None:
        """Writes a piece of a reply to stdout and flushes, so that it is seen while it grows."""
        self._end_progress()
        self.out.write(visible(text) if self.is_terminal else text)
        self.out.flush()

    def line(self, text: str = "") -> None:
        """Writes one line of a report to stdout."""
        self.write(f"{text}\n")

    def muted(self, text: str) -> None:
        """Writes to stdout in a fainter colour where there is colour."""
        if not self.has_colour:
            self.write(text)
            return
        self._end_progress()
        self.out.write(f"{_MUTED}{visible(text)}{_PLAIN}")
        self.out.flush()

    def json(self, value: object) -> None:
        """Writes one JSON document to stdout."""
        self._end_progress()
        json.dump(value, self.out, ensure_ascii=False, indent=2, allow_nan=False)
        self.out.write("\n")
        self.out.flush()

    def note(self, text: str) -> None:
        """Writes one line about the run to stderr."""
        self._end_progress()
        self.err.write(f"{one_line(text)}\n")
        self.err.flush()

    def aside(self, text: str) -> None:
        """Streams text that accompanies a reply, such as the model's thinking, to stderr."""
        self._end_progress()
        self.err.write(visible(text) if self.err.isatty() else text)
        self.err.flush()

    def progress(self, label: str, done: int, total: int) -> None:
        """Redraws the progress line on stderr; does nothing where stderr is not a terminal."""
        now = time.monotonic()
        if not self.shows_progress or (now - self._last_progress < _REDRAW_SECONDS and done):
            return
        self._last_progress = now
        share = f" {100 * done // total} %" if total > 0 else ""
        self.err.write(f"{_ERASE_LINE}{one_line(label)}: {done:,}/{total:,}{share}")
        self.err.flush()
        self._progress_open = True

    def evaluated(self, done: int, total: int) -> None:
        """Progress of a prefill, in tokens."""
        self.progress("evaluating tokens", done, total)

    def _end_progress(self) -> None:
        if self._progress_open:
            self.err.write(_ERASE_LINE)
            self.err.flush()
            self._progress_open = False


def open_terminal() -> Terminal:
    """The terminal of this process, writing UTF-8 whatever the locale says."""
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")
    return Terminal(sys.stdout, sys.stderr, os.environ)


def _open_closed_streams() -> None:
    """Opens nothing in place of standard streams the process was started without.

    In this order each takes the lowest free descriptor, which is its own number; left free, it
    would become that of the next file opened, and what a library prints would land there.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            nothing = Path(os.devnull).open(mode, encoding="utf-8")  # noqa: SIM115  # stays open
            setattr(sys, name, nothing)


def abandon(stream: TextIO) -> None:
    """Points a stream at nothing, so that the interpreter's last flush cannot fail once more."""
    with contextlib.suppress(OSError, ValueError):
        sink = os.open(os.devnull, os.O_WRONLY)
        os.dup2(sink, stream.fileno())
        os.close(sink)

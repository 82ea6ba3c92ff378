"""What the user hands in: prompt texts and token files, from an argument, a file or stdin.

Everything is read as bytes and decoded strictly; what cannot be used is refused with ConfigError,
which the command line turns into exit status 2.
"""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from edgedsv4.errors import ConfigError

MAX_TEXT_BYTES = 1 << 30


def decode_text(data: bytes, source: str) -> str:
    """Decodes UTF-8 strictly; raises ConfigError with the offset of the first bad byte."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{source}: expected UTF-8 text, found byte 0x{data[error.start]:02x}"
            f" at offset {error.start}; convert the text to UTF-8"
        ) from None


def check_argument(text: str, source: str) -> str:
    """Returns a command-line text; raises ConfigError when its bytes were not UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source}: expected UTF-8 text, found an undecodable byte at character {error.start}"
        ) from None
    return text


def check_text(text: str, source: str) -> None:
    """Raises ConfigError for a text that has no UTF-8 form, as JSON escapes can spell it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"{source}: expected Unicode text, found a lone surrogate"
            f" (U+{ord(text[error.start]):04X})"
        ) from None


def read_bytes(path: str, what: str, limit: int = MAX_TEXT_BYTES) -> bytes:
    """Reads a whole file, or stdin for `-`; raises ConfigError if unreadable or too large."""
    try:
        if path == "-":
            data = stdin_bytes().read(limit + 1)
        else:
            with Path(path).open("rb") as file:
                data = file.read(limit + 1)
    except OSError as error:
        raise ConfigError(
            f"{what} {path}: {error.strerror or error}; name a readable file"
        ) from None
    if len(data) > limit:
        raise ConfigError(f"{what} {path}: expected at most {limit:,} bytes, found more")
    return data


def read_text(path: str, what: str) -> str:
    """Reads UTF-8 text from a file, or from stdin for `-`."""
    return decode_text(read_bytes(path, what), "stdin" if path == "-" else f"{what} {path}")


def stdin_bytes() -> BinaryIO:
    """Stdin as bytes, also where a test replaced it by text."""
    buffer = getattr(sys.stdin, "buffer", None)
    if buffer is None:
        return io.BytesIO(b"" if sys.stdin is None else sys.stdin.read().encode())
    binary: BinaryIO = buffer
    return binary


def stdin_lines() -> Iterator[str]:
    """Lines of stdin without their ends, each decoded strictly as it arrives."""
    for number, line in enumerate(iter(stdin_bytes().readline, b""), start=1):
        yield decode_text(line.rstrip(b"\r\n"), f"stdin line {number}")


def output_path(text: str, flag: str) -> Path:
    """Checks a file that will be written before any work is done; raises ConfigError."""
    path = Path(text)
    if path.is_dir():
        raise ConfigError(f"{flag} {text}: expected a file name, found a directory")
    if not path.absolute().parent.is_dir():
        raise ConfigError(f"{flag} {text}: no such directory; make it first")
    return path

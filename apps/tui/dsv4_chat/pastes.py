"""Long pastes and attached files: a short placeholder in the prompt, the whole in what is sent.

The idea: the placeholder is plain text, so cursor, history and the external editor treat it as any
other; deleting it takes the text out, and numbers are never used twice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edgedsv4 import StorageError

MAX_FILE_BYTES: Final = 4 << 20
_MARK: Final = re.compile(r"\[(?:pasted|file) [^\[\]\n]* #(\d+)\]")


@dataclass(slots=True)
class Pastes:
    """The texts behind the placeholders of this run."""

    max_lines: int = 8
    max_characters: int = 1000
    _texts: list[str] = field(default_factory=list)
    _marks: list[str] = field(default_factory=list)

    def shorten(self, text: str) -> str:
        """The text itself, or a placeholder when it is long."""
        lines = text.count("\n") + 1
        if lines <= self.max_lines and len(text) <= self.max_characters:
            return text
        size = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        return self._keep(f"pasted {size}", text)

    def attach(self, path: Path) -> str:
        """A placeholder for a text file.

        Raises:
            StorageError: it cannot be read, is too large, or is no UTF-8 text.
        """
        text = read_text_file(path)
        name = re.sub(r"[\[\]\n\r]", "_", path.name)
        lines = text.count("\n") + (not text.endswith("\n"))
        size = f"{lines:,} line{'s' if lines != 1 else ''}"
        return self._keep(f"file {name}, {size}", fenced(path.name, text))

    def expand(self, text: str) -> str:
        """The text with every placeholder of ours replaced by what it stands for."""

        def whole(match: re.Match[str]) -> str:
            number = int(match[1])
            is_ours = 0 < number <= len(self._marks) and self._marks[number - 1] == match[0]
            return self._texts[number - 1] if is_ours else match[0]

        return _MARK.sub(whole, text)

    def _keep(self, what: str, text: str) -> str:
        self._texts.append(text)
        self._marks.append(f"[{what} #{len(self._texts)}]")
        return self._marks[-1]


def read_text_file(path: Path) -> str:
    """A text file, decoded.

    Raises:
        StorageError: it cannot be read, is larger than `MAX_FILE_BYTES`, or is no UTF-8 text.
    """
    try:
        if not path.is_file():
            what = "is not a file" if path.exists() else "no such file"
            raise StorageError(what, path=path)
        size = path.stat().st_size
        if size > MAX_FILE_BYTES:
            raise StorageError(
                f"has {size:,} bytes, at most {MAX_FILE_BYTES:,} can be attached", path=path
            )
        data = path.read_bytes()
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(error.strerror or str(error), path=path, errno=error.errno) from error
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise StorageError("is no UTF-8 text; only text can be attached", path=path) from None
    if "\0" in text:
        raise StorageError("holds zero bytes; only text can be attached", path=path)
    return text


def fenced(name: str, text: str) -> str:
    """A file as Markdown: its name, and its text in a fence that nothing inside closes."""
    longest = max((len(run) for run in re.findall(r"`{3,}", text)), default=2)
    fence = "`" * (longest + 1)
    language = Path(name).suffix.removeprefix(".")
    return f"\n{name}:\n{fence}{language}\n{text.rstrip()}\n{fence}\n"

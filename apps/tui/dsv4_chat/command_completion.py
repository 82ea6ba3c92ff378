"""Completion of slash commands: of their names, and of files, themes, modes and keys behind them.

The idea: a completion is a whole line, so the prompt that takes one knows nothing of commands.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dsv4_chat.commands import (
    COMMANDS,
    EXPORT_FORMATS,
    ArgumentKind,
    Choices,
    CommandSpec,
    expanded,
    find_command,
    is_command,
    split_command,
)
from dsv4_chat.sampling_text import SAMPLING_KEYS, option_text

MAX_COMPLETIONS: Final = 50
"""Entries of a completion list; a folder can have thousands."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One way to go on with a line."""

    line: str
    """The whole line when it is taken; ends with a blank or `/` where more can follow."""
    label: str
    """What the list shows: the piece that is completed."""
    help: str = ""
    """A few words beside it."""


def usage_of(text: str) -> CommandSpec | None:
    """The command whose arguments are being typed; None while its name is, or it is unknown."""
    return (
        find_command(split_command(text)[0])
        if is_command(text) and re.search(r"\s", text)
        else None
    )


def complete(text: str, choices: Choices | None = None) -> list[Completion]:
    """Ways to go on with a line up to the cursor, best first; at most `MAX_COMPLETIONS`.

    Reads a folder where a file is expected. Nothing is offered for a text that is no command, has
    several lines, or is complete.
    """
    if not is_command(text) or "\n" in text:
        return []
    choices = choices or Choices()
    match = re.match(r"/(\S*)(\s*)", text)
    name, blank = match.groups() if match else ("", "")
    if not blank:
        found = _names(name.lower())
    else:
        spec = find_command(name)
        head, arguments = text[: len(name) + 2], text[len(name) + 1 :].lstrip()
        found = [] if spec is None else _arguments(spec.takes, head, arguments, choices)
    return [completion for completion in found if completion.line != text][:MAX_COMPLETIONS]


def _names(prefix: str) -> list[Completion]:
    return [
        Completion(
            line=f"/{spec.name} " if spec.hint else f"/{spec.name}",
            label=spec.usage,
            help=spec.help,
        )
        for spec in COMMANDS
        if spec.name.startswith(prefix)
    ]


def _arguments(kind: ArgumentKind, head: str, typed: str, choices: Choices) -> list[Completion]:
    words = {"theme": choices.themes, "mode": choices.modes, "title": choices.titles}.get(kind)
    if words is not None:
        return _words(head, typed, words)
    if kind == "file":
        return list(_files(head, typed, choices.folder))
    if kind == "option" and not re.search(r"\s", typed):
        now = {key: option_text(choices.sampling, key) or "none" for key in SAMPLING_KEYS}
        return [
            Completion(line=f"{head}{key} ", label=key, help=f"now {now[key]}")
            for key in SAMPLING_KEYS
            if key.startswith(typed.lower())
        ]
    if kind == "export":
        format_name, blank, file = typed.partition(" ")
        if blank:
            return list(_files(f"{head}{format_name} ", file.lstrip(), choices.folder))
        return _words(head, typed, EXPORT_FORMATS, end=" ")
    return []


def _words(head: str, typed: str, words: Iterable[str], end: str = "") -> list[Completion]:
    """Those words that begin with what is typed, then those that hold it."""
    typed = typed.lower()
    held = [word for word in dict.fromkeys(words) if typed in word.lower()]
    held.sort(key=lambda word: not word.lower().startswith(typed))
    return [Completion(line=f"{head}{word}{end}", label=word) for word in held]


def _files(head: str, typed: str, folder: Path) -> Iterator[Completion]:
    """Entries of the folder that is typed, hidden ones only on demand, folders first."""
    parent, slash, prefix = typed.rpartition("/")
    try:
        with os.scandir(folder / expanded(parent + slash)) as scan:
            # A control character in a name would break the line it stands in.
            fitting = (
                (not entry.is_dir(), entry.name)
                for entry in scan
                if entry.name.startswith(prefix)
                and entry.name.startswith(".") <= (prefix[:1] == ".")
                and entry.name.isprintable()
            )
            entries = heapq.nsmallest(MAX_COMPLETIONS, fitting)
    except (OSError, ValueError, RuntimeError):
        return  # no such folder, or no such user: nothing to offer
    for is_file, name in entries:
        end = "" if is_file else "/"
        yield Completion(line=f"{head}{parent}{slash}{name}{end}", label=f"{name}{end}")

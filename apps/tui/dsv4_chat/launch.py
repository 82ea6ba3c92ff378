"""From the command line to what is started: arguments, settings, store and terminal checks.

The idea: everything that can be refused is refused here, before the screen is taken, with one line
that says what to do.
"""

from __future__ import annotations

import argparse
import codecs
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dsv4_chat import __version__
from dsv4_chat.settings import Settings
from dsv4_chat.settings_file import FILE_VARIABLE, settings_path

_FLAGS: Final = {
    "model": "model",
    "ctx": "context",
    "system": "system",
    "think": "think",
    "temp": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "threads": "threads",
    "draft": "draft",
}
"""Argument to key of the settings."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What the command line asks for."""

    overrides: Mapping[str, object] = field(default_factory=dict)
    """Keys of the settings that were given."""
    settings_file: Path
    has_named_file: bool = False
    """The settings file was named, so it has to be there."""
    is_plain: bool = False
    writes_settings: bool = False


def parse_arguments(arguments: Sequence[str], environ: Mapping[str, str]) -> LaunchOptions:
    """Read the command line; a wrong one ends the program with status 2."""
    found = _parser().parse_args(arguments)
    overrides = {
        key: getattr(found, name)
        for name, key in _FLAGS.items()
        if getattr(found, name) is not None
    }
    return LaunchOptions(
        overrides=overrides,
        settings_file=found.settings or settings_path(environ),
        has_named_file=found.settings is not None or bool(environ.get(FILE_VARIABLE)),
        is_plain=found.plain,
        writes_settings=found.write_settings,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="dsv4-chat",
        description="Chat with a DeepSeek-V4 model on this machine. F1 inside shows every key.",
    )
    add = parser.add_argument
    add(
        "model",
        metavar="MODEL",
        nargs="?",
        help="a GGUF file, a checkpoint directory or the name"
        f" of a shipped model (default {Settings().model})",
    )
    add("--ctx", type=int, metavar="N", help="tokens a conversation can hold")
    add("--system", metavar="TEXT", help="system message of new conversations")
    add("--think", metavar="MODE", help="thinking mode: none, low, high, max or 1..100")
    add("--temp", type=float, metavar="X", help="temperature; 0 takes the likeliest token")
    add("--top-p", type=float, metavar="X", help="keep the likeliest tokens that reach X")
    add("--top-k", type=int, metavar="N", help="keep the N likeliest tokens; 0 keeps all")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text")
    add("--threads", type=int, metavar="N", help="CPU threads")
    add("--draft", type=int, metavar="N", help="tokens the MTP block drafts ahead of each step")
    add("--settings", type=Path, metavar="FILE", help="settings file to read")
    add(
        "--write-settings",
        action="store_true",
        help="write a settings file with every key documented, and end",
    )
    add("--plain", action="store_true", help="line by line, without a screen; needs no terminal")
    add("--version", action="version", version=f"%(prog)s {__version__}")
    return parser


def plain_reason(
    environ: Mapping[str, str], *, is_terminal: bool, encoding: str | None
) -> str | None:
    """Why no screen can be shown; None when one can."""
    if not is_terminal:
        return "no terminal"
    if environ.get("TERM", "") in ("", "dumb"):
        return "the terminal cannot place text (TERM is dumb or not set)"
    try:
        name = codecs.lookup(encoding or "ascii").name
    except LookupError:
        name = "unknown"
    if name != "utf-8":
        return (
            f"the terminal's encoding is {encoding}, the screen needs UTF-8;"
            " try LC_ALL=C.UTF-8 dsv4-chat"
        )
    return None


def plain_command(settings: Settings) -> list[str]:
    """The line REPL of the library, started with the same choices."""
    given = {
        "--ctx": settings.context or None,
        "--system": settings.system or None,
        "--think": settings.think,
        "--temp": settings.temperature,
        "--top-k": settings.top_k,
        "--top-p": settings.top_p,
        "--min-p": settings.min_p,
        "--repeat-penalty": settings.repetition_penalty,
        "--presence-penalty": settings.presence_penalty,
        "--frequency-penalty": settings.frequency_penalty,
        "--seed": settings.seed if settings.seed >= 0 else None,
        "--max-tokens": settings.max_tokens or None,
        "--device": settings.device,
        "--threads": settings.threads or None,
        "--profile": settings.profile,
        "--backend": settings.backend,
        "--draft": settings.draft,
    }
    # With "=" a value may begin with a dash.
    flags = [f"{flag}={value}" for flag, value in given.items() if value is not None]
    return [sys.executable, "-m", "edgedsv4", "chat", *flags, "--", settings.model]


def editor_of(settings: Settings, environ: Mapping[str, str]) -> str:
    """Command of the external editor."""
    return settings.editor or environ.get("VISUAL") or environ.get("EDITOR") or "vi"


def run_plain(settings: Settings) -> int:
    """Become the line REPL; returns only when it cannot be started."""
    command = plain_command(settings)
    try:
        os.execv(command[0], command)
    except OSError as error:
        sys.stderr.write(f"dsv4-chat: {shlex.join(command)}: {error.strerror}\n")
        return 1

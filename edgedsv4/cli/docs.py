"""docs/cli.md, made from the command table: `python -m edgedsv4.cli.docs docs/cli.md`.

Not from argparse's help, whose layout differs between Python versions.
"""

from __future__ import annotations

import sys
from pathlib import Path

from edgedsv4.cli import repl
from edgedsv4.cli.commands import COMMANDS, SUMMARY, Command, sentence
from edgedsv4.cli.flags import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    SCORING_FLAGS,
    Flag,
    field_default,
    show_default,
)

_HEAD = f"""# The `edgedsv4` command

<!-- Made by `make docs` from the command table; edits here are overwritten. -->

{SUMMARY}

Exit status: 0 done, 1 run-time failure (device, I/O, numbers), 2 wrong use or something refused,
130 interrupted. A failure is one line on stderr. Sizes such as `32G` are powers of 1024; a text
that starts with a dash is given as `-p=-text`. `NO_COLOR` and `TERM=dumb` are respected, and
`EDGEDSV4_TRACEBACK=1` shows where an error came from.
"""


def cli_document() -> str:
    """The whole document, Markdown."""
    parts = [_HEAD, *(_command(command) for command in COMMANDS)]
    parts += [
        _group("Sampling options", SAMPLING_FLAGS),
        _group("Engine options", ENGINE_FLAGS),
        _slash_commands(),
    ]
    return "\n".join(parts)


def _command(command: Command) -> str:
    own = [flag for flag in command.flags if flag not in (*SAMPLING_FLAGS, *ENGINE_FLAGS)]
    shared = [flag for flag in command.flags if flag not in own]
    lines = [f"## edgedsv4 {command.name}", "", f"{sentence(command.help)} {command.note}".strip()]
    lines += ["", *(_row(flag) for flag in own)]
    if set(SCORING_FLAGS) <= set(shared):
        groups = "Sampling options and engine" if set(SAMPLING_FLAGS) <= set(shared) else "Engine"
        but = "" if set(ENGINE_FLAGS) <= set(shared) else ", except `--draft` and `--draft-model`"
        lines.append(f"- {groups} options, see below{but}")
    elif shared:
        lines += [_row(flag) for flag in shared]
    return "\n".join([*lines, ""])


def _group(title: str, flags: tuple[Flag, ...]) -> str:
    return "\n".join([f"## {title}", "", *(_row(flag) for flag in flags), ""])


def _row(flag: Flag) -> str:
    value = "" if flag.metavar is None or flag.is_positional else f" {flag.metavar}"
    name = flag.metavar if flag.is_positional and flag.metavar else ", ".join(flag.names)
    default = field_default(flag.field)
    shown = "" if default is None else f" (default `{show_default(default)}`)"
    listed = ", ".join(f"`{choice}`" for choice in flag.choices or ())
    choices = f": {listed}" if listed and not flag.is_positional else ""
    return f"- `{name}{value}` — {flag.help}{choices}{shown}"


def _slash_commands() -> str:
    rows = (
        f"- `{name}{' ' if entry.argument else ''}{entry.argument}` — {entry.help}"
        for name, entry in repl.COMMANDS.items()
    )
    return "\n".join(["## Commands inside `edgedsv4 chat`", "", *rows, ""])


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(cli_document(), encoding="utf-8")

"""Slash commands: one registry that parses and documents them.

The idea: a line is turned into a typed record, and the app acts on records. What a command is
called, takes and does stands once, in `COMMANDS`; `command_completion`, the help screen and the
README read it there.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeAlias

from dsv4_chat.sampling_text import SAMPLING_KEYS, with_option
from edgedsv4 import ConfigError, SamplingOptions

ExportFormat = Literal["md", "json"]
ArgumentKind = Literal[
    "nothing", "text", "title", "number", "file", "mode", "option", "theme", "export"
]
EXPORT_FORMATS: Final[tuple[ExportFormat, ...]] = ("md", "json")


@dataclass(frozen=True, slots=True)
class ShowHelp:
    """`/help`."""


@dataclass(frozen=True, slots=True)
class NewConversation:
    """`/new`."""


@dataclass(frozen=True, slots=True)
class OpenConversation:
    """`/open [TITLE]`."""

    query: str = ""
    """What to search for; empty shows the list."""


@dataclass(frozen=True, slots=True)
class RenameConversation:
    """`/rename TITLE`."""

    title: str


@dataclass(frozen=True, slots=True)
class DeleteConversation:
    """`/delete`: the shown one, after a question."""


@dataclass(frozen=True, slots=True)
class Fork:
    """`/fork`."""


@dataclass(frozen=True, slots=True)
class Regenerate:
    """`/regenerate`."""


@dataclass(frozen=True, slots=True)
class EditQuestion:
    """`/edit`."""


@dataclass(frozen=True, slots=True)
class StopReply:
    """`/stop`."""


@dataclass(frozen=True, slots=True)
class CopyAnswer:
    """`/copy`."""


@dataclass(frozen=True, slots=True)
class CopyCode:
    """`/code [N]`."""

    number: int | None = None
    """Block of the last answer, counted from 1; None goes through them."""


@dataclass(frozen=True, slots=True)
class AttachFile:
    """`/attach FILE`."""

    path: Path


@dataclass(frozen=True, slots=True)
class SetSystem:
    """`/system [TEXT]`."""

    text: str
    """Empty removes the system message."""


@dataclass(frozen=True, slots=True)
class SetThinking:
    """`/think MODE`."""

    mode: str | int


@dataclass(frozen=True, slots=True)
class SetOption:
    """`/set KEY VALUE`."""

    key: str
    text: str
    """The value as it was typed; it was checked."""

    def apply(self, sampling: SamplingOptions) -> SamplingOptions:
        """The options with this one changed."""
        return with_option(sampling, self.key, self.text)


@dataclass(frozen=True, slots=True)
class Export:
    """`/export md|json [FILE]`."""

    format: ExportFormat
    path: Path | None = None
    """None writes to a name made from the title."""


@dataclass(frozen=True, slots=True)
class ShowDetails:
    """`/details`."""


@dataclass(frozen=True, slots=True)
class SetTheme:
    """`/theme NAME`."""

    name: str


@dataclass(frozen=True, slots=True)
class Quit:
    """`/quit`."""


Command: TypeAlias = (
    ShowHelp
    | NewConversation
    | OpenConversation
    | RenameConversation
    | DeleteConversation
    | Fork
    | Regenerate
    | EditQuestion
    | StopReply
    | CopyAnswer
    | CopyCode
    | AttachFile
    | SetSystem
    | SetThinking
    | SetOption
    | Export
    | ShowDetails
    | SetTheme
    | Quit
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What arguments may be at this moment; the app knows, the registry does not."""

    themes: tuple[str, ...] = ()
    modes: tuple[str, ...] = ("none",)
    """Thinking modes of the open model."""
    titles: tuple[str, ...] = ()
    """Of the saved conversations, newest first."""
    sampling: SamplingOptions = field(default_factory=SamplingOptions)
    """As it is now; shown beside the keys of `/set`."""
    folder: Path = Path()
    """What relative files are relative to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CommandSpec:
    """One command of the registry."""

    name: str
    """Without the slash."""
    hint: str = ""
    """Its arguments as usage shows them, optional ones in brackets."""
    help: str
    """One line: what it does."""
    takes: ArgumentKind = "nothing"
    """What its arguments are completed from."""
    parse: Callable[[str, Choices], Command]
    """Arguments to record; raises `ConfigError` that says what was expected."""

    @property
    def usage(self) -> str:
        """The line to type."""
        return f"/{self.name} {self.hint}".rstrip()


def is_command(text: str) -> bool:
    """Whether a prompt is a command: a slash and one word, unlike a path such as `/usr/bin`."""
    return re.match(r"/[A-Za-z]*(\s|$)", text) is not None


def parse_command(text: str, choices: Choices | None = None) -> Command:
    """Turn a prompt for which `is_command` holds into a record.

    Raises:
        ConfigError: no such command, or arguments that it does not take; says what is expected.
    """
    name, arguments = split_command(text)
    spec = find_command(name)
    if spec is None:
        near = difflib.get_close_matches(name, [spec.name for spec in COMMANDS], n=1)
        meant = f" (did you mean /{near[0]}?)" if near else ""
        raise ConfigError(
            f"there is no command /{name}{meant}; /help lists them, and a blank before the slash"
            " sends it as text",
            name=name,
        )
    return spec.parse(arguments, choices or Choices())


def find_command(name: str) -> CommandSpec | None:
    """The command of a name, without the slash; None when there is none."""
    return next((spec for spec in COMMANDS if spec.name == name.lower()), None)


def split_command(text: str) -> tuple[str, str]:
    """Name, without the slash, and arguments of a line; both may be empty."""
    match = re.match(r"/(\S*)\s*(.*)", text.rstrip(), re.DOTALL)
    return (match[1], match[2]) if match else ("", "")


def expanded(text: str) -> Path:
    """A path with `~` resolved; `RuntimeError` when there is no such user."""
    return Path(text).expanduser()


def _path(text: str, choices: Choices) -> Path:
    """A file as typed, in quotes or not, `~` and relative ones resolved."""
    if len(text) > 1 and text[0] == text[-1] and text[0] in "'\"":
        text = text[1:-1]
    try:
        return choices.folder / expanded(text)
    except RuntimeError:
        raise ConfigError(f"expected a file, found {text!r}: there is no such user") from None


def _expect(usage: str, expected: str, found: str) -> ConfigError:
    return ConfigError(f"{usage}: expected {expected}, found {found or 'nothing'}")


def _plain(record: Command, name: str) -> Callable[[str, Choices], Command]:
    """The parser of a command without arguments."""

    def parse(text: str, _choices: Choices) -> Command:
        if text:
            raise _expect(f"/{name}", "nothing behind it", repr(text))
        return record

    return parse


def _parse_open(text: str, _choices: Choices) -> Command:
    return OpenConversation(text)


def _parse_rename(text: str, _choices: Choices) -> Command:
    title = " ".join(text.split())
    if not title:
        raise _expect("/rename TITLE", "the new title", "")
    return RenameConversation(title)


def _parse_code(text: str, _choices: Choices) -> Command:
    if not text:
        return CopyCode()
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 10_000):
        raise _expect("/code [N]", "the number of a code block, from 1", repr(text))
    return CopyCode(int(text))


def _parse_attach(text: str, choices: Choices) -> Command:
    if not text:
        raise _expect("/attach FILE", "a text file", "")
    return AttachFile(_path(text, choices))


def _parse_system(text: str, _choices: Choices) -> Command:
    return SetSystem(text)


def _parse_think(text: str, choices: Choices) -> Command:
    mode = text.lower()
    if mode in choices.modes:
        return SetThinking(mode)
    is_number = mode.isascii() and mode.isdigit() and len(mode) <= 3
    if is_number and len(choices.modes) > 1 and 1 <= int(mode) <= 100:
        return SetThinking(int(mode))
    raise _expect("/think MODE", _one_of(choices.modes), repr(text) if text else "")


def _parse_set(text: str, _choices: Choices) -> Command:
    key, _, value = text.partition(" ")
    key, value = key.lower(), value.strip()
    if key not in SAMPLING_KEYS:
        raise _expect(
            "/set KEY VALUE", f"as KEY {_one_of(SAMPLING_KEYS)}", repr(key) if key else ""
        )
    if not value:
        raise _expect("/set KEY VALUE", f"a value for {key}", "")
    option = SetOption(key, value)
    option.apply(SamplingOptions())
    return option


def _parse_export(text: str, choices: Choices) -> Command:
    format_name, _, file = text.partition(" ")
    for known in EXPORT_FORMATS:
        if known == format_name.lower():
            return Export(known, _path(file.strip(), choices) if file.strip() else None)
    found = repr(format_name) if format_name else ""
    raise _expect("/export md|json [FILE]", _one_of(EXPORT_FORMATS), found)


def _parse_theme(text: str, choices: Choices) -> Command:
    if text.lower() not in choices.themes:
        raise _expect("/theme NAME", _one_of(choices.themes), repr(text) if text else "")
    return SetTheme(text.lower())


def _one_of(words: Iterable[str]) -> str:
    *most, last = words or ("nothing",)
    return f"{', '.join(most)} or {last}" if most else last


def _spec(name: str, record: Command, help_line: str) -> CommandSpec:
    return CommandSpec(name=name, help=help_line, parse=_plain(record, name))


COMMANDS: Final[tuple[CommandSpec, ...]] = (
    _spec("help", ShowHelp(), "Show keys and commands"),
    _spec("new", NewConversation(), "Begin a new conversation"),
    CommandSpec(
        name="open",
        hint="[TITLE]",
        help="Go on with a saved conversation; without TITLE list them",
        takes="title",
        parse=_parse_open,
    ),
    CommandSpec(
        name="rename",
        hint="TITLE",
        help="Give this conversation another title",
        takes="text",
        parse=_parse_rename,
    ),
    _spec("delete", DeleteConversation(), "Delete this conversation, after a question"),
    _spec("fork", Fork(), "Copy the conversation up to the focused turn, and go on there"),
    _spec("regenerate", Regenerate(), "Ask for another answer to the last question"),
    _spec("edit", EditQuestion(), "Take the last question back into the prompt"),
    _spec("stop", StopReply(), "Stop the reply, keep what came so far"),
    _spec("copy", CopyAnswer(), "Copy the last answer"),
    CommandSpec(
        name="code",
        hint="[N]",
        help="Copy code block N of the last answer; without N the next one",
        takes="number",
        parse=_parse_code,
    ),
    CommandSpec(
        name="attach",
        hint="FILE",
        help="Put a text file into the prompt",
        takes="file",
        parse=_parse_attach,
    ),
    CommandSpec(
        name="system",
        hint="[TEXT]",
        help="Set the system message; without TEXT remove it",
        takes="text",
        parse=_parse_system,
    ),
    CommandSpec(
        name="think",
        hint="MODE",
        help="Choose how much the model thinks before it answers",
        takes="mode",
        parse=_parse_think,
    ),
    CommandSpec(
        name="set",
        hint="KEY VALUE",
        help="Change a sampling option, such as temperature",
        takes="option",
        parse=_parse_set,
    ),
    CommandSpec(
        name="export",
        hint="md|json [FILE]",
        help="Write the conversation to a file",
        takes="export",
        parse=_parse_export,
    ),
    _spec("details", ShowDetails(), "Show the engine, its memory and its kernels"),
    CommandSpec(
        name="theme",
        hint="NAME",
        help="Choose the colours",
        takes="theme",
        parse=_parse_theme,
    ),
    _spec("quit", Quit(), "Leave; the conversation is saved"),
)
"""Every command, in the order of `/help`."""

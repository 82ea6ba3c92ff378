"""Slash commands: every line that means something, and what is said of the others."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from dsv4_chat.commands import (
    COMMANDS,
    AttachFile,
    Choices,
    Command,
    CopyAnswer,
    CopyCode,
    DeleteConversation,
    EditQuestion,
    Export,
    Fork,
    NewConversation,
    OpenConversation,
    Quit,
    Regenerate,
    RenameConversation,
    SetOption,
    SetSystem,
    SetTheme,
    SetThinking,
    ShowDetails,
    ShowHelp,
    StopReply,
    find_command,
    is_command,
    parse_command,
)
from edgedsv4 import ConfigError, SamplingOptions

CHOICES = Choices(
    themes=("dark", "light"), modes=("none", "high", "max"), folder=Path("/data/folder")
)
LINES: list[tuple[str, Command]] = [
    ("/help", ShowHelp()),
    ("/new", NewConversation()),
    ("/open", OpenConversation()),
    ("/open the river", OpenConversation("the river")),
    ("/rename  A  new title ", RenameConversation("A new title")),
    ("/delete", DeleteConversation()),
    ("/fork", Fork()),
    ("/regenerate", Regenerate()),
    ("/edit", EditQuestion()),
    ("/stop", StopReply()),
    ("/copy", CopyAnswer()),
    ("/code", CopyCode()),
    ("/code 2", CopyCode(2)),
    ("/attach notes.txt", AttachFile(Path("/data/folder/notes.txt"))),
    ("/attach /etc/hosts", AttachFile(Path("/etc/hosts"))),
    ("/attach 'my notes.txt'", AttachFile(Path("/data/folder/my notes.txt"))),
    ("/attach my notes.txt", AttachFile(Path("/data/folder/my notes.txt"))),
    ("/attach ~/x", AttachFile(Path.home() / "x")),
    ("/system Be brief.\nAnd kind.", SetSystem("Be brief.\nAnd kind.")),
    ("/system", SetSystem("")),
    ("/think high", SetThinking("high")),
    ("/think 40", SetThinking(40)),
    ("/set temperature 0.7", SetOption("temperature", "0.7")),
    ("/set TOP_K   40", SetOption("top_k", "40")),
    ("/set seed none", SetOption("seed", "none")),
    ("/set logit_bias 3=-1, 4=2", SetOption("logit_bias", "3=-1, 4=2")),
    ("/export md", Export("md")),
    ("/export JSON out.json", Export("json", Path("/data/folder/out.json"))),
    ("/details", ShowDetails()),
    ("/theme light", SetTheme("light")),
    ("/theme DARK", SetTheme("dark")),
    ("/quit", Quit()),
    ("/QUIT  ", Quit()),
    ("/new\n", NewConversation()),
]
MISTAKES = [
    ("/", "there is no command /; /help lists them"),
    ("/opne", "there is no command /opne (did you mean /open?)"),
    ("/zzz", "there is no command /zzz; /help lists them"),
    ("/help me", "/help: expected nothing behind it, found 'me'"),
    ("/rename", "/rename TITLE: expected the new title, found nothing"),
    ("/code first", "/code [N]: expected the number of a code block, from 1, found 'first'"),
    ("/code 0", "expected the number of a code block, from 1, found '0'"),
    ("/attach", "/attach FILE: expected a text file, found nothing"),
    ("/attach ~no-such-user/x", "found '~no-such-user/x': there is no such user"),
    ("/think", "/think MODE: expected none, high or max, found nothing"),
    ("/think deep", "/think MODE: expected none, high or max, found 'deep'"),
    ("/think 101", "expected none, high or max, found '101'"),
    ("/set", "/set KEY VALUE: expected as KEY temperature, "),
    ("/set heat 3", "or max_tokens, found 'heat'"),
    ("/set top_p", "/set KEY VALUE: expected a value for top_p, found nothing"),
    ("/set top_p high", "top_p must be a number, found 'high'"),
    ("/set temperature 300", "temperature must be 0..100, found 300.0"),
    ("/export", "/export md|json [FILE]: expected md or json, found nothing"),
    ("/export pdf x", "expected md or json, found 'pdf'"),
    ("/theme", "/theme NAME: expected dark or light, found nothing"),
    ("/theme pink", "/theme NAME: expected dark or light, found 'pink'"),
]


@pytest.mark.parametrize(("line", "command"), LINES, ids=lambda value: repr(value)[:40])
def test_line_becomes_a_record(line: str, command: Command) -> None:
    assert is_command(line)
    assert parse_command(line, CHOICES) == command


def test_every_command_and_record_has_a_line_above() -> None:
    assert {find_command(line.split()[0][1:]) for line, _ in LINES} == set(COMMANDS)
    assert {type(command) for _, command in LINES} == set(get_args(Command))


@pytest.mark.parametrize(("line", "message"), MISTAKES)
def test_mistake_says_what_was_expected(line: str, message: str) -> None:
    assert is_command(line)
    with pytest.raises(ConfigError) as raised:
        parse_command(line, CHOICES)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        " /help",
        "/usr/bin/env is a file",
        "//help",
        "/2",
        "/help!",
        "1/2",
        "/é",
        "\n/new",
    ],
)
def test_other_text_is_no_command(text: str) -> None:
    assert not is_command(text)


def test_number_is_no_mode_of_a_model_that_does_not_think() -> None:
    with pytest.raises(ConfigError, match="expected none, found '40'"):
        parse_command("/think 40", Choices())


def test_commands_have_names_of_small_letters_and_one_line_of_help() -> None:
    names = [spec.name for spec in COMMANDS]
    assert len(set(names)) == len(names)
    assert all(name.isalpha() and name.islower() for name in names)
    assert all(spec.help and "\n" not in spec.help and len(spec.help) < 70 for spec in COMMANDS)


def test_usage_is_the_line_to_type() -> None:
    assert [spec.usage for spec in COMMANDS if spec.hint] == [
        "/open [TITLE]",
        "/rename TITLE",
        "/code [N]",
        "/attach FILE",
        "/system [TEXT]",
        "/think MODE",
        "/set KEY VALUE",
        "/export md|json [FILE]",
        "/theme NAME",
    ]


def test_option_is_applied_to_what_holds_already() -> None:
    command = parse_command("/set top_k 40")
    assert isinstance(command, SetOption)
    now = SamplingOptions(temperature=0.5, seed=3)
    assert command.apply(now) == SamplingOptions(temperature=0.5, seed=3, top_k=40)

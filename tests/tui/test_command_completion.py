"""Completion: what can follow what is typed so far."""

from __future__ import annotations

from pathlib import Path

import pytest

from dsv4_chat.command_completion import MAX_COMPLETIONS, complete, usage_of
from dsv4_chat.commands import COMMANDS, Choices, is_command, parse_command
from dsv4_chat.sampling_text import SAMPLING_KEYS
from edgedsv4 import ConfigError, SamplingOptions


@pytest.fixture
def choices(tmp_path: Path) -> Choices:
    folder = tmp_path / "folder"
    (folder / "notes").mkdir(parents=True)
    for name in ("a b.txt", "notes.md", ".hidden", "notes/first.txt"):
        (folder / name).write_text("x", encoding="utf-8")
    return Choices(
        themes=("dark", "light", "contrast"),
        modes=("none", "high", "max"),
        titles=("A river", "River bank", "Fox"),
        sampling=SamplingOptions(temperature=0.25),
        folder=folder,
    )


def lines(text: str, choices: Choices | None = None) -> list[str]:
    return [completion.line for completion in complete(text, choices)]


def test_slash_lists_every_command() -> None:
    assert [line.strip() for line in lines("/")] == [f"/{spec.name}" for spec in COMMANDS]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        ("/re", ["/rename ", "/regenerate"]),
        ("/RE", ["/rename ", "/regenerate"]),
        ("/qu", ["/quit"]),
        ("/quit", []),
        ("/zz", []),
        ("/help ", []),
        ("hello", []),
        ("/usr/b", []),
        ("/system a\n", []),
        ("/nothing a", []),
        ("/theme ", ["/theme dark", "/theme light", "/theme contrast"]),
        ("/theme l", ["/theme light"]),
        ("/theme light", []),
        ("/THEME l", ["/THEME light"]),
        ("/think m", ["/think max"]),
        ("/think h", ["/think high"]),
        ("/open riv", ["/open River bank", "/open A river"]),
        ("/set temp", ["/set temperature "]),
        ("/set t", ["/set temperature ", "/set top_k ", "/set top_p "]),
        ("/set temperature ", []),
        ("/export ", ["/export md ", "/export json "]),
        ("/export j", ["/export json "]),
        ("/export md n", ["/export md notes/", "/export md notes.md"]),
        ("/attach ", ["/attach notes/", "/attach a b.txt", "/attach notes.md"]),
        ("/attach a b", ["/attach a b.txt"]),
        ("/attach .", ["/attach .hidden"]),
        ("/attach notes/", ["/attach notes/first.txt"]),
        ("/attach nowhere/", []),
        ("/attach notes.md/", []),
        ("/attach ~no-such-user/", []),
        ("/rename x", []),
        ("/code ", []),
    ],
)
def test_line_is_completed(typed: str, expected: list[str], choices: Choices) -> None:
    assert lines(typed, choices) == expected


def test_absolute_folder_is_completed(choices: Choices) -> None:
    typed = f"/attach {choices.folder}/no"
    assert lines(typed, choices) == [f"{typed}tes/", f"{typed}tes.md"]


def test_home_folder_is_completed(choices: Choices, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(choices.folder))
    assert lines("/attach ~/a", choices) == ["/attach ~/a b.txt"]


def test_completed_names_and_words_mean_something(choices: Choices) -> None:
    """What is offered is never refused, as far as it is complete."""
    for start in ("/", "/theme ", "/think ", "/open ", "/attach ", "/export "):
        for line in lines(start, choices):
            assert is_command(line)
            try:
                parse_command(line, choices)
            except ConfigError as error:
                assert "found nothing" in str(error)  # noqa: PT017 -- most lines raise nothing


def test_key_shows_its_value(choices: Choices) -> None:
    shown = {completion.label: completion.help for completion in complete("/set ", choices)}
    assert tuple(shown) == SAMPLING_KEYS
    assert (shown["temperature"], shown["seed"]) == ("now 0.25", "now none")


def test_command_shows_what_it_takes_and_does() -> None:
    (completion,) = complete("/exp")
    assert (completion.label, completion.help) == (
        "/export md|json [FILE]",
        "Write the conversation to a file",
    )


def test_large_folder_is_cut(tmp_path: Path) -> None:
    for number in range(MAX_COMPLETIONS + 10):
        (tmp_path / f"{number:03}").touch()
    found = lines("/attach ", Choices(folder=tmp_path))
    assert (len(found), found[0]) == (MAX_COMPLETIONS, "/attach 000")


def test_name_that_would_break_the_line_is_left_out(tmp_path: Path) -> None:
    for name in ("good", "two\nlines", "\x1b[31mred"):
        (tmp_path / name).touch()
    assert lines("/attach ", Choices(folder=tmp_path)) == ["/attach good"]


@pytest.mark.parametrize(
    ("text", "usage"),
    [
        ("/set", None),
        ("/set ", "/set KEY VALUE"),
        ("/set temperature 1", "/set KEY VALUE"),
        ("/nothing x", None),
        ("hello you", None),
        ("/usr/bin x", None),
    ],
)
def test_usage_is_known_while_arguments_are_typed(text: str, usage: str | None) -> None:
    spec = usage_of(text)
    assert (spec.usage if spec else None) == usage

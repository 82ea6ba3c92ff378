"""The command line: what it accepts, when no screen can be shown, what starting does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import FRESH

from dsv4_chat.__main__ import main
from dsv4_chat.launch import editor_of, parse_arguments, plain_command, plain_reason
from dsv4_chat.settings import Settings
from dsv4_chat.settings_file import load_settings


def test_flags_become_settings(tmp_path: Path) -> None:
    flags = (
        "flash.gguf --ctx 4096 --system Brief. --think high --temp 0.5 --top-p 0.9 --top-k 40"
        f" --seed 7 --threads 2 --draft 1 --settings {tmp_path}/none.toml"
    )
    options = parse_arguments(flags.split(), {})
    settings = load_settings(options.settings_file, {}, options.overrides)
    assert settings == Settings(
        model="flash.gguf", context=4096, system="Brief.", think="high", temperature=0.5,
        top_p=0.9, top_k=40, seed=7, threads=2, draft=1,
    )  # fmt: skip


def test_model_is_the_shipped_one_without_a_name() -> None:
    assert parse_arguments([], {}).overrides == {}
    assert Settings().model == "pocket-v4"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--temp", "-1"], "temperature"),
        (["--think", "loud"], "think"),
        (["--settings", "{folder}"], "Is a directory"),
        (["--settings", "{folder}/none.toml"], "none.toml: no such settings file"),
    ],
)
def test_what_is_refused_is_one_line_that_names_it(
    arguments: list[str], expected: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [argument.format(folder=tmp_path) for argument in arguments]
    (tmp_path / "empty.toml").touch()
    assert main(["--settings", str(tmp_path / "empty.toml"), *arguments]) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1


def test_settings_are_written_where_they_are_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "new" / "settings.toml"
    assert main(["--settings", str(path), "--write-settings"]) == 0
    assert capsys.readouterr().out == f"{path}\n"
    assert load_settings(path, {}, {}) == Settings()


@pytest.mark.parametrize(
    ("environ", "encoding", "reason"),
    [
        ({"TERM": "xterm-256color"}, "utf-8", None),
        ({"TERM": "screen"}, "UTF8", None),
        ({"TERM": "linux", "NO_COLOR": "1"}, "utf-8", None),
        ({"TERM": "dumb"}, "utf-8", "dumb"),
        ({}, "utf-8", "TERM"),
        ({"TERM": "xterm"}, "iso8859-1", "LC_ALL=C.UTF-8"),
        ({"TERM": "xterm"}, "ansi_x3.4-1968", "UTF-8"),
        ({"TERM": "xterm"}, None, "UTF-8"),
    ],
)
def test_screen_needs_a_terminal_that_places_utf8(
    environ: dict[str, str], encoding: str | None, reason: str | None
) -> None:
    found = plain_reason(environ, is_terminal=True, encoding=encoding)
    assert (found is None) == (reason is None)
    assert reason is None or reason in (found or "")


def test_screen_needs_a_terminal() -> None:
    assert plain_reason({"TERM": "xterm"}, is_terminal=False, encoding="utf-8") == "no terminal"


def test_line_chat_is_started_with_the_same_choices() -> None:
    settings = Settings(model="-odd.gguf", system="--x", context=512, seed=3, think="high")
    command = plain_command(settings)
    assert command[:4] == [sys.executable, "-m", "edgedsv4", "chat"]
    assert command[-2:] == ["--", "-odd.gguf"]
    for flag in ("--system=--x", "--ctx=512", "--seed=3", "--think=high"):
        assert flag in command


def test_without_a_terminal_the_line_chat_answers(tmp_path: Path) -> None:
    done = subprocess.run(
        [*FRESH, sys.executable, "-m", "dsv4_chat", "--temp", "0", "--plain"],
        input="What is 12 + 7?\n",
        capture_output=True,
        text=True,
        check=False,
        env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert "19" in done.stdout


def test_editor_is_chosen_by_settings_then_environment() -> None:
    environ = {"VISUAL": "code -w", "EDITOR": "nano"}
    assert editor_of(Settings(editor="emacs"), environ) == "emacs"
    assert editor_of(Settings(), environ) == "code -w"
    assert editor_of(Settings(), {"EDITOR": "nano"}) == "nano"
    assert editor_of(Settings(), {}) == "vi"


def test_help_loads_neither_textual_nor_torch() -> None:
    code = (
        "import sys\n"
        "from dsv4_chat.__main__ import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit: pass\n"
        "print(sorted({'torch', 'numpy', 'textual', 'rich'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [*FRESH, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.stdout.endswith("[]\n"), done.stderr

"""What reaches stdout and stderr, at a terminal and elsewhere."""

from __future__ import annotations

import io

import pytest

from edgedsv4.cli.terminal import Terminal, one_line, visible

TTY = {"TERM": "xterm"}


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_control_characters_are_spelled_out() -> None:
    assert visible("a\x1b[31mb\x07\x9b\x7f\tc\n") == "a\\x1b[31mb\\x07\\x9b\\x7f\tc\n"


def test_message_of_several_lines_becomes_one() -> None:
    assert one_line("first\n  second\r\n\x00third") == "first second \\x00third"


def test_reply_to_a_terminal_carries_no_escape_sequence() -> None:
    out = Screen()
    Terminal(out, io.StringIO(), TTY).write("\x1b]0;title\x07")
    assert out.getvalue() == "\\x1b]0;title\\x07"


def test_reply_to_a_pipe_is_exact() -> None:
    out = io.StringIO()
    Terminal(out, io.StringIO(), TTY).write("\x1b[1m")
    assert out.getvalue() == "\x1b[1m"


def test_thinking_is_muted_at_a_terminal() -> None:
    out = Screen()
    Terminal(out, io.StringIO(), TTY).muted("hm")
    assert out.getvalue() == "\x1b[2mhm\x1b[0m"


@pytest.mark.parametrize(
    "environ", [{"TERM": "dumb"}, {}, {"TERM": "xterm", "NO_COLOR": "1"}], ids=str
)
def test_no_colour_where_it_is_unwanted(environ: dict[str, str]) -> None:
    out = Screen()
    Terminal(out, io.StringIO(), environ).muted("hm")
    assert out.getvalue() == "hm"


def test_empty_no_colour_variable_means_nothing() -> None:
    assert Terminal(Screen(), io.StringIO(), {"TERM": "xterm", "NO_COLOR": ""}).has_colour


def test_progress_goes_to_a_terminal_and_is_erased() -> None:
    err = Screen()
    terminal = Terminal(io.StringIO(), err, TTY)
    terminal.progress("reading", 0, 8)
    terminal.line("done")
    assert err.getvalue() == "\r\x1b[Kreading: 0/8 0 %\r\x1b[K"


@pytest.mark.parametrize("err", [io.StringIO(), Screen()], ids=["pipe", "dumb terminal"])
def test_no_progress_elsewhere(err: io.StringIO) -> None:
    terminal = Terminal(io.StringIO(), err, {"TERM": "dumb"} if err.isatty() else TTY)
    terminal.progress("reading", 0, 8)
    terminal.evaluated(8, 8)
    assert err.getvalue() == ""


def test_json_keeps_text_readable() -> None:
    out = io.StringIO()
    Terminal(out, io.StringIO(), {}).json({"text": "é漢"})
    assert out.getvalue() == '{\n  "text": "é漢"\n}\n'

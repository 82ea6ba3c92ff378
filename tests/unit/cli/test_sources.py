"""Texts and messages from files, pipes and arguments."""

from __future__ import annotations

from pathlib import Path

import pytest
from scripted_engine import PipedStdin

from edgedsv4.cli.lines import Messages
from edgedsv4.cli.sources import (
    check_argument,
    check_text,
    decode_text,
    output_path,
    read_bytes,
    read_text,
    stdin_lines,
)
from edgedsv4.errors import ConfigError


def test_invalid_utf8_names_byte_and_offset() -> None:
    with pytest.raises(
        ConfigError, match="stdin: expected UTF-8 text, found byte 0xff at offset 2"
    ):
        decode_text(b"ab\xff", "stdin")


def test_argument_with_undecodable_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="-p: expected UTF-8"):
        check_argument("ab\udcff", "-p")


def test_text_without_utf8_form_is_refused() -> None:
    check_text("é\U0001f600", "CHAT")
    with pytest.raises(ConfigError, match=r"CHAT: .* lone surrogate \(U\+D800\)"):
        check_text("a\ud800", "CHAT")


def test_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"file .*absent: No such file"):
        read_text(str(tmp_path / "absent"), "file")


def test_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Is a directory"):
        read_text(str(tmp_path), "file")


def test_too_large_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(b"12345")
    with pytest.raises(ConfigError, match="at most 4 bytes, found more"):
        read_bytes(str(tmp_path / "big"), "file", limit=4)


def test_dash_reads_stdin_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", PipedStdin("zwei\nZeilen é".encode()))
    assert read_text("-", "file") == "zwei\nZeilen é"


def test_nul_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", PipedStdin(b"a\0b"))
    assert read_text("-", "file") == "a\0b"


def test_lines_lose_their_ends_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", PipedStdin(b"one\r\n two \n\nlast"))
    assert list(stdin_lines()) == ["one", " two ", "", "last"]


def test_bad_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", PipedStdin(b"one\n\xc3\n"))
    with pytest.raises(ConfigError, match="stdin line 2"):
        list(stdin_lines())


def test_output_in_a_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such directory"):
        output_path(str(tmp_path / "absent" / "x.npy"), "--out")


def test_output_onto_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="found a directory"):
        output_path(str(tmp_path), "--out")


@pytest.mark.parametrize(
    ("lines", "messages"),
    [
        (["one", "two"], ["one", "two"]),
        (["a\\", "b\\", "c", "d"], ["a\nb\nc", "d"]),
        (["a\\"], ["a\n"]),
        (['"""', "x", "", "y", '"""', "z"], ["x\n\ny", "z"]),
        (['"""x', 'y"""'], ["x\ny"]),
        (['"""one line"""'], ["one line"]),
        (['"""', "open"], ["open"]),
        ([], []),
    ],
    ids=str,
)
def test_lines_become_messages(lines: list[str], messages: list[str]) -> None:
    assert list(Messages(iter(lines))) == messages

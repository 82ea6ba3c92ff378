"""Conversations that are saved and continued, with a scripted engine and with a real one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import PipedStdin, ScriptedEngine, Thinking, scripted_engine

import edgedsv4
from edgedsv4.cli import main
from edgedsv4.errors import ContextFullError, SnapshotError, StorageError

Talk = Callable[..., tuple[int, str, str]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capfd: Capture) -> Talk:
    """Plays a chat: engine (None: the real one), input, arguments -> status, stdout, stderr."""

    def play(engine: ScriptedEngine | None, text: str, *arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", PipedStdin(text.encode()))
        if engine is not None:
            monkeypatch.setattr(edgedsv4, "Engine", engine, raising=False)
        status = main(["chat", *(arguments or ("m.gguf",))])
        out, err = capfd.readouterr()
        return status, out, err

    return play


def asked(engine: ScriptedEngine) -> list[tuple[str, object, str]]:
    return [(m.role, m.content, m.reasoning) for m in engine.session.calls[-1].messages]


def test_saved_conversation_goes_on_with_its_messages(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.dsv4s"
    first = scripted_engine([Thinking("hm"), "Hello"])
    status, out, err = talk(first, f"hi\n/save {path}\n", "m.gguf", "--system", "Be brief.")
    assert (status, err) == (0, "")
    assert f"(saved 7 tokens to {path})" in out
    second = scripted_engine(["Fine"])
    out = talk(second, f"/load {path}\nand you?\n")[1]
    assert f"(2 messages, 7 tokens from {path})" in out
    assert asked(second) == [
        ("system", "Be brief.", ""),
        ("user", "hi", ""),
        ("assistant", "Hello", "hm"),
        ("user", "and you?", ""),
    ]


def test_flags_load_before_and_save_behind(talk: Talk, tmp_path: Path) -> None:
    path = str(tmp_path / "talk.dsv4s")
    talk(scripted_engine(["Hello"]), "hi\n", "m.gguf", "--save", path)
    second = scripted_engine(["Fine"])
    assert talk(second, "more\n", "m.gguf", "--load", path, "--save", path)[0] == 0
    entries = json.loads(Path(path).read_bytes())["messages"]
    assert [entry["content"] for entry in entries] == ["hi", "Hello", "more", "Fine"]


def test_empty_conversation_can_be_saved_and_loaded(talk: Talk, tmp_path: Path) -> None:
    path = tmp_path / "talk.dsv4s"
    status, out, err = talk(scripted_engine(), f"/save {path}\n/load {path}\n")
    assert (status, err) == (0, "")
    assert f"(0 messages, 7 tokens from {path})" in out


def test_command_without_a_file_asks_for_one(talk: Talk) -> None:
    err = talk(scripted_engine(), "/save\n/load\n")[2]
    assert "/save needs the name of a file" in err
    assert "/load needs the name of a file" in err


@pytest.mark.parametrize(
    "error",
    [
        SnapshotError("belongs to another model", path="x"),
        StorageError("cannot be opened: No such file or directory", path="x"),
        ContextFullError(9, 5),
    ],
    ids=lambda error: type(error).__name__,
)
def test_refused_file_leaves_the_conversation(talk: Talk, error: Exception) -> None:
    engine = scripted_engine(["Hello"], ["Fine"])
    engine.session.refuses = error
    status, _, err = talk(engine, "hi\n/load x\n/save x\nmore\n")
    assert status == 0
    assert f"/load: {error}" in err
    assert f"/save: {error}" in err
    assert [content for _, content, _ in asked(engine)] == ["hi", "Hello", "more"]


def test_refused_file_of_a_flag_ends_the_command(talk: Talk) -> None:
    engine = scripted_engine()
    engine.session.refuses = SnapshotError("belongs to another model", path="x")
    assert talk(engine, "hi\n", "m.gguf", "--load", "x")[0] == 2


@pytest.mark.parametrize(
    "note", [b"{", b"[]", b'{"messages": [{"role": "cat"}]}', b"\xff", b"[" * 9**5]
)
def test_note_that_is_no_conversation_is_refused(talk: Talk, tmp_path: Path, note: bytes) -> None:
    (tmp_path / "x").write_bytes(note)
    err = talk(scripted_engine(), f"/load {tmp_path / 'x'}\n")[2]
    assert "holds no conversation of `edgedsv4 chat`" in err


def test_real_conversation_goes_on_without_evaluating_it_again(talk: Talk, tmp_path: Path) -> None:
    path = str(tmp_path / "talk.dsv4s")
    model = ("random-tiny", "--seed", "3", "-n", "12", "--think", "none", "--threads", "1")
    assert talk(None, "Hello\n", *model, "--save", path)[0] == 0
    length = edgedsv4.inspect_snapshot(path).length
    out = talk(None, "More\n/stats\n", *model, "--load", path)[1]
    assert f"2 messages, {length} tokens" in out
    assert f"tokens, {length} kept," in out

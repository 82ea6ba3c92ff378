"""`edgedsv4 convert` and `edgedsv4 quantize` on the tiny shipped model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import get_args

import pytest

import edgedsv4
from edgedsv4.cli import convert_commands, main
from edgedsv4.runtime.convert import FloatType, MtpPlace

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs one command: arguments -> status, stdout, stderr."""

    def play(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return play


def test_choices_are_those_of_the_options() -> None:
    assert get_args(MtpPlace) == convert_commands.MTP_CHOICES
    assert get_args(FloatType) == convert_commands.FP8_CHOICES


def test_convert_writes_a_model_and_says_what(run: Run, tmp_path: Path) -> None:
    status, out, err = run("convert", "random-tiny", tmp_path / "m.gguf")
    assert (status, err) == (0, "")
    assert out.splitlines()[0] == str(tmp_path / "m.gguf")
    assert run("inspect", tmp_path / "m.gguf")[0] == 0


def test_json_is_one_document(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "m.gguf"
    status, out, err = run(
        "quantize", "random-tiny", target, "--experts", "q8_0", "--head", "Q8_0", "--json"
    )
    found = json.loads(out)
    assert (status, err, found["files"]) == (0, "", [str(target)])
    assert found["block_types"]["Q8_0"] > 0


def test_notes_go_to_stderr(run: Run, tmp_path: Path) -> None:
    status, _, err = run("quantize", "random-tiny", tmp_path / "m.gguf", "--experts", "Q4_K")
    assert (status, err.count("\n")) == (0, 1)
    assert err.startswith("edgedsv4: stored as Q8_0 instead of Q4_K")


def test_parts_are_listed(run: Run, tmp_path: Path) -> None:
    status, out, _ = run("convert", "random-tiny", tmp_path / "m.gguf", "--split-max-bytes", "1M")
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert status == 0
    assert len(parts) > 1
    assert [Path(line).name for line in out.splitlines()[: len(parts)]] == parts


@pytest.mark.parametrize(
    "arguments",
    [
        ["convert", "random-tiny"],
        ["convert", "random-tiny", "{}/none/m.gguf"],
        ["convert", "random-tiny", "{}"],
        ["convert", "{}/absent", "{}/m.gguf"],
        ["convert", "random-tiny", "{}/m.gguf", "--mtp", "both"],
        ["convert", "random-tiny", "{}/m.gguf", "--split-max-bytes", "0"],
        ["quantize", "random-tiny", "{}/m.gguf", "--experts", "IQ1_S"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_refused_in_one_line(
    run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    status, out, err = run(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_interrupt_leaves_nothing_behind(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgedsv4.cli.terminal.Terminal.progress", interrupt)
    assert run("convert", "random-tiny", tmp_path / "m.gguf")[0] == 130
    assert list(tmp_path.iterdir()) == []


def test_full_disk_is_told(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise edgedsv4.CapacityError("the disk is full", needed_bytes=2, available_bytes=1)

    monkeypatch.setattr("edgedsv4.runtime.convert.stream_gguf", full)
    status, _, err = run("convert", "random-tiny", tmp_path / "m.gguf")
    assert (status, err) == (2, "edgedsv4: the disk is full: needs 2 bytes, 1 are available\n")

"""`edgedsv4 pack build`, `verify` and `info`, and a model that is named by its pack."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pack_models import write_model

import edgedsv4
from edgedsv4.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs one command: arguments -> status, stdout, stderr."""

    def play(*arguments: str | Path) -> tuple[int, str, str]:
        status = main([str(argument) for argument in arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return play


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_model(tmp_path / "m.gguf")


@pytest.fixture
def pack(run: Run, model: Path, tmp_path: Path) -> Path:
    target = tmp_path / "x"
    assert run("pack", "build", model, target, "--safety-margin", "0")[0] == 0
    return target


def test_build_writes_a_pack_and_says_what(run: Run, model: Path, tmp_path: Path) -> None:
    target, dense = tmp_path / "y", tmp_path / "dense.gguf"
    status, out, err = run(
        *("pack", "build", model, target, "--safety-margin", "0", "--dense-out", dense)
    )
    assert (status, err) == (0, "")
    lines = out.splitlines()
    assert lines[:3] == [str(target), f"{target}.manifest.json", str(dense)]
    assert lines[3] == f"version 1, 3 layers of 8 experts, {target.stat().st_size:,} bytes"
    assert lines[4].split()[0] == "MXFP4"


def test_build_as_json_is_one_document(run: Run, model: Path, tmp_path: Path) -> None:
    status, out, _ = run(
        *("pack", "build", model, tmp_path / "y", "--safety-margin", "0", "--json")
    )
    found = json.loads(out)
    assert status == 0
    assert (found["version"], found["layers"], found["experts"]) == (1, 3, 8)
    assert found["pack"] == str(tmp_path / "y")
    assert found["dense"] is None


def test_verify_counts_what_it_compared(run: Run, pack: Path) -> None:
    status, out, err = run("pack", "verify", pack)
    assert (status, err) == (0, "")
    assert out.splitlines()[0].split() == ["matrices", "72"]
    status, out, _ = run("pack", "verify", pack, "--sampled", "--json")
    assert (status, json.loads(out)["problems"]) == (0, [])


def test_verify_of_a_damaged_pack_fails_with_its_problems(run: Run, pack: Path) -> None:
    content = bytearray(pack.read_bytes())
    content[-5000] ^= 1
    pack.write_bytes(content)
    status, out, err = run("pack", "verify", pack, "--json")
    assert status == 2
    assert len(json.loads(out)["problems"]) == 2
    assert err.startswith("edgedsv4: ")
    assert run("pack", "verify", pack)[1] == ""


def test_info_prints_the_facts(run: Run, pack: Path) -> None:
    status, out, _ = run("pack", "info", pack)
    facts = {line[:20].strip(): line[20:] for line in out.splitlines()}
    assert status == 0
    assert facts["format"] == "SGLANG-EXPERTPACK-v1"
    assert facts["bytes per token"] == f"{3 * 3 * 3 * 64 * 96 // 32 * 17:,}"
    status, out, _ = run("pack", "info", f"{pack}.manifest.json", "--json")
    assert (status, json.loads(out)["block_types"]) == (0, ["MXFP4"])


def test_model_may_be_named_by_its_pack(run: Run, pack: Path, model: Path) -> None:
    words = ("-p", "abc", "--raw", "--temp", "0", "-n", "12", "--device", "cpu", "--ctx", "64")
    status, out, _ = run("run", pack, *words)
    assert status == 0
    assert out == run("run", model, *words)[1]
    assert out == run("run", f"{pack}.manifest.json", "--dense", model, *words)[1]
    assert run("inspect", pack, "--dense", model)[0] == 0
    budget = ("--ctx", "64", "--ram", "1G")
    assert run("plan", pack, *budget)[1] == run("plan", model, *budget)[1]


def test_interrupted_build_goes_on(
    run: Run, model: Path, pack: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_terminal: object, what: str, done: int, total: int) -> None:
        if what == "writing experts" and done > total // 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("edgedsv4.cli.terminal.Terminal.progress", interrupt)
        assert run("pack", "build", model, tmp_path / "y", "--safety-margin", "0")[0] == 130
    status, _, err = run("pack", "build", model, tmp_path / "y", "--safety-margin", "0")
    assert (status, "--resume" in err) == (2, True)
    status, _, err = run(
        *("pack", "build", model, tmp_path / "y", "--safety-margin", "0", "--resume")
    )
    assert (status, err) == (0, "edgedsv4: finished layers that were there already: 1\n")
    assert (tmp_path / "y").read_bytes() == pack.read_bytes()


@pytest.mark.parametrize(
    "arguments",
    [
        ["pack"],
        ["pack", "burn"],
        ["pack", "build", "random-tiny"],
        ["pack", "build", "random-tiny", "{}/none/x"],
        ["pack", "build", "random-tiny", "{}"],
        ["pack", "build", "{}/absent", "{}/x"],
        ["pack", "build", "random-tiny", "{}/x", "--alignment", "100"],
        ["pack", "build", "random-tiny", "{}/x", "--safety-margin", "900T"],
        ["pack", "build", "random-tiny", "{}/x", "--dense-out", "{}/x"],
        ["pack", "build", "random-tiny", "{}/x", "--expert-freq", "{}/absent"],
        ["pack", "verify", "{}/absent"],
        ["pack", "info", "{}/absent"],
        ["pack", "info", "pocket-v4"],
        ["run", "random-tiny", "-p", "a", "--dense", "x"],
    ],
    ids=" ".join,
)
def test_what_cannot_be_done_is_refused_in_one_line(
    run: Run, tmp_path: Path, arguments: list[str]
) -> None:
    status, out, err = run(*(argument.replace("{}", str(tmp_path)) for argument in arguments))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert list(tmp_path.iterdir()) == []


def test_defaults_are_those_that_help_names() -> None:
    assert edgedsv4.PackOptions().safety_margin_bytes == 16 << 30
    assert edgedsv4.PackOptions().alignment == 4096

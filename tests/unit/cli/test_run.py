"""`edgedsv4 run` and what `main` makes of failures, with a scripted engine."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from scripted_engine import PipedStdin, ScriptedEngine, Thinking, scripted_engine

import edgedsv4
from edgedsv4 import DraftStats, StepStats
from edgedsv4.cli import main
from edgedsv4.cli.replies import drafts_text, stats_json, stats_line

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Runs one reply: engine, arguments, stdin -> status, stdout, stderr."""

    def play(engine: object, *arguments: str, stdin: bytes = b"") -> tuple[int, str, str]:
        monkeypatch.setattr("sys.stdin", PipedStdin(stdin))
        monkeypatch.setattr(edgedsv4, "Engine", engine, raising=False)
        status = main(["run", "m.gguf", *arguments])
        out, err = capfd.readouterr()
        return status, out, err

    return play


def prompt_of(engine: ScriptedEngine) -> object:
    return engine.session.calls[0].messages[-1].content


def test_reply_goes_to_stdout_and_thinking_to_stderr(run: Run) -> None:
    engine = scripted_engine([Thinking("hm"), "Hel", "lo"])
    assert run(engine, "-p", "hi") == (0, "Hello\n", "hm\n")


def test_prompt_comes_from_an_argument(run: Run) -> None:
    run(engine := scripted_engine(["x"]), "-p", "hi é")
    assert prompt_of(engine) == "hi é"


def test_prompt_comes_from_a_file(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("from a file\n", encoding="utf-8")
    run(engine := scripted_engine(["x"]), "-f", str(tmp_path / "p.txt"))
    assert prompt_of(engine) == "from a file\n"


@pytest.mark.parametrize("arguments", [["-"], ["--temp", "0", "-"], ["-f", "-"]], ids=" ".join)
def test_prompt_comes_from_stdin(run: Run, arguments: list[str]) -> None:
    run(engine := scripted_engine(["x"]), *arguments, stdin=b"piped")
    assert prompt_of(engine) == "piped"


@pytest.mark.parametrize("arguments", [[], ["-p", "a", "-"], ["-p", "a", "-f", "b"]], ids=str)
def test_exactly_one_prompt_is_needed(run: Run, arguments: list[str]) -> None:
    status, _, err = run(engine := scripted_engine(), *arguments)
    assert (status, engine.opened) == (2, [])
    assert err.startswith("edgedsv4: expected one text")


def test_system_message_goes_first(run: Run) -> None:
    run(engine := scripted_engine(["x"]), "-p", "hi", "--system", "Be brief.")
    assert [m.role for m in engine.session.calls[0].messages] == ["system", "user"]


def test_json_is_one_document(run: Run) -> None:
    status, out, err = run(scripted_engine([Thinking("hm"), "yes"]), "-p", "hi", "--json")
    found = json.loads(out)
    assert (status, err) == (0, "")
    assert (found["text"], found["thinking"], found["finish_reason"]) == ("yes", "hm", "stop")
    assert found["stats"]["generated_tokens"] == 4
    assert found["tokens"] == {"reused": 2, "evaluated": 10, "rebuilt": 0}


def test_stats_line_tells_of_drafts_by_place() -> None:
    drafts = DraftStats(drafted=(20, 20), accepted=(15, 5), drafted_steps=20, plain_steps=4)
    stats = StepStats(
        prompt_tokens=1, generated_tokens=44, prefill_seconds=1, decode_seconds=2, drafts=drafts
    )
    assert stats_line(stats).endswith(
        "; drafts accepted 75%, 25%, 2.00 tokens per step in 20 of 24 steps (on)"
    )
    found = stats_json(stats)["drafts"]
    assert found == {
        "state": "on",
        "drafted": [20, 20],
        "accepted": [15, 5],
        "acceptance": [0.75, 0.25],
        "tokens_per_step": 2.0,
        "drafted_steps": 20,
        "plain_steps": 4,
    }


def test_stats_line_says_why_nothing_was_drafted() -> None:
    drafts = DraftStats(drafted=(0,), accepted=(0,), plain_steps=3, state="off: damaged")
    assert drafts_text(drafts) == "no drafts made (off: damaged)"


def test_stats_go_to_stderr(run: Run) -> None:
    _, out, err = run(scripted_engine(["x"]), "-p", "hi", "--stats")
    assert (out, "prompt 12 tokens, 2 kept" in err) == ("x\n", True)


def test_raw_continues_the_text_after_bos(run: Run) -> None:
    engine = scripted_engine(["né"])
    assert run(engine, "--raw", "-p", "a") == (0, "né\n", "")
    assert engine.session.synced == [[256, 97]]


def test_raw_reply_as_json(run: Run) -> None:
    _, out, _ = run(scripted_engine(["né"]), "--raw", "-p", "a", "--json")
    found = json.loads(out)
    assert (found["text"], found["stats"]["generated_tokens"]) == ("né", 3)


@pytest.mark.parametrize("flag", [["--system", "x"], ["--think", "low"]], ids=" ".join)
def test_raw_excludes_the_template_flags(run: Run, flag: list[str]) -> None:
    assert run(scripted_engine(), "--raw", "-p", "a", *flag)[0] == 2


def test_interrupt_keeps_what_was_printed(run: Run) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    assert run(scripted_engine(["par", interrupt, "tial"]), "-p", "hi")[:2] == (130, "par\n")


def test_interrupt_while_a_raw_text_is_tokenized_leaves(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> list[int]:
        signal.raise_signal(signal.SIGINT)
        return [1]

    monkeypatch.setattr("edgedsv4.cli.run_command.raw_ids", interrupt)
    engine = scripted_engine(["never said"])
    assert run(engine, "--raw", "-p", "hi") == (130, "", "")


class Unopenable:
    """An engine whose opening fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def open(self, *_arguments: object, **_options: object) -> object:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (edgedsv4.FormatError("bad", path="m.gguf"), 2),
        (edgedsv4.UnsupportedModelError("bad"), 2),
        (edgedsv4.ConfigError("bad"), 2),
        (edgedsv4.BackendUnavailableError("bad"), 2),
        (edgedsv4.CapacityError("bad", needed_bytes=2, available_bytes=1), 2),
        (edgedsv4.ContextFullError(2, 1), 2),
        (edgedsv4.NumericError("bad"), 1),
        (edgedsv4.ExpertReadError("bad"), 1),
        (edgedsv4.DeviceLostError("bad"), 1),
        (OSError(5, "Input/output error", "m.gguf"), 1),
        (MemoryError(), 1),
        (RuntimeError("a bug\nwith lines"), 1),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failure_is_one_line_and_a_status(run: Run, error: BaseException, status: int) -> None:
    found, out, err = run(Unopenable(error), "-p", "hi")
    assert (found, out) == (status, "")
    assert err.startswith("edgedsv4: ")
    assert err.count("\n") == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), edgedsv4.CancelledError("x")], ids=repr)
def test_interrupted_start_is_silent(run: Run, error: BaseException) -> None:
    assert run(Unopenable(error), "-p", "hi") == (130, "", "")


def test_traceback_can_be_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEDSV4_TRACEBACK", "1")
    assert "Traceback" in run(Unopenable(RuntimeError("bug")), "-p", "hi")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["--temp", "nan"],
        ["--temp", "-1"],
        ["--temp", "x"],
        ["--top-p", "0"],
        ["--min-p", "2"],
        ["--repeat-penalty", "0"],
        ["--presence-penalty", "1e9"],
        ["--seed", "-1"],
        ["--seed", "9" * 30],
        ["--top-k", "1.5"],
        ["-n", "0"],
        ["--threads", "0"],
        ["--threads", "1000000"],
        ["--ctx", "0"],
        ["--chunk", "0"],
        ["--ram", "0"],
        ["--ram", "much"],
        ["--profile", "fast"],
        ["--backend", "cuda"],
        ["--dtype", "f8"],
        ["--think", "hard"],
        ["--logit-bias", "5=inf"],
        ["--device", ""],
        ["--no-such-flag"],
        ["--tem", "1"],
    ],
    ids=" ".join,
)
def test_bad_option_is_refused_in_one_line(run: Run, arguments: list[str]) -> None:
    engine = scripted_engine()
    status, out, err = run(engine, "-p", "hi", *arguments)
    assert (status, out, engine.opened) == (2, "", [])
    assert err.count("\n") == 1

"""The conversation of `edgedsv4 chat`, driven over a pipe with a scripted engine."""

from __future__ import annotations

import signal
from collections.abc import Callable

import pytest
from scripted_engine import PipedStdin, ScriptedEngine, Step, Thinking, scripted_engine

import edgedsv4
from edgedsv4 import DraftStats
from edgedsv4.cli import main
from edgedsv4.cli.commands import COMMANDS as COMMAND_TABLE
from edgedsv4.cli.repl import COMMANDS

Talk = Callable[..., tuple[int, str, str]]


@pytest.fixture
def talk(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Talk:
    """Plays a chat: engine, input text, extra arguments -> status, stdout, stderr."""

    def play(engine: ScriptedEngine, text: str | bytes, *arguments: str) -> tuple[int, str, str]:
        data = text if isinstance(text, bytes) else text.encode()
        monkeypatch.setattr("sys.stdin", PipedStdin(data))
        monkeypatch.setattr(edgedsv4, "Engine", engine, raising=False)
        status = main(["chat", *(arguments or ["m.gguf"])])
        out, err = capfd.readouterr()
        return status, out, err

    return play


def said(engine: ScriptedEngine, call: int) -> list[tuple[str, object]]:
    return [(m.role, m.content) for m in engine.session.calls[call].messages]


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def test_replies_are_streamed_one_per_line(talk: Talk) -> None:
    engine = scripted_engine(["Hel", "lo"], ["Bye"])
    assert talk(engine, "hi\nsee you\n") == (0, "Hello\nBye\n", "")


def test_default_model_is_the_one_the_help_names(talk: Talk) -> None:
    engine = scripted_engine()
    out = talk(engine, "", "--seed", "1")[1]
    assert engine.opened[0][0] == edgedsv4.DEFAULT_MODEL
    chat = next(command for command in COMMAND_TABLE if command.name == "chat")
    assert chat.flags[0].help.endswith(f"{edgedsv4.DEFAULT_MODEL} if left out")
    assert edgedsv4.SHIPPED_MODELS[edgedsv4.DEFAULT_MODEL].note in out


def test_shipped_model_says_what_it_is_and_what_to_try(talk: Talk) -> None:
    note, examples, commands = talk(scripted_engine(), "", "pocket-v4")[1].splitlines()
    assert note.startswith("pocket-v4 is a small demo model (23M parameters)")
    assert examples.count("|") == 2
    assert "/help" in commands


def test_next_turn_carries_the_conversation_with_its_thinking(talk: Talk) -> None:
    engine = scripted_engine([Thinking("hm"), "one"], ["two"])
    talk(engine, "a\nb\n")
    assert said(engine, 1) == [("user", "a"), ("assistant", "one"), ("user", "b")]
    assert engine.session.calls[1].messages[1].reasoning == "hm"


def test_thinking_is_set_apart_from_the_answer(talk: Talk) -> None:
    assert talk(scripted_engine([Thinking("hm"), "yes"]), "a\n")[1] == "hm\nyes\n"


def test_empty_lines_are_no_messages(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    talk(engine, "\n   \na\n\n")
    assert len(engine.session.calls) == 1


def test_continued_lines_are_one_message(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    talk(engine, "a\\\nb\n")
    assert said(engine, 0) == [("user", "a\nb")]


def test_exit_leaves_the_rest_unread(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    assert talk(engine, "/exit\na\n") == (0, "", "")
    assert engine.session.calls == []


def test_reset_forgets_the_conversation(talk: Talk) -> None:
    engine = scripted_engine(["x"], ["y"])
    talk(engine, "a\n/reset\nb\n")
    assert said(engine, 1) == [("user", "b")]


def test_undo_takes_one_exchange_back(talk: Talk) -> None:
    engine = scripted_engine(["x"], ["y"], ["z"])
    talk(engine, "a\nb\n/undo\nc\n")
    assert said(engine, 2) == [("user", "a"), ("assistant", "x"), ("user", "c")]


def test_retry_asks_the_same_again(talk: Talk) -> None:
    engine = scripted_engine(["x"], ["y"], ["z"])
    talk(engine, "a\n/retry\nb\n")
    assert said(engine, 1) == [("user", "a")]
    assert said(engine, 2) == [("user", "a"), ("assistant", "y"), ("user", "b")]


@pytest.mark.parametrize("command", ["undo", "retry"])
def test_nothing_to_take_back_is_told(talk: Talk, command: str) -> None:
    assert talk(scripted_engine(), f"/{command}\n")[2] == f"nothing to {command}\n"


def test_system_message_goes_first_and_can_be_removed(talk: Talk) -> None:
    engine = scripted_engine(["x"], ["y"])
    talk(engine, "a\n/system\nb\n", "--system", "Be brief.")
    assert said(engine, 0) == [("system", "Be brief."), ("user", "a")]
    assert said(engine, 1)[0] == ("user", "a")


def test_system_message_can_be_set_inside(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    talk(engine, "/system Be kind.\na\n")
    assert said(engine, 0)[0] == ("system", "Be kind.")


@pytest.mark.parametrize(("mode", "expected"), [("none", "none"), ("max", "max"), ("40", 40)])
def test_thinking_mode_holds_from_the_next_reply(
    talk: Talk, mode: str, expected: str | int
) -> None:
    engine = scripted_engine(["x"])
    talk(engine, f"/think {mode}\na\n")
    prompt = engine.session.calls[0].prompt
    assert prompt is not None
    assert prompt.thinking == expected


def test_unknown_thinking_mode_changes_nothing(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    _, out, err = talk(engine, "/think a lot\na\n", "m.gguf", "--think", "low")
    prompt = engine.session.calls[0].prompt
    assert prompt is not None
    assert (prompt.thinking, out) == ("low", "x\n")
    assert err == "/think: expected none, low, high, max or 1..100, found 'a lot'\n"


def test_stats_tell_of_the_last_reply_and_the_context(talk: Talk) -> None:
    out = talk(scripted_engine(["x"]), "a\n/stats\n")[1]
    assert "reply 4 tokens, 2.00 s (2.0/s)" in out
    assert "context: 7 of 100 tokens, 4,096 bytes" in out


def test_stats_tell_of_the_drafts_of_the_session(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    engine.session.totals.drafts = DraftStats(drafted=(4,), accepted=(3,), drafted_steps=4)
    out = talk(engine, "a\n/stats\n")[1]
    assert "session: drafts accepted 75%, 1.75 tokens per step in 4 of 4 steps (on)" in out


def test_help_lists_every_command(talk: Talk) -> None:
    out = talk(scripted_engine(), "/help\n")[1]
    assert [name for name in COMMANDS if f"\n{name}" not in f"\n{out}"] == []


def test_unknown_command_is_told_and_not_sent(talk: Talk) -> None:
    engine = scripted_engine()
    assert talk(engine, "/halp me\n")[2] == "unknown command /halp; /help lists them\n"


def test_interrupt_keeps_the_partial_answer_and_the_session(talk: Talk) -> None:
    engine = scripted_engine(["par", interrupt, "tial"], ["on"])
    status, out, err = talk(engine, "a\nb\n")
    assert (status, out) == (0, "par\non\n")
    assert err == "(stopped; the answer so far is kept)\n"
    assert said(engine, 1) == [("user", "a"), ("assistant", "par"), ("user", "b")]


def test_interrupt_before_the_answer_takes_the_message_back(talk: Talk) -> None:
    engine = scripted_engine([interrupt], ["x"])
    talk(engine, "a\nb\n")
    assert said(engine, 1) == [("user", "b")]


def test_second_interrupt_leaves(talk: Talk) -> None:
    def twice() -> None:
        interrupt()
        interrupt()

    assert talk(scripted_engine(["a", twice]), "a\nb\n")[0] == 130


def test_signal_handler_is_put_back_after_a_reply(talk: Talk) -> None:
    before = signal.getsignal(signal.SIGINT)
    talk(scripted_engine(["x"]), "a\n")
    assert signal.getsignal(signal.SIGINT) is before


RECOVERABLE: list[Step] = [
    edgedsv4.ContextFullError(101, 100),
    edgedsv4.ConfigError("thinking must be none or high"),
    edgedsv4.NumericError("a logit is NaN"),
]


@pytest.mark.parametrize("error", RECOVERABLE, ids=lambda error: type(error).__name__)
def test_failed_reply_takes_the_message_back_and_goes_on(talk: Talk, error: Step) -> None:
    engine = scripted_engine([error], ["x"])
    status, out, err = talk(engine, "a\nb\n")
    assert (status, out) == (0, "x\n")
    assert err == f"{error} (the message was taken back)\n"
    assert said(engine, 1) == [("user", "b")]


def test_lost_device_ends_the_chat(talk: Talk) -> None:
    engine = scripted_engine([edgedsv4.DeviceLostError("the device is gone")])
    assert talk(engine, "a\n") == (1, "", "edgedsv4: the device is gone\n")


def test_invalid_utf8_is_refused(talk: Talk) -> None:
    status, _, err = talk(scripted_engine(), b"\xff\n")
    assert status == 2
    assert err.startswith("edgedsv4: stdin line 1: expected UTF-8 text")


def test_sampling_options_reach_the_session(talk: Talk) -> None:
    engine = scripted_engine(["x"])
    talk(engine, "a\n", "--temp", "0", "--seed", "5")
    expected = edgedsv4.SamplingOptions(temperature=0.0, seed=5)
    assert engine.session.calls[0].sampling == expected

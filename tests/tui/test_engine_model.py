"""The real engine behind the app: what is evaluated again, and how faults arrive."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import edgedsv4
from dsv4_chat.chat_model import OutOfMemoryError, Progress, ReplyOutcome, ReplyPart
from dsv4_chat.conversation import Conversation
from dsv4_chat.engine_model import EngineModel
from dsv4_chat.weight_files import read_weights, weight_files
from edgedsv4 import (
    CapacityError,
    ConfigError,
    ContextFullError,
    DeviceLostError,
    Dsv4Error,
    EngineOptions,
    FormatError,
    PromptOptions,
    SamplingOptions,
    SnapshotError,
    StorageError,
)

OPTIONS = EngineOptions(context=600, threads=1)


def opened(name: str = "pocket-v4", options: EngineOptions = OPTIONS) -> EngineModel:
    model = EngineModel(name, options)
    model.open(lambda _progress: None)
    return model


@pytest.fixture
def model() -> Iterator[EngineModel]:
    model = opened()
    yield model
    model.close()


def answer(
    model: EngineModel, conversation: Conversation, *, seed: int = 1, thinking: str = "none"
) -> ReplyOutcome:
    """Let the model answer; the reply becomes the active turn."""
    texts: dict[str, str] = {"text": "", "thinking": ""}

    def hear(part: ReplyPart) -> None:
        texts[part.kind] += part.text

    outcome = model.reply(
        conversation.to_messages(),
        SamplingOptions(temperature=0.8, seed=seed, max_tokens=60),
        PromptOptions(thinking=thinking),
        hear,
        lambda _progress: None,
    )
    conversation.append("assistant", texts["text"], reasoning=texts["thinking"])
    return outcome


def evaluated(model: EngineModel) -> tuple[int, int]:
    session = model.details()["session"]
    assert isinstance(session, dict)
    return session["evaluated"], session["rebuilt"]


@pytest.fixture
def talk(model: EngineModel) -> Conversation:
    """Three answered questions."""
    conversation = Conversation()
    for question in ("What does river mean?", "What is 12 + 7?", "Tell me a story about a fox."):
        conversation.append("user", question)
        answer(model, conversation)
    return conversation


def test_following_question_keeps_what_was_said(model: EngineModel, talk: Conversation) -> None:
    length = model.status().length
    talk.append("user", "What is 3 + 4?")
    outcome = answer(model, talk)
    # The token that ends a turn may not have been evaluated yet.
    assert outcome.reused_tokens >= length - 1


def test_regenerating_evaluates_nothing(model: EngineModel, talk: Conversation) -> None:
    before = evaluated(model)
    talk.rewind(talk.path()[-2].id)
    outcome = answer(model, talk, seed=2)
    assert outcome.reused_tokens == outcome.prompt_tokens
    assert evaluated(model) == (before[0] + outcome.generated_tokens, before[1])


def test_edited_question_keeps_the_turns_before(model: EngineModel, talk: Conversation) -> None:
    before = evaluated(model)
    talk.edit(talk.path()[-2].id, "Tell me a story about a dog.")
    outcome = answer(model, talk)
    assert outcome.prompt_tokens - outcome.reused_tokens < 12
    assert evaluated(model)[1] == before[1]


def test_fork_keeps_the_shared_prefix(model: EngineModel, talk: Conversation) -> None:
    rebuilt = evaluated(model)[1]
    forked = talk.fork(talk.path()[1].id)
    forked.append("user", "What is 5 + 5?")
    outcome = answer(model, forked)
    assert outcome.prompt_tokens - outcome.reused_tokens < 15
    assert evaluated(model)[1] == rebuilt


def test_loaded_state_goes_on_without_evaluating(
    model: EngineModel, talk: Conversation, tmp_path: Path
) -> None:
    path = tmp_path / "talk.dsv4s"
    model.save_state(path)
    other = opened()
    other.load_state(path)
    length = other.status().length
    assert length == model.status().length
    talk.append("user", "What is 3 + 4?")
    assert answer(other, talk).reused_tokens >= length - 1
    other.close()


def test_thinking_is_heard_and_counted(model: EngineModel) -> None:
    conversation = Conversation()
    conversation.append("user", "What is 12 + 7?")
    outcome = answer(model, conversation, thinking="high")
    assert conversation.path()[-1].reasoning
    assert 0 < outcome.thinking_tokens <= outcome.generated_tokens


def test_cancel_from_another_thread_stops_a_reply(model: EngineModel) -> None:
    heard = threading.Event()
    stopper = threading.Thread(target=lambda: (heard.wait(20), model.cancel()))
    stopper.start()

    def hear(_part: ReplyPart) -> None:
        heard.set()
        stopper.join()

    conversation = Conversation()
    conversation.append("user", "Tell me a story about a fox.")
    outcome = model.reply(
        conversation.to_messages(),
        SamplingOptions(temperature=0),
        PromptOptions(thinking="none"),
        hear,
        lambda _progress: None,
    )
    assert outcome.finish_reason == "cancelled"
    assert outcome.generated_tokens < 5


def test_full_context_is_told_and_the_model_goes_on(model: EngineModel) -> None:
    conversation = Conversation()
    conversation.append("user", "word " * 2000)
    with pytest.raises(ContextFullError) as caught:
        answer(model, conversation)
    assert caught.value.capacity == 600
    conversation.edit(1, "What is 1 + 1?")
    assert answer(model, conversation).generated_tokens > 0


def test_reply_that_fills_the_context_ends_by_length() -> None:
    model = opened(options=EngineOptions(context=24, threads=1))
    conversation = Conversation()
    conversation.append("user", "Tell me a story about a fox named Mia.")
    assert answer(model, conversation).finish_reason == "length"
    model.close()


def test_drafts_are_told_as_a_line() -> None:
    model = opened(options=EngineOptions(context=600, threads=1, draft=2))
    conversation = Conversation()
    conversation.append("user", "Tell me a story about a fox named Mia.")
    drafts = answer(model, conversation).drafts
    assert drafts is not None
    assert "tokens per step" in drafts
    model.close()


def test_state_of_another_model_is_refused(
    model: EngineModel, talk: Conversation, tmp_path: Path
) -> None:
    assert talk.path()
    path = tmp_path / "talk.dsv4s"
    model.save_state(path)
    other = opened("random-tiny")
    with pytest.raises(SnapshotError):
        other.load_state(path)
    other.close()


def test_model_without_examples_brings_general_ones() -> None:
    model = EngineModel("random-tiny", OPTIONS)
    facts = model.open(lambda _progress: None)
    assert len(facts.prompts) == 3
    assert "random" in " ".join(facts.notes)
    model.close()


def test_weights_are_read_with_their_speed() -> None:
    seen: list[Progress] = []
    model = EngineModel("pocket-v4", OPTIONS)
    model.open(seen.append)
    last = [progress for progress in seen if progress.phase == "read weights"][-1]
    assert (last.done, last.unit) == (last.total, "bytes")
    assert last.bytes_per_second is not None
    model.close()


def test_cancel_at_any_step_of_opening_leaves_nothing_open() -> None:
    seen: list[Progress] = []
    opened_once = EngineModel("pocket-v4", OPTIONS)
    opened_once.open(seen.append)
    opened_once.close()
    for step in range(len(seen)):
        model = EngineModel("pocket-v4", OPTIONS)
        reports = iter(range(step, -1, -1))

        def stop(
            _progress: Progress, model: EngineModel = model, left: Iterator[int] = reports
        ) -> None:
            if next(left, 0) == 0:
                model.cancel()

        with pytest.raises(edgedsv4.CancelledError):
            model.open(stop)
        with pytest.raises(Dsv4Error, match="not open"):
            model.details()


def test_missing_model_is_told(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match=r"none\.gguf"):
        opened(str(tmp_path / "none.gguf"))


def test_unknown_device_is_told() -> None:
    with pytest.raises(Dsv4Error, match="nowhere"):
        opened(options=EngineOptions(device="nowhere"))


# Stands for torch's error, which is known by its name.
OutOfMemory = type("OutOfMemoryError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "expected", "message"),
    [
        (MemoryError(), OutOfMemoryError, "out of memory; close other programs"),
        (OutOfMemory("CUDA"), CapacityError, "smaller context"),
        (OSError(28, "No space left", "x.gguf"), StorageError, "x.gguf: No space left"),
        (RuntimeError("CUDA error: illegal memory access"), DeviceLostError, "stopped answering"),
        (ConfigError("as it is"), ConfigError, "as it is"),
        (RuntimeError("a bug"), RuntimeError, "a bug"),
    ],
)
def test_faults_arrive_as_errors_the_app_knows(
    monkeypatch: pytest.MonkeyPatch, error: Exception, expected: type[Exception], message: str
) -> None:
    def fail(*_arguments: object, **_options: object) -> None:
        raise error

    monkeypatch.setattr(edgedsv4.Engine, "open", fail)
    with pytest.raises(expected, match=message):
        opened()


def test_import_of_the_real_model_loads_no_torch() -> None:
    code = "import sys, dsv4_chat.engine_model; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_parts_of_a_split_file_are_found(tmp_path: Path) -> None:
    names = [f"m-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    for name in (*names, "m-00001-of-00002.gguf", "other.gguf"):
        (tmp_path / name).write_bytes(b"x")
    found = weight_files(tmp_path / names[0])
    assert [path.name for path in found] == names
    assert weight_files(tmp_path / "other.gguf") == [tmp_path / "other.gguf"]


def test_files_of_a_checkpoint_are_found(tmp_path: Path) -> None:
    for name in ("b.safetensors", "a.safetensors", "config.json"):
        (tmp_path / name).write_bytes(b"x")
    assert [path.name for path in weight_files(tmp_path)] == ["a.safetensors", "b.safetensors"]


def test_files_are_read_whole_and_in_order(tmp_path: Path) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path, size in zip(paths, (20 << 20, 5), strict=True):
        path.write_bytes(b"x" * size)
    seconds = iter(range(100))
    seen: list[Progress] = []
    total = (20 << 20) + 5
    read = read_weights(paths, seen.append, lambda: None, clock=lambda: float(next(seconds)))
    assert read == total
    assert [progress.done >> 20 for progress in seen] == [8, 16, 20, 20, 20]
    assert seen[0].bytes_per_second == float(8 << 20)

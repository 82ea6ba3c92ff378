"""What the app relies on in a model, for the real engine and for the scripted twin of the tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from scripted_model import Prefill, ScriptedModel, Thinking, stream

from dsv4_chat.chat_model import ChatModel, ModelStatus, Progress, ReplyOutcome, ReplyPart
from dsv4_chat.engine_model import EngineModel
from edgedsv4 import (
    CancelledError,
    EngineOptions,
    Message,
    PromptOptions,
    SamplingOptions,
    SnapshotError,
    StorageError,
)

QUESTION = [Message("user", "Tell me a story about a fox named Mia.")]
GREEDY = SamplingOptions(temperature=0, max_tokens=40)


def engine_model() -> ChatModel:
    return EngineModel("pocket-v4", EngineOptions(context=600, threads=1))


def scripted_model() -> ChatModel:
    story = stream("One day a fox named Mia went to the river and found a red ball there.")
    return ScriptedModel(script=[[Prefill(3, 9), *story] for _ in range(4)])


MAKERS: dict[str, Callable[[], ChatModel]] = {"engine": engine_model, "scripted": scripted_model}


@pytest.fixture(params=MAKERS)
def closed(request: pytest.FixtureRequest) -> Iterator[ChatModel]:
    model = MAKERS[request.param]()
    yield model
    model.close()


@pytest.fixture
def model(closed: ChatModel) -> ChatModel:
    closed.open(lambda _progress: None)
    return closed


class Listener:
    """Keeps what a reply tells, and may act on it."""

    def __init__(
        self,
        on_part: Callable[[ReplyPart], object] = lambda _part: None,
        on_progress: Callable[[Progress], object] = lambda _progress: None,
    ) -> None:
        self.parts: list[ReplyPart] = []
        self.progress: list[Progress] = []
        self._on_part, self._on_progress = on_part, on_progress

    def part(self, part: ReplyPart) -> None:
        self.parts.append(part)
        self._on_part(part)

    def report(self, progress: Progress) -> None:
        self.progress.append(progress)
        self._on_progress(progress)

    @property
    def text(self) -> str:
        return "".join(part.text for part in self.parts)


def ask(model: ChatModel, listener: Listener | None = None) -> ReplyOutcome:
    heard = listener or Listener()
    prompt = PromptOptions(thinking="none")
    return model.reply(QUESTION, GREEDY, prompt, heard.part, heard.report)


def test_opening_reports_progress_and_facts(closed: ChatModel) -> None:
    seen: list[Progress] = []
    facts = closed.open(seen.append)
    assert seen[0].done == 0
    assert all(0 <= progress.share <= 1 for progress in seen)
    assert len(facts.prompts) == 3
    assert facts.thinking_modes[0] == "none"
    assert facts.plan_lines
    assert facts.context > 0


def test_opening_can_be_cancelled_and_repeated(closed: ChatModel) -> None:
    def stop(_progress: Progress) -> None:
        closed.cancel()

    if isinstance(closed, ScriptedModel):
        closed.opening = [Prefill(1, 10)]
    with pytest.raises(CancelledError):
        closed.open(stop)
    assert closed.status() == ModelStatus()
    assert closed.open(lambda _progress: None).name


def test_status_is_empty_unless_open(closed: ChatModel) -> None:
    assert closed.status() == ModelStatus()
    closed.open(lambda _progress: None)
    assert closed.status().capacity > 0
    closed.close()
    closed.close()
    assert closed.status() == ModelStatus()


def test_reply_comes_in_parts_with_growing_counts(model: ChatModel) -> None:
    heard = Listener()
    outcome = ask(model, heard)
    assert "Mia" in heard.text
    counts = [part.tokens for part in heard.parts]
    assert counts == sorted(counts)
    assert 0 < counts[-1] <= outcome.generated_tokens
    assert outcome.prompt_tokens > 0
    assert outcome.tokens_per_second >= 0
    status = model.status()
    assert 0 < status.length <= status.capacity
    assert status.kv_bytes > 0


def test_prefill_begins_with_nothing_done(model: ChatModel) -> None:
    heard = Listener()
    ask(model, heard)
    assert heard.progress[0].done == 0
    assert {(progress.phase, progress.unit) for progress in heard.progress} == {
        ("prefill", "tokens")
    }


def test_cancelled_reply_keeps_its_parts(model: ChatModel) -> None:
    heard = Listener(on_part=lambda _part: len(heard.parts) == 5 and model.cancel())
    outcome = ask(model, heard)
    assert outcome.finish_reason == "cancelled"
    assert 5 <= len(heard.parts) <= 6
    assert heard.text
    full = Listener()
    assert ask(model, full).finish_reason != "cancelled"
    assert full.text.startswith(heard.text)


def test_cancel_in_the_prefill_gives_no_parts(model: ChatModel) -> None:
    heard = Listener(on_progress=lambda _progress: model.cancel())
    assert ask(model, heard).finish_reason == "cancelled"
    assert heard.parts == []


def test_cancel_before_a_reply_does_not_count(model: ChatModel) -> None:
    model.cancel()
    assert ask(model).finish_reason != "cancelled"


def test_error_of_a_callback_ends_the_reply_and_the_model_goes_on(model: ChatModel) -> None:
    def fail(_part: ReplyPart) -> None:
        raise KeyError("the screen is gone")

    with pytest.raises(KeyError):
        ask(model, Listener(on_part=fail))
    assert ask(model).finish_reason != "cancelled"


def test_state_is_saved_and_loaded(model: ChatModel, tmp_path: Path) -> None:
    ask(model)
    length, path = model.status().length, tmp_path / "x.dsv4s"
    assert model.save_state(path) == path.stat().st_size
    ask(model)
    model.load_state(path)
    assert model.status().length == length


def test_damaged_state_is_refused_and_changes_nothing(model: ChatModel, tmp_path: Path) -> None:
    ask(model)
    length, path = model.status().length, tmp_path / "x.dsv4s"
    path.write_bytes(b"no saved state at all, " * 20)
    with pytest.raises(SnapshotError):
        model.load_state(path)
    assert model.status().length == length


def test_tokens_of_a_text_are_counted(model: ChatModel) -> None:
    assert 2 <= model.count_tokens("two words") <= 9


def test_details_are_json_types(model: ChatModel) -> None:
    details = model.details()
    assert {"engine", "memory", "session"} <= set(details)


def test_missing_folder_of_a_state_is_told(tmp_path: Path) -> None:
    model = engine_model()
    model.open(lambda _progress: None)
    with pytest.raises(StorageError):
        model.save_state(tmp_path / "no" / "x.dsv4s")
    model.close()


def test_scripted_thinking_counts_apart() -> None:
    model = ScriptedModel(script=[[Thinking("let me see"), "done"]])
    model.open(lambda _progress: None)
    heard = Listener()
    outcome = ask(model, heard)
    assert [part.kind for part in heard.parts] == ["thinking", "text"]
    assert (outcome.thinking_tokens, outcome.generated_tokens) == (3, 4)

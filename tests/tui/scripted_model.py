"""A model that says what a test wrote down, for tests of the terminal app.

Each reply is a list of steps, played in order in the caller's thread. A step is text, a `Thinking`,
a `Call` of a tool, a `Prefill` that grows slowly, a `Wait` for an event the test sets, a pause in
seconds, an exception to raise, or a function to call. Cancelling works as in the real model: at the
next step, or at once while it waits, and the parts so far stay handed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dsv4_chat.chat_model import (
    ChatModel,
    FinishReason,
    ModelFacts,
    ModelStatus,
    OnPart,
    OnProgress,
    Progress,
    ReplyOutcome,
    ReplyPart,
)
from edgedsv4 import CancelledError, Message, PromptOptions, SamplingOptions, SnapshotError

FACTS = ModelFacts(
    name="scripted",
    device="cpu",
    context=1000,
    notes=("scripted says what the test wrote",),
    plan_lines=("weights 19 MB", "KV cache 4 MB for 1,000 tokens"),
    prompts=("What does river mean?", "What is 12 + 7?", "Tell me a story about a fox."),
    thinking_modes=("none", "high", "max"),
)


@dataclass(frozen=True)
class Thinking:
    """Text that the model thinks."""

    text: str


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: str = "{}"
    call_id: str = "call_0"


@dataclass(frozen=True)
class Prefill:
    """Progress of the prefill up to `done` of `total` tokens."""

    done: int
    total: int


@dataclass(frozen=True)
class Wait:
    """Stand still until the test sets the event, or cancels."""

    event: threading.Event


@dataclass(frozen=True)
class Ends:
    """End the reply here, for this reason."""

    reason: FinishReason


Step = str | Thinking | Call | Prefill | Wait | Ends | float | Exception | Callable[[], object]


@dataclass
class Asked:
    """What one reply was asked with."""

    messages: list[Message]
    sampling: SamplingOptions
    prompt: PromptOptions


@dataclass
class ScriptedModel(ChatModel):
    """Plays the scripted replies one after the other; without a script it echoes the question.

    Words count as tokens, one for each whitespace-separated word of a step and at least one.
    """

    script: list[list[Step]] = field(default_factory=list)
    opening: list[Step] = field(default_factory=list)
    """Steps of `open`: `Prefill` reports bytes there."""
    facts: ModelFacts = FACTS
    clock: Callable[[], float] = time.perf_counter
    kv_bytes_per_token: int = 4096
    tiers: tuple[tuple[str, float], ...] = ()
    calls: list[Asked] = field(default_factory=list)
    saved: list[Path] = field(default_factory=list)
    loaded: list[Path] = field(default_factory=list)
    state_errors: list[Exception] = field(default_factory=list)
    """Raised by the next `save_state` or `load_state`, one each."""
    threads: set[int] = field(default_factory=set)
    """Threads that called a method that blocks."""
    is_open: bool = False
    length: int = 0
    _cancel: threading.Event = field(default_factory=threading.Event)

    def open(self, on_progress: OnProgress) -> ModelFacts:
        self._begin()
        on_progress(Progress(phase="open model", done=0, total=4))
        for step in self.opening:
            if isinstance(step, Prefill):
                on_progress(
                    Progress(
                        phase="read weights",
                        done=step.done,
                        total=step.total,
                        bytes_per_second=2e9,
                        unit="bytes",
                    )
                )
            else:
                self._play(step)
            if self._cancel.is_set():
                raise CancelledError("opening was cancelled")
        self.is_open = True
        return self.facts

    def reply(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions,
        prompt: PromptOptions,
        on_part: OnPart,
        on_progress: OnProgress,
    ) -> ReplyOutcome:
        self._begin()
        self.calls.append(Asked(list(messages), sampling, prompt))
        content = messages[-1].content
        steps = self.script.pop(0) if self.script else [f"You said: {content}"]
        prompt_tokens = sum(words(str(message.content)) for message in messages)
        tally = Tally(reused=min(self.length, prompt_tokens))
        on_progress(
            Progress(phase="prefill", done=0, total=prompt_tokens - tally.reused, unit="tokens")
        )
        self.length = prompt_tokens
        began = self.clock()
        for step in steps:
            if self._cancel.is_set() or tally.has_ended:
                break
            if isinstance(step, Prefill):
                on_progress(
                    Progress(phase="prefill", done=step.done, total=step.total, unit="tokens")
                )
            else:
                self._say(step, tally, on_part)
        if self._cancel.is_set():
            tally.reason = "cancelled"
        return ReplyOutcome(
            finish_reason=tally.reason,
            prompt_tokens=prompt_tokens,
            reused_tokens=tally.reused,
            generated_tokens=tally.generated,
            thinking_tokens=tally.thinking,
            prefill_seconds=0.5,
            decode_seconds=max(self.clock() - began, 0.0),
        )

    def cancel(self) -> None:
        self._cancel.set()

    def status(self) -> ModelStatus:
        if not self.is_open:
            return ModelStatus()
        return ModelStatus(
            length=self.length,
            capacity=self.facts.context,
            kv_bytes=self.length * self.kv_bytes_per_token,
            tiers=self.tiers,
        )

    def save_state(self, path: Path) -> int:
        self._begin()
        self._maybe_fail()
        path.write_text(f"scripted {self.length}", encoding="utf-8")
        self.saved.append(path)
        return path.stat().st_size

    def load_state(self, path: Path) -> None:
        self._begin()
        self._maybe_fail()
        name, _, length = path.read_text(encoding="utf-8").partition(" ")
        if name != "scripted":
            raise SnapshotError("saved by another model", path=path)
        self.length = int(length)
        self.loaded.append(path)

    def count_tokens(self, text: str) -> int:
        self._begin()
        return words(text)

    def details(self) -> dict[str, object]:
        self._begin()
        return {
            "engine": {
                "model": self.facts.name,
                "device": self.facts.device,
                "threads": 2,
                "kernels": {"rms_norm": "native", "quant_matmul": "native"},
                "instruction_set": "avx2",
                "notes": list(self.facts.notes),
            },
            "memory": {
                "mapped_weights": 13_363_336,
                "mapped_experts": 5_849_088,
                "kv_allocated": self.facts.context * self.kv_bytes_per_token,
                "kv_used": self.length * self.kv_bytes_per_token,
                "budget": 22_075_158_528,
            },
            "session": {
                "length": self.length,
                "capacity": self.facts.context,
                "turn_checkpoints": 4,
                "evaluated": self.length,
                "rebuilt": 0,
                "generated": 12,
            },
        }

    def close(self) -> None:
        self.is_open = False

    def _begin(self) -> None:
        self.threads.add(threading.get_ident())
        self._cancel.clear()

    def _maybe_fail(self) -> None:
        if self.state_errors:
            raise self.state_errors.pop(0)

    def _say(self, step: Step, tally: Tally, on_part: OnPart) -> None:
        if isinstance(step, str | Thinking | Call):
            part = tally.part_of(step)
            self.length += words(part.text)
            on_part(part)
        elif isinstance(step, Ends):
            tally.reason, tally.has_ended = step.reason, True
        else:
            self._play(step)

    def _play(self, step: Step) -> None:
        if isinstance(step, Exception):
            raise step
        if isinstance(step, Wait):
            while not (step.event.wait(0.002) or self._cancel.is_set()):
                pass
        elif isinstance(step, int | float):
            self._cancel.wait(step)
        elif callable(step):
            step()


@dataclass
class Tally:
    """Counts of the reply in progress."""

    reused: int = 0
    generated: int = 0
    thinking: int = 0
    reason: FinishReason = "stop"
    has_ended: bool = False

    def part_of(self, step: str | Thinking | Call) -> ReplyPart:
        """The part that a step says."""
        if isinstance(step, Call):
            self.generated += 1
            self.reason = "tool_calls"
            return ReplyPart(
                kind="tool_call",
                name=step.name,
                arguments=step.arguments,
                call_id=step.call_id,
                tokens=self.generated,
            )
        text = step if isinstance(step, str) else step.text
        self.generated += words(text)
        if isinstance(step, Thinking):
            self.thinking += words(text)
            return ReplyPart(kind="thinking", text=text, tokens=self.generated)
        return ReplyPart(kind="text", text=text, tokens=self.generated)


def words(text: str) -> int:
    """Words of a text, at least one."""
    return max(len(text.split()), 1)


def stream(text: str, *, seconds: float = 0.0) -> list[Step]:
    """A reply word by word, with a pause before each."""
    pieces: list[Step] = []
    for word in split_words(text):
        if seconds:
            pieces.append(seconds)
        pieces.append(word)
    return pieces


def split_words(text: str) -> Iterable[str]:
    """The words of a text, each with the white space before it; joined they are the text."""
    start = 0
    for place in range(1, len(text)):
        if text[place].isspace() and not text[place - 1].isspace():
            yield text[start:place]
            start = place
    if text:
        yield text[start:]

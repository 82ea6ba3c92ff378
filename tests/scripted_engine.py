"""An engine that says what a test wrote down, for tests of the command line.

Its session has no model: each reply is a list of steps, played in order. A step is text, a
`Thinking`, an exception that is raised, or a function that is called, such as one that sends a
signal. Cancelling works like in the real session: what came so far is reported, then the error.
"""

# ruff: noqa: ARG002 -- the signatures are those of the real classes

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

from edgedsv4 import (
    CancelledError,
    DoneEvent,
    EngineOptions,
    Message,
    PromptOptions,
    Reply,
    ReplyStep,
    SamplingOptions,
    StepStats,
    SyncReport,
    TextEvent,
    ThinkingEvent,
)
from edgedsv4.runtime.stats import SessionTotals


@dataclass(frozen=True)
class Thinking:
    """Text that the model thinks."""

    text: str


Step = str | Thinking | Exception | Callable[[], object]


@dataclass
class Call:
    """What one reply was asked with."""

    messages: list[Message]
    sampling: SamplingOptions | None
    prompt: PromptOptions | None


@dataclass
class ScriptedSession:
    """Plays the scripted replies one after the other."""

    script: list[list[Step]]
    length: int = 7
    capacity: int = 100
    calls: list[Call] = field(default_factory=list)
    is_cancelled: bool = False
    synced: list[list[int]] = field(default_factory=list)
    totals: SessionTotals = field(default_factory=SessionTotals)
    note: bytes = b""
    refuses: Exception | None = None
    """What saving and loading raise."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.script.clear()

    def cancel(self) -> None:
        self.is_cancelled = True

    def nbytes(self) -> int:
        return 4096

    def save(self, path: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        Path(path).write_bytes(self.note)

    def load(self, path: str) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.note = Path(path).read_bytes()

    def sync(self, token_ids: Sequence[int]) -> SyncReport:
        self.synced.append(list(token_ids))
        return SyncReport(0, len(token_ids), 0)

    def generate(
        self, options: SamplingOptions | None = None, *, stop_ids: Sequence[int] = ()
    ) -> Iterator[int]:
        for step in self.script.pop(0):
            if isinstance(step, str):
                yield from step.encode()

    def reply(
        self,
        messages: Sequence[Message],
        options: SamplingOptions | None = None,
        *,
        prompt: PromptOptions | None = None,
        on_progress: Callable[[int, int], None] | None = None,
    ) -> Iterator[ReplyStep]:
        self.calls.append(Call(list(messages), options, prompt))
        self.is_cancelled = False
        said = Reply(text="", reasoning="", tool_calls=(), finish_reason="stop")
        for step in self.script.pop(0):
            if isinstance(step, Exception):
                raise step
            if isinstance(step, str):
                said = replace(said, text=said.text + step)
                yield TextEvent(step)
            elif isinstance(step, Thinking):
                said = replace(said, reasoning=said.reasoning + step.text)
                yield ThinkingEvent(step.text)
            else:
                step()
            if self.is_cancelled:
                break
        reason = "cancelled" if self.is_cancelled else "stop"
        yield DoneEvent(
            finish_reason=reason,
            reply=said,
            stats=StepStats(
                prompt_tokens=12, generated_tokens=4, prefill_seconds=0.5, decode_seconds=2.0
            ),
            report=SyncReport(reused=2, evaluated=10, rebuilt=0),
        )
        if self.is_cancelled:
            raise CancelledError("cancelled")


class ByteDecoder:
    """Text of byte tokens, never half a character."""

    def __init__(self) -> None:
        self.pending = b""

    def push(self, token_id: int) -> str:
        self.pending += bytes([token_id])
        try:
            text = self.pending.decode()
        except UnicodeDecodeError:
            return ""
        self.pending = b""
        return text

    def finish(self) -> str:
        return self.pending.decode(errors="replace")


class ByteTokenizer:
    """One token per byte."""

    bos_id: int | None = 256
    eos_id: int | None = 257
    vocab_size = 258

    def encode(self, text: str, *, match_added: bool = False) -> list[int]:
        return list(text.encode())

    def stream(self) -> ByteDecoder:
        return ByteDecoder()


@dataclass
class ScriptedEngine:
    """Hands out one scripted session."""

    session: ScriptedSession
    tokenizer: ByteTokenizer = field(default_factory=ByteTokenizer)
    opened: list[tuple[str, EngineOptions]] = field(default_factory=list)

    def open(
        self, model: str, options: EngineOptions, *, on_progress: object = None
    ) -> ScriptedEngine:
        self.opened.append((model, options))
        return self

    def new_session(self) -> ScriptedSession:
        return self.session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.script.clear()


def scripted_engine(*replies: list[Step]) -> ScriptedEngine:
    """An engine whose session gives these replies."""
    return ScriptedEngine(ScriptedSession([list(reply) for reply in replies]))


class PipedStdin(io.StringIO):
    """Stands in for stdin: a pipe with these bytes."""

    def __init__(self, data: bytes) -> None:
        super().__init__()
        self.buffer = io.BytesIO(data)

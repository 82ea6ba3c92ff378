"""The real model of the app: one engine with one session, used from one worker thread.

The session finds by itself what of a conversation was evaluated before, so regenerating, editing,
forking and changing the conversation are nothing special here. Torch is loaded by `open`, never by
an import.
"""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import edgedsv4
from dsv4_chat.chat_model import (
    FinishReason,
    ModelFacts,
    ModelStatus,
    OnPart,
    OnProgress,
    OutOfMemoryError,
    Progress,
    ReplyOutcome,
    ReplyPart,
)
from dsv4_chat.units import bytes_text
from dsv4_chat.weight_files import read_weights, weight_files
from edgedsv4 import (
    CancelledError,
    DeviceLostError,
    Dsv4Error,
    EngineOptions,
    Message,
    PromptOptions,
    SamplingOptions,
    StorageError,
)

if TYPE_CHECKING:
    from edgedsv4 import DoneEvent, DraftStats, Engine, ExpertStats, ReplyStep, Session

logger = logging.getLogger(__name__)

PROMPTS = (
    "Explain how a hash table works.",
    "Write a short poem about the sea.",
    "What is the difference between TCP and UDP?",
)
"""What to try with a model that brings no examples of its own."""
THINKING_MODES = ("none", "low", "high", "max")
"""The modes that have names; a model takes some of them."""
_DEVICE_LOST = re.compile(r"device-side assert|illegal memory access|unspecified launch failure")


class EngineModel:
    """A `ChatModel` over an engine.

    Args:
        model: path or shipped name.
        options: how to open it.
    """

    def __init__(self, model: str, options: EngineOptions | None = None) -> None:
        self._model = model
        self._options = options or EngineOptions()
        self._engine: Engine | None = None
        self._session: Session | None = None
        self._cancelled = threading.Event()

    def open(self, on_progress: OnProgress) -> ModelFacts:
        """Load the model, see `ChatModel.open`."""
        self._cancelled.clear()
        with _typed_errors(self._model):
            on_progress(Progress(phase="load libraries", done=0, total=0))
            open_engine = edgedsv4.Engine.open  # the first use of the name loads torch
            self._check()

            def report(phase: str, done: int, total: int) -> None:
                on_progress(Progress(phase=phase, done=done, total=total))
                self._check()

            engine = open_engine(self._model, self._options, on_progress=report)
            try:
                return self._set_up(engine, on_progress)
            except BaseException:
                self._engine = engine
                self.close()
                raise

    def reply(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions,
        prompt: PromptOptions,
        on_part: OnPart,
        on_progress: OnProgress,
    ) -> ReplyOutcome:
        """Answer a conversation, see `ChatModel.reply`."""
        session = self._live_session()
        self._cancelled.clear()

        def report(done: int, total: int) -> None:
            on_progress(Progress(phase="prefill", done=done, total=total, unit="tokens"))

        report(0, 0)
        tally = _Tally(session)
        with (
            _typed_errors("reply"),
            session.stopping_when(self._cancelled.is_set),
            closing(session.reply(messages, sampling, prompt=prompt, on_progress=report)) as events,
        ):
            try:
                tally.consume(events, on_part)
            except CancelledError:
                logger.debug("a reply was cancelled after %d tokens", tally.generated)
        return tally.outcome()

    def cancel(self) -> None:
        """Stop the call that works."""
        self._cancelled.set()

    def status(self) -> ModelStatus:
        """Length and memory at this moment."""
        engine, session = self._engine, self._session
        usage = None if session is None else session.usage()
        if engine is None or usage is None:
            return ModelStatus()
        try:
            memory = engine.memory()
        except Dsv4Error:  # closed by the worker since the line above
            return ModelStatus()
        length, capacity = usage
        return ModelStatus(
            length=length, capacity=capacity, kv_bytes=memory["kv_used"] + memory["checkpoints"]
        )

    def save_state(self, path: Path) -> int:
        """Save the session, see `ChatModel.save_state`."""
        session = self._live_session()
        self._cancelled.clear()
        with _typed_errors(str(path)), session.stopping_when(self._cancelled.is_set):
            session.save(path)
            return path.stat().st_size

    def load_state(self, path: Path) -> None:
        """Load a saved session, see `ChatModel.load_state`."""
        session = self._live_session()
        self._cancelled.clear()
        with _typed_errors(str(path)), session.stopping_when(self._cancelled.is_set):
            session.load(path)

    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text, characters that have no UTF-8 replaced."""
        plain = text.encode("utf-8", errors="replace").decode("utf-8")
        return len(self._live_engine().tokenizer.encode(plain))

    def details(self) -> dict[str, object]:
        """Engine, memory and session as JSON types."""
        engine, session = self._live_engine(), self._live_session()
        totals = session.totals
        return {
            "engine": engine.describe(),
            "memory": dict(engine.memory()),
            "session": {
                "length": session.length,
                "capacity": session.capacity,
                "turn_checkpoints": len(session.turn_positions),
                "evaluated": totals.evaluated,
                "rebuilt": totals.rebuilt,
                "generated": totals.generated,
            },
        }

    def close(self) -> None:
        """Give files and memory back."""
        session, self._session = self._session, None
        engine, self._engine = self._engine, None
        if session is not None:
            session.close()
        if engine is not None:
            engine.close()

    def _set_up(self, engine: Engine, on_progress: OnProgress) -> ModelFacts:
        """Read the weights, make the session, and say what was opened."""
        _ = engine.tokenizer  # a model without one is refused now, not at the first question
        path = Path(str(engine.describe()["path"]))
        files = weight_files(path)
        memory = engine.memory()
        if sum(file.stat().st_size for file in files) <= memory["budget"]:
            read_weights(files, on_progress, self._check)
        self._check()
        session = engine.new_session()
        facts = _facts(self._model, engine)
        self._engine, self._session = engine, session
        return facts

    def _check(self) -> None:
        if self._cancelled.is_set():
            raise CancelledError("opening the model was cancelled")

    def _live_engine(self) -> Engine:
        if self._engine is None:
            raise Dsv4Error("the model is not open")
        return self._engine

    def _live_session(self) -> Session:
        if self._session is None:
            raise Dsv4Error("the model is not open")
        return self._session


@dataclass(slots=True)
class _Tally:
    """What a reply has come to so far."""

    session: Session
    done: DoneEvent | None = None
    generated: int = 0
    thinking: int = 0

    def consume(self, events: Iterator[ReplyStep], on_part: OnPart) -> None:
        """Hand the events on as parts, to the last one."""
        before = self.session.totals.generated
        for event in events:
            if isinstance(event, edgedsv4.DoneEvent):
                self.done = event
                continue
            self.generated = self.session.totals.generated - before
            if isinstance(event, edgedsv4.ToolCallEvent):
                on_part(
                    ReplyPart(
                        kind="tool_call",
                        name=event.name,
                        arguments=event.arguments,
                        call_id=event.id,
                        tokens=self.generated,
                    )
                )
            elif isinstance(event, edgedsv4.ThinkingEvent):
                self.thinking = self.generated
                on_part(ReplyPart(kind="thinking", text=event.text, tokens=self.generated))
            else:
                on_part(ReplyPart(kind="text", text=event.text, tokens=self.generated))

    def outcome(self) -> ReplyOutcome:
        """How it ended; without a last event it was cancelled before the first token."""
        if self.done is None:
            return ReplyOutcome(finish_reason="cancelled")
        stats = self.done.stats
        return ReplyOutcome(
            finish_reason=cast("FinishReason", self.done.finish_reason),
            prompt_tokens=stats.prompt_tokens,
            reused_tokens=stats.reused_tokens,
            generated_tokens=stats.generated_tokens,
            thinking_tokens=self.thinking,
            prefill_seconds=stats.prefill_seconds,
            decode_seconds=stats.decode_seconds,
            drafts=None if stats.drafts is None else _drafts_text(stats.drafts),
            experts=None if stats.experts is None else _experts_text(stats.experts),
        )


def _drafts_text(drafts: DraftStats) -> str:
    if not drafts.drafted_steps:
        return f"no drafts ({drafts.state})"
    steps = drafts.drafted_steps + drafts.plain_steps
    return (
        f"{drafts.tokens_per_step:.2f} tokens per step in {drafts.drafted_steps:,} of {steps:,}"
        f" steps ({drafts.state})"
    )


def _experts_text(experts: ExpertStats) -> str:
    return (
        f"{experts.hit_rate:.0%} of experts in memory, {experts.read_bytes / 1e9:.2f} GB read,"
        f"{f' {experts.guess_recall:.0%} guessed,' if experts.guess_misses else ''}"
        f" {experts.stall_seconds:.1f} s waited"
    )


def _facts(model: str, engine: Engine) -> ModelFacts:
    about = engine.describe()
    shipped = edgedsv4.SHIPPED_MODELS.get(model)
    notes = about["notes"]
    return ModelFacts(
        name=str(about["model"]),
        device=str(about["device"]),
        context=engine.context,
        notes=tuple(str(note) for note in notes) if isinstance(notes, list) else (),
        plan_lines=_plan_lines(engine),
        prompts=(() if shipped is None else shipped.prompts) or PROMPTS,
        thinking_modes=_thinking_modes(engine),
    )


def _plan_lines(engine: Engine) -> tuple[str, ...]:
    memory = engine.memory()
    weights = memory["mapped_weights"] + memory["mapped_experts"]
    return (
        f"weights {bytes_text(weights)}, mapped from the file",
        f"KV cache {bytes_text(memory['kv_allocated'])} for {engine.context:,} tokens",
        f"working memory up to {bytes_text(memory['workspace'])}",
        f"of {bytes_text(memory['budget'])} that this machine has to give",
    )


def _thinking_modes(engine: Engine) -> tuple[str, ...]:
    question = [Message("user", "?")]
    modes = []
    for mode in THINKING_MODES:
        try:
            engine.render(question, PromptOptions(thinking=mode))
        except edgedsv4.ConfigError:
            continue
        modes.append(mode)
    return tuple(modes)


@contextmanager
def _typed_errors(what: str) -> Iterator[None]:
    """Turn what the system and torch raise into the errors that the app knows."""
    try:
        yield
    except Dsv4Error:
        raise
    except MemoryError as error:
        raise OutOfMemoryError(what) from error
    except OSError as error:
        raise StorageError(
            error.strerror or str(error), path=error.filename or what, errno=error.errno
        ) from error
    except RuntimeError as error:
        # Known by name: the class is torch's, which may not be loaded.
        if type(error).__name__ == "OutOfMemoryError":
            raise OutOfMemoryError(what) from error
        if _DEVICE_LOST.search(str(error)):
            raise DeviceLostError(f"the device stopped answering: {error}") from error
        raise

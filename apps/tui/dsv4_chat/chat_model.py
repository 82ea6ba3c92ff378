"""What the app asks of a model: one protocol, and the records that go through it.

The idea: a blocking object that lives in one worker thread. The screens never wait for it; they see
its callbacks as messages. `engine_model.EngineModel` is the real one, tests have a scripted one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from edgedsv4 import CapacityError

if TYPE_CHECKING:
    from edgedsv4 import Message, PromptOptions, SamplingOptions

PartKind = Literal["text", "thinking", "tool_call"]
FinishReason = Literal["stop", "tool_calls", "length", "cancelled"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a long step is."""

    phase: str
    """What is being done, as words for a person: `open model`, `read weights`, `prefill`."""
    done: int
    """Steps, bytes or tokens; the unit follows from `unit`."""
    total: int
    """All of them; 0 when not known."""
    bytes_per_second: float | None = None
    """Speed where bytes are moved, None elsewhere."""
    unit: Literal["steps", "bytes", "tokens"] = "steps"
    """What `done` and `total` count."""

    @property
    def share(self) -> float:
        """`done` of `total`, 0..1; 0 when the total is not known."""
        return min(self.done / self.total, 1.0) if self.total > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the welcome view says of an opened model."""

    name: str
    """For people: the name in the file, or the shipped name."""
    device: str
    """`cpu`, `cuda:0`, ..."""
    context: int
    """Tokens a conversation can hold."""
    notes: tuple[str, ...] = ()
    """What a user should know: what the model is, what stands in for something else."""
    plan_lines: tuple[str, ...] = ()
    """The memory plan, one short line per item."""
    prompts: tuple[str, ...] = ()
    """Three things to try."""
    thinking_modes: tuple[str, ...] = ("none",)
    """The values of `PromptOptions.thinking` that the model takes, `none` first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPart:
    """A piece of a reply, as soon as it is certain."""

    kind: PartKind
    text: str = ""
    """More text or thinking; empty for a tool call."""
    name: str = ""
    """Of a tool call."""
    arguments: str = ""
    """Of a tool call: JSON text."""
    call_id: str = ""
    """Of a tool call: what its result refers to."""
    tokens: int = 0
    """Tokens generated for this reply so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyOutcome:
    """How a reply ended, and what it cost."""

    finish_reason: FinishReason = "stop"
    """`length` means the token limit or the context was reached."""
    prompt_tokens: int = 0
    reused_tokens: int = 0
    """Prompt tokens that did not have to be evaluated."""
    generated_tokens: int = 0
    thinking_tokens: int = 0
    """Those of them that were thinking."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafts: str | None = None
    """What became of drafted tokens, as one line; None without drafting."""
    experts: str | None = None
    """Where the routed experts came from, as one line; None where all are in memory."""

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens per second; 0 when nothing was generated."""
        return self.generated_tokens / self.decode_seconds if self.decode_seconds > 0 else 0.0

    @property
    def prefill_tokens_per_second(self) -> float:
        """Evaluated prompt tokens per second; 0 when nothing was evaluated."""
        evaluated = self.prompt_tokens - self.reused_tokens
        return evaluated / self.prefill_seconds if self.prefill_seconds > 0 else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelStatus:
    """What the status line shows of the model's memory; all zero before it is open."""

    length: int = 0
    """Tokens of the timeline."""
    capacity: int = 0
    """Tokens it can hold."""
    kv_bytes: int = 0
    """Bytes of KV cache, turn checkpoints included."""
    tiers: tuple[tuple[str, float], ...] = ()
    """(name, hit rate 0..1) of each tier that experts come from; empty when there are none."""


OnProgress: TypeAlias = Callable[[Progress], None]
OnPart: TypeAlias = Callable[[ReplyPart], None]


class OutOfMemoryError(CapacityError):
    """The system or the device refused memory; how much was missing is not known."""

    def __init__(self, what: str) -> None:
        super().__init__(what, needed_bytes=0, available_bytes=0)
        self.args = (
            f"{what}: out of memory; close other programs, or start with a smaller context (--ctx)",
        )


class ChatModel(Protocol):
    """A model as the app sees it.

    Every method but `cancel` and `status` blocks, and all of them are called in one worker thread.
    The callbacks run in that thread too; what they raise ends the call. Failures are the errors of
    `edgedsv4`, all below `Dsv4Error`; after one the model can be used again, unless it was
    `DeviceLostError` or `open` that failed.
    """

    def open(self, on_progress: OnProgress) -> ModelFacts:
        """Load the model; called once, before everything else.

        Raises:
            CancelledError: after `cancel`; the model can be opened again.
            FormatError, ConfigError, CapacityError, BackendUnavailableError: it cannot be opened.
        """

    def reply(
        self,
        messages: Sequence[Message],
        sampling: SamplingOptions,
        prompt: PromptOptions,
        on_part: OnPart,
        on_progress: OnProgress,
    ) -> ReplyOutcome:
        """Answer a conversation; what of it was evaluated before is not evaluated again.

        `on_progress` is told of the prefill, first with nothing done: a cancel that came before
        this call does not count, so a caller who wanted one asks for it there.

        Returns:
            After `cancel` an outcome "cancelled"; the parts so far have been handed over.

        Raises:
            ContextFullError: no room for the prompt and one token.
            ConfigError: a conversation that the model cannot be asked.
            CapacityError, NumericError, FormatError, DeviceLostError: it failed; the parts so far
                have been handed over.
        """

    def cancel(self) -> None:
        """Stop the call that works, without waiting for it; without one, nothing. Any thread."""

    def status(self) -> ModelStatus:
        """Length and memory at this moment; never waits. Any thread."""

    def save_state(self, path: Path) -> int:
        """Save the evaluated conversation; returns the bytes of the file.

        Raises:
            StorageError: it cannot be written; an older file is as it was.
            CancelledError: after `cancel`; as before.
        """

    def load_state(self, path: Path) -> None:
        """Go on from a saved conversation; on failure nothing has changed.

        Raises:
            SnapshotError: damaged, or saved by another model.
            ContextFullError: it has more tokens than this model's context.
            StorageError: it is missing or cannot be read.
            CapacityError, CancelledError: as everywhere.
        """

    def count_tokens(self, text: str) -> int:
        """Tokens of a plain text."""

    def details(self) -> dict[str, object]:
        """What runs and where its memory goes, as JSON types: `engine` and `memory`."""

    def close(self) -> None:
        """Give files and memory back; closing twice is fine."""

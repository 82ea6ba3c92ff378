"""The line at the bottom: what happens now, and what the model's memory holds.

The idea: one record in, one line out; what does not fit is left out from the least important on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rich.cells import cell_len
from textual.app import RenderResult
from textual.content import Content
from textual.reactive import reactive
from textual.widget import Widget

from dsv4_chat.chat_model import ModelStatus
from dsv4_chat.plain_text import drawable
from dsv4_chat.units import bytes_text, seconds_text

if TYPE_CHECKING:
    from dsv4_chat.chat_model import Progress

_GAP = "  "
BAR_CELLS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class StatusFacts:
    """What the line shows."""

    activity: str = ""
    """What happens now: `ready`, `thinking`, `stopping`."""
    tokens_per_second: float = 0.0
    """Decode speed, live or of the last reply; 0 for none."""
    prefill: Progress | None = None
    """While the prompt is evaluated."""
    remaining_seconds: float | None = None
    """Until the prefill is done."""
    memory: ModelStatus = field(default_factory=ModelStatus)
    thinking: str = "none"
    """Thinking mode of the next reply."""
    model: str = ""
    """Name of the model."""


class StatusBar(Widget):
    """One line."""

    facts: reactive[StatusFacts] = reactive(StatusFacts)

    def render(self) -> RenderResult:
        """The line, as wide as the widget."""
        left, right = status_line(self.facts, self.size.width - 2)
        space = self.size.width - 2 - cell_len(left) - cell_len(right)
        return Content(f" {left}{' ' * max(space, 0)}{right} ")


def status_line(facts: StatusFacts, width: int) -> tuple[str, str]:
    """Left and right part of the line; pieces that do not fit are left out."""
    left = _activity(facts)
    memory = facts.memory
    pieces = []  # in the order shown, with the least important number highest
    if memory.tiers:
        rates = " ".join(f"{drawable(name)} {rate:.0%}" for name, rate in memory.tiers)
        pieces.append((3, rates))
    if facts.thinking != "none":
        pieces.append((2, f"think {facts.thinking}"))
    if memory.kv_bytes:
        pieces.append((1, f"KV {bytes_text(memory.kv_bytes)}"))
    if memory.capacity:
        share = memory.length / memory.capacity
        pieces.append((0, f"ctx {memory.length:,}/{memory.capacity:,} {share:.0%}"))
    if facts.model:
        pieces.append((4, drawable(facts.model)))
    while pieces and cell_len(left) + len(_GAP) + cell_len(_join(pieces)) > width:
        pieces.remove(max(pieces))
    return left, _join(pieces)


def _join(pieces: list[tuple[int, str]]) -> str:
    return _GAP.join(text for _, text in pieces)


def _activity(facts: StatusFacts) -> str:
    text = facts.activity
    progress = facts.prefill
    if progress is not None and progress.total:
        filled = round(progress.share * BAR_CELLS)
        bar = "━" * filled + "─" * (BAR_CELLS - filled)
        text = f"reading {bar} {progress.done:,}/{progress.total:,}"
        if facts.remaining_seconds is not None:
            text += f" {seconds_text(facts.remaining_seconds)} left"
    elif facts.tokens_per_second:
        text += f" {facts.tokens_per_second:,.1f} tokens/s"
    return text.strip()

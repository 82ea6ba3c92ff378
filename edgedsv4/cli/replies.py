"""Showing a reply while it grows, and telling about it when it is done."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import edgedsv4

if TYPE_CHECKING:
    from edgedsv4 import DoneEvent, DraftStats, ExpertStats, ReplyStep, StepStats, SyncReport


class ReplyStream:
    """Passes the pieces of a reply on and keeps what arrived, so that a stopped one is not lost.

    Attributes:
        text, thinking: what arrived so far.
        done: the closing event, None while the reply runs or when it was stopped.
    """

    def __init__(
        self, show_text: Callable[[str], None], show_thinking: Callable[[str], None]
    ) -> None:
        self.text = ""
        self.thinking = ""
        self.done: DoneEvent | None = None
        self._show_text = show_text
        self._show_thinking = show_thinking

    def consume(self, events: Iterable[ReplyStep]) -> DoneEvent:
        """Takes the events of one reply to the end; whatever they raise is passed on."""
        for event in events:
            if isinstance(event, edgedsv4.DoneEvent):
                self.done = event
            elif isinstance(event, edgedsv4.ThinkingEvent):
                self.thinking += event.text
                self._show_thinking(event.text)
            elif isinstance(event, edgedsv4.TextEvent):
                self._between()
                self.text += event.text
                self._show_text(event.text)
        if self.done is None:
            raise RuntimeError("a reply ended without its closing event")
        return self.done

    def _between(self) -> None:
        if self.thinking and not self.text and not self.thinking.endswith("\n"):
            self._show_thinking("\n")


def stats_line(stats: StepStats, report: SyncReport | None = None) -> str:
    """Token counts, speed and what became of drafts, as one line."""
    kept = "" if report is None else f", {report.reused:,} kept"
    return (
        f"prompt {stats.prompt_tokens:,} tokens{kept},"
        f" {stats.prefill_seconds:.2f} s ({stats.prefill_tokens_per_second:.1f}/s);"
        f" reply {stats.generated_tokens:,} tokens,"
        f" {stats.decode_seconds:.2f} s ({stats.decode_tokens_per_second:.1f}/s)"
        f"{'' if stats.drafts is None else f'; {drafts_text(stats.drafts)}'}"
        f"{'' if stats.experts is None else f'; {experts_text(stats.experts)}'}"
    )


def experts_text(stats: ExpertStats) -> str:
    """Where stored experts came from, what was read, and how long that held things up."""
    wasted = f" ({stats.prefetch_wasted:,} of {stats.prefetched:,} read ahead in vain)"
    card = f"{stats.card_hits:,} on the card, " if stats.card_hits else ""
    late = f" ({stats.prefetch_late:,} late)" if stats.prefetch_late else ""
    guesses = f" guesses named {stats.guess_recall:.0%} of what was absent,"
    return (
        f"experts {card}{stats.ram_hits:,} from memory ({stats.hit_rate:.0%}),"
        f" {stats.prefetch_hits:,} read ahead{late}, {stats.disk_reads:,} waited for;"
        f"{guesses if stats.guess_misses else ''}"
        f" {stats.read_bytes / 1e9:.2f} GB read{wasted if stats.prefetch_wasted else ''},"
        f" {stats.stall_seconds:.2f} s of waiting"
    )


def drafts_text(drafts: DraftStats) -> str:
    """Acceptance by place, tokens per step, and whether drafting is on."""
    if not drafts.drafted_steps:
        return f"no drafts made ({drafts.state})"
    shares = ", ".join(f"{share:.0%}" for share in drafts.acceptance)
    return (
        f"drafts accepted {shares}, {drafts.tokens_per_step:.2f} tokens per step in"
        f" {drafts.drafted_steps:,} of {drafts.drafted_steps + drafts.plain_steps:,} steps"
        f" ({drafts.state})"
    )


def stats_json(stats: StepStats) -> dict[str, object]:
    """Token counts and speed as JSON types."""
    return {
        "prompt_tokens": stats.prompt_tokens,
        "generated_tokens": stats.generated_tokens,
        "prefill_seconds": stats.prefill_seconds,
        "decode_seconds": stats.decode_seconds,
        "prefill_tokens_per_second": stats.prefill_tokens_per_second,
        "decode_tokens_per_second": stats.decode_tokens_per_second,
        "drafts": None if stats.drafts is None else _drafts_json(stats.drafts),
        "experts": None if stats.experts is None else dataclasses.asdict(stats.experts),
    }


def _drafts_json(drafts: DraftStats) -> dict[str, object]:
    return {
        "state": drafts.state,
        "drafted": list(drafts.drafted),
        "accepted": list(drafts.accepted),
        "acceptance": list(drafts.acceptance),
        "tokens_per_step": drafts.tokens_per_step,
        "drafted_steps": drafts.drafted_steps,
        "plain_steps": drafts.plain_steps,
    }


def reply_json(done: DoneEvent) -> dict[str, object]:
    """A finished reply as JSON types."""
    return {
        "text": done.reply.text,
        "thinking": done.reply.reasoning,
        "tool_calls": [
            {"id": call.id, "name": call.name, "arguments": call.arguments}
            for call in done.reply.tool_calls
        ],
        "finish_reason": done.finish_reason,
        "stats": stats_json(done.stats),
        "tokens": {
            "reused": done.report.reused,
            "evaluated": done.report.evaluated,
            "rebuilt": done.report.rebuilt,
        },
    }

"""Showing a reply while it grows, and telling about it when it is done."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import edgedsv4

if TYPE_CHECKING:
    from edgedsv4 import DoneEvent, ReplyStep, StepStats, SyncReport


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
    """Token counts and speed as one line."""
    kept = "" if report is None else f", {report.reused:,} kept"
    return (
        f"prompt {stats.prompt_tokens:,} tokens{kept},"
        f" {stats.prefill_seconds:.2f} s ({stats.prefill_tokens_per_second:.1f}/s);"
        f" reply {stats.generated_tokens:,} tokens,"
        f" {stats.decode_seconds:.2f} s ({stats.decode_tokens_per_second:.1f}/s)"
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

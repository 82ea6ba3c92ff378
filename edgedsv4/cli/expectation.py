"""What `--stats` tells of speed beside the figures of a reply: what was to be expected.

The prediction rests on the figures that `edgedsv4 bench links` kept of this machine; without them
there is none, and nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.links_file import stored_links

if TYPE_CHECKING:
    from edgedsv4 import Engine, Prediction, StepStats
    from edgedsv4.cli.terminal import Terminal


def announced(engine: Engine, terminal: Terminal) -> Prediction | None:
    """Tells what to expect of an open model as it was opened; None where too little is known."""
    links, _ = stored_links(terminal)
    if links is None:
        return None
    report = engine.expected_speed(links)
    prediction = report.prediction
    if prediction is None:
        missing = ", ".join(report.missing)
        terminal.note(f"edgedsv4: no speed is predicted without figures of: {missing}")
        return None
    decode = prediction.decode
    terminal.note(
        f"edgedsv4: expected: decode {decode.tokens_per_second:,.1f} tokens/s, limited by"
        f" {edgedsv4.limit_text(decode.limit)}"
    )
    return prediction


def tell_outcome(prediction: Prediction, stats: StepStats, terminal: Terminal) -> None:
    """Holds a reply against the prediction, a line per figure.

    A prompt of fewer tokens than half of the shortest predicted says nothing of prefill.
    """
    shortest = min((found.tokens for found in prediction.prefill), default=0)
    evaluated = stats.prompt_tokens - stats.reused_tokens
    prefill = stats.prefill_tokens_per_second if 2 * evaluated >= shortest else 0.0
    outcome = edgedsv4.Outcome(
        decode_tokens_per_second=stats.decode_tokens_per_second or None,
        prefill_tokens_per_second=prefill or None,
        prefill_tokens=evaluated,
    )
    for deviation in edgedsv4.compare(prediction, outcome):
        terminal.note(f"edgedsv4: {deviation}")


def parts_text(seconds: dict[str, float]) -> str:
    """Milliseconds by link, of those that take any."""
    return ", ".join(
        f"{edgedsv4.limit_text(name)} {value * 1e3:,.1f}"
        for name, value in seconds.items()
        if value
    )

"""What `--stats` tells of speed beside the figures of a reply: what was to be expected.

The prediction rests on the figures that `edgedsv4 bench links` kept of this machine; without them
there is none, and nothing is said.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.links_file import stored_links
from edgedsv4.errors import Dsv4Error

if TYPE_CHECKING:
    from edgedsv4 import Engine, EngineOptions, Prediction, StepStats
    from edgedsv4.cli.terminal import Terminal


def announced(
    model: str, engine: Engine, options: EngineOptions, terminal: Terminal
) -> Prediction | None:
    """Tells what to expect of an open model; None where too little is known.

    Experts that were placed by hand are not where the plan would have put them.
    """
    links, _ = stored_links(terminal)
    if links is None:
        return None
    if options.expert_place != "auto" or options.expert_ram_bytes is not None:
        terminal.note("edgedsv4: no speed is predicted for experts that are placed by hand")
        return None
    if engine.describe()["device"] == "cpu":  # asked for, or for want of a card with room
        options = replace(options, device="cpu", vram_bytes=None)
    try:
        prediction = edgedsv4.plan_tiers(model, options, links=links).prediction
    except Dsv4Error as error:  # the model runs without it
        terminal.note(f"edgedsv4: no speed is predicted: {error}")
        return None
    if prediction is not None:
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

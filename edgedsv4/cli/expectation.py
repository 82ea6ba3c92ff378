"""What `--stats` tells of speed beside the figures of a reply: what was to be expected.

The prediction rests on the figures that `edgedsv4 bench links` kept of this machine; without them
there is none, and nothing is said.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.links_file import stored_links

if TYPE_CHECKING:
    from edgedsv4 import EngineOptions, Prediction, StepStats
    from edgedsv4.cli.terminal import Terminal


def announced(model: str, options: EngineOptions, terminal: Terminal) -> Prediction | None:
    """Tells what to expect of a model here; None where too little is known."""
    links, _ = stored_links(terminal)
    if links is None:
        return None
    prediction = edgedsv4.plan_tiers(model, options, links=links).prediction
    if prediction is not None:
        decode = prediction.decode
        terminal.note(
            f"edgedsv4: expected: decode {decode.tokens_per_second:,.1f} tokens/s, limited by"
            f" {edgedsv4.limit_text(decode.limit)}"
        )
    return prediction


def tell_outcome(prediction: Prediction, stats: StepStats, terminal: Terminal) -> None:
    """Holds a reply against the prediction, a line per figure."""
    outcome = edgedsv4.Outcome(
        decode_tokens_per_second=stats.decode_tokens_per_second or None,
        prefill_tokens_per_second=stats.prefill_tokens_per_second or None,
        prefill_tokens=stats.prompt_tokens - stats.reused_tokens,
    )
    for deviation in edgedsv4.compare(prediction, outcome):
        terminal.note(f"edgedsv4: {deviation}")

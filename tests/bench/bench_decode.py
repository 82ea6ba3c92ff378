"""Prefill and decode of the reference operations, beside the memory rate of the same process.

The model is a seeded random one that is small enough to build on the spot, so the figures say how
much the readable path costs per token, not how fast a kernel is.
"""

from __future__ import annotations

import harness
import torch
from harness import Figure

from edgedsv4 import Engine, EngineOptions

PROMPT = 512
DECODED = 32


def measure(repeats: int) -> list[Figure]:
    """Tokens per second at one thread, and the share of the memory rate that decode reaches."""
    options = EngineOptions(threads=1, context=4096)
    with Engine.open("random-tiny", options) as engine, engine.new_session() as session:
        vocabulary = engine.config.vocab_size
        prompt = torch.randint(
            vocabulary, (PROMPT,), generator=torch.Generator().manual_seed(1)
        ).tolist()
        session.sync(prompt)
        if not torch.isfinite(torch.from_numpy(session.logits())).all():
            raise SystemExit("wrong logits: no time is reported")

        def prefill() -> None:
            session.sync([])
            session.sync(prompt)

        def decode() -> None:
            for token_id in prompt[:DECODED]:
                session.evaluate([token_id])
            session.rewind(DECODED)

        prefill_seconds = harness.seconds(prefill, repeats) / PROMPT
        decode_seconds = harness.seconds(decode, repeats) / DECODED
        memory = engine.memory()
        rate = harness.read_rate(threads=1)
    weights = memory["mapped_weights"]
    return [
        Figure("decode", "prefill 512", 1 / prefill_seconds, "tokens/s", repeats),
        Figure("decode", "decode at depth 512", 1 / decode_seconds, "tokens/s", repeats),
        Figure("decode", "memory rate, one thread", rate / 1e9, "GB/s", 5),
        Figure(
            "decode",
            "share of the memory rate",
            weights / decode_seconds / rate,
            "of dense weight bytes",
            repeats,
        ),
    ]


if __name__ == "__main__":
    harness.main(measure)

"""Choosing a token from 129,280 logits, by the options in use, beside the definition in numpy.

Logits are drawn so that a few hundred tokens stand out, as a model's do. The call is that of a
reply, random number included; one thread, best of n.
"""

from __future__ import annotations

import math
from typing import Any

import harness
import numpy as np
from harness import Figure

from edgedsv4.config import SamplingOptions
from edgedsv4.runtime.sampler import Sampler

VOCAB = 129_280
SEEN, GENERATED = 2000, 100
PENALTIES = {
    "repetition_penalty": 1.1,
    "presence_penalty": 0.1,
    "frequency_penalty": 0.1,
    "logit_bias": {5: 1.0, 77: -math.inf, 900: -2.0},
}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.7},
    "top-p": {"temperature": 0.7, "top_p": 0.95},
    "top-k, top-p": {"temperature": 0.7, "top_k": 40, "top_p": 0.95},
    "top-k, top-p, min-p, penalties, bias": {
        "temperature": 0.7,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        **PENALTIES,
    },
}
CALLS = 10
"""Of one reading."""


def logits() -> np.ndarray:
    """Float32 [VOCAB]."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(VOCAB) * 2.5
    values[rng.integers(0, VOCAB, 200)] += rng.random(200) * 12
    return values.astype(np.float32)


def sampler_of(options: dict[str, Any], backend: str) -> Sampler:
    """In the middle of a reply."""
    sampler = Sampler(SamplingOptions(seed=3, **options), VOCAB, backend=backend)  # type: ignore[arg-type]
    ids = np.random.default_rng(1).integers(0, VOCAB, SEEN).tolist()
    sampler.observe(ids)
    for token_id in ids[:GENERATED]:
        sampler.accept(token_id)
    return sampler


def measure(repeats: int) -> list[Figure]:
    """Microseconds per token, and how many times faster than the definition, by options."""
    figures, row = [], logits()
    for name, options in OPTIONS.items():
        best = {}
        for backend in ("native", "reference"):
            sampler = sampler_of(options, backend)
            if sampler.sample(row) != sampler_of(options, "reference").sample(row):
                raise SystemExit(f"{name}: another token, no time is reported")

            def work(sampler: Sampler = sampler) -> None:
                for _ in range(CALLS):
                    sampler.sample(row)

            best[backend] = min(harness.once(work) for _ in range(repeats)) / CALLS
        ratio = best["reference"] / best["native"]
        figures.append(Figure("sampler", name, 1e6 * best["native"], "µs", repeats))
        figures.append(Figure("sampler", name, ratio, "times the reference", repeats))
    return figures


if __name__ == "__main__":
    harness.main(measure)

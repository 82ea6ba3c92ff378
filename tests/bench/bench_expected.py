"""Speed on the CPU beside what links let expect, with several memories for experts.

The model is that of `bench_store`, random blocks on a drive. The links are measured in the same
process right before each run, and the engine tells what they let expect of the slots that it was
given; then a prompt is read and tokens are decoded. No run is used for calibration. A busy
neighbour between the two shows in the ratio: the median of some rounds counts.

    python tests/bench/bench_expected.py [--gigabytes 3.5] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import bench_store
import harness
import mid_model
import numpy as np
from bench_store import DECODED, PREFILL, Scale, drop_pages, mid_config_experts, model_of
from harness import Figure

from edgedsv4 import Engine, EngineOptions, LinkOptions, measure_links

SHARES = (0.3, 0.6, 1.0)
"""Of all routed experts, those that memory is given for."""
TYPES = ("MXFP4", "Q8_0", "BF16")
"""Block types of the model's matrices."""
_WARM = 32
"""Tokens decoded before those that count: the store fills its slots."""


def prefill_seconds(engine: Engine, rng: np.random.Generator) -> float:
    """Of a prompt of its own in a session of its own."""
    prompt = rng.integers(300, 32_000, PREFILL).tolist()
    with engine.new_session() as session:
        began = time.perf_counter()
        session.evaluate(prompt)
        return time.perf_counter() - began


@dataclass(frozen=True)
class Reading:
    """One round: predicted, then measured."""

    predicted: tuple[float, float]
    """Tokens per second of decode and prefill."""
    measured: tuple[float, float]
    hits: tuple[float, float]
    """Share of experts found in memory while decoding, predicted and measured."""


def reading(engine: Engine, path: Path, rng: np.random.Generator) -> Reading:
    """Measure the links, then a prompt and a decode."""
    chosen = LinkOptions(
        path=path, types=TYPES, device="cpu", is_thorough=False, memory_bytes=256 << 20
    )
    prediction = engine.expected_speed(measure_links(chosen)).prediction
    if prediction is None:
        raise SystemExit("figures are missing: nothing is predicted")
    prefill = PREFILL / prefill_seconds(engine, rng)
    words = rng.integers(300, 32_000, _WARM + DECODED).tolist()
    with engine.new_session() as session:
        for word in words[:_WARM]:
            session.evaluate([word])
        before, began = session.totals.experts, time.perf_counter()
        for word in words[_WARM:]:
            session.evaluate([word])
        decode = DECODED / (time.perf_counter() - began)
        after = session.totals.experts
    if before is None or after is None:
        raise SystemExit("the experts are not stored: nothing is compared")
    return Reading(
        (prediction.decode.tokens_per_second, prediction.prefill[0].tokens_per_second),
        (decode, prefill),
        (prediction.shares[1], after.since(before).hit_rate),
    )


def deviations(path: Path, share: float, rounds: int) -> list[Figure]:
    """Medians of predicted, measured and their ratio, of one budget."""
    total = 12 * mid_config_experts(path) * bench_store.EXPERT_BYTES
    slots = int(total * share) + 4 * bench_store.EXPERT_BYTES + (1 << 24)
    options = EngineOptions(
        context=1024, device="cpu", expert_place="stored", expert_ram_bytes=slots
    )
    rng = np.random.default_rng(2)
    with Engine.open(path, options) as engine:
        drop_pages(path)
        prefill_seconds(engine, rng)  # fills the store, and brings dense weights into the cache
        readings = [reading(engine, path, rng) for _ in range(rounds)]
    tag = f"{total / 1e9:.1f} GB, {share:.0%} in memory"
    found: list[Figure] = []

    def add(what: str, values: Iterable[float], unit: str) -> None:
        value = max(statistics.median(values), 1e-9)
        found.append(Figure("expected", f"{what}; {tag}", value, unit, rounds))

    for place, name in enumerate(("decode", "prefill")):
        add(f"{name}: predicted", (r.predicted[place] for r in readings), "tokens/s")
        add(f"{name}: measured", (r.measured[place] for r in readings), "tokens/s")
        ratios = (r.measured[place] / r.predicted[place] for r in readings)
        add(f"{name}: measured of predicted", ratios, "ratio")
    for place, name in enumerate(("predicted", "measured")):
        add(f"decode: hits, {name}", (r.hits[place] for r in readings), "of experts")
    return found


def measure(repeats: int) -> list[Figure]:
    """Every figure once; `repeats` of 1 takes the small model and one budget."""
    if repeats == 1:
        return deviations(model_of(bench_store.SMALL), SHARES[0], 1)
    path = model_of(_SCALE[0])
    return [figure for share in SHARES for figure in deviations(path, share, repeats)]


_SCALE = [Scale()]


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gigabytes", type=float, default=Scale.gigabytes)
    parser.add_argument("--folder", type=Path, default=mid_model.DEFAULT_FOLDER)
    chosen, sys.argv[1:] = parser.parse_known_args()
    _SCALE[0] = Scale(chosen.gigabytes, Scale.share, chosen.folder)
    harness.main(measure, repeats=3)


if __name__ == "__main__":
    main()

"""Speed on the CPU beside what links let expect, with several memories for experts.

The model is that of `bench_store`, random blocks on a drive. The links are measured in the same
process right before each run, and the engine tells what they let expect of the slots that it was
given; then a prompt is read and tokens are decoded. No run is used for calibration.

    python tests/bench/bench_expected.py [--gigabytes 3.5] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import bench_store
import harness
import mid_model
import numpy as np
from bench_store import DECODED, PREFILL, Scale, drop_pages, mid_config_experts, model_of
from harness import Figure

from edgedsv4 import Engine, EngineOptions, LinkOptions, Outcome, compare, measure_links

SHARES = (0.3, 0.6, 1.0)
"""Of all routed experts, those that memory is given for."""
_PROMPTS = 3
"""Of which the median counts, after one that does not."""
_WARM = 32
"""Tokens decoded before those that count: the store fills its slots."""


def prefill_seconds(engine: Engine, rng: np.random.Generator) -> float:
    """Of a prompt of its own in a session of its own."""
    prompt = rng.integers(300, 32_000, PREFILL).tolist()
    with engine.new_session() as session:
        began = time.perf_counter()
        session.evaluate(prompt)
        return time.perf_counter() - began


def deviations(path: Path, share: float) -> list[Figure]:
    """Predicted, measured and their ratio, of one budget."""
    layers, experts = 12, mid_config_experts(path)
    total = layers * experts * bench_store.EXPERT_BYTES
    types = ("MXFP4", "Q8_0", "BF16")
    chosen = LinkOptions(path=path, types=types, device="cpu", is_thorough=False)
    links = measure_links(chosen)
    slots = int(total * share) + 4 * bench_store.EXPERT_BYTES + (1 << 24)
    options = EngineOptions(
        context=1024, device="cpu", expert_place="stored", expert_ram_bytes=slots
    )
    rng = np.random.default_rng(2)
    words = rng.integers(300, 32_000, _WARM + DECODED).tolist()
    with Engine.open(path, options) as engine:
        prediction = engine.expected_speed(links).prediction
        if prediction is None:
            raise SystemExit("figures are missing: nothing is predicted")
        drop_pages(path)
        # The first prompt fills the store and brings dense weights into the system's cache.
        times = [prefill_seconds(engine, rng) for _ in range(1 + _PROMPTS)][1:]
        with engine.new_session() as session:
            for word in words[:_WARM]:
                session.evaluate([word])
            before, began = session.totals.experts, time.perf_counter()
            for word in words[_WARM:]:
                session.evaluate([word])
            decode = DECODED / (time.perf_counter() - began)
            after = session.totals.experts
    prefill = PREFILL / statistics.median(times)
    if before is None or after is None:
        raise SystemExit("the experts are not stored: nothing is compared")
    done = after.since(before)
    outcome = Outcome(
        decode_tokens_per_second=decode,
        prefill_tokens_per_second=prefill,
        prefill_tokens=PREFILL,
    )
    found: list[Figure] = []
    tag = f"{total / 1e9:.1f} GB, {share:.0%} in memory"
    for deviation, n in zip(compare(prediction, outcome), (1, _PROMPTS), strict=True):
        name = f"{deviation.name.split(' (')[0].removesuffix(' tokens/s')}; {tag}"
        found += [
            Figure("expected", f"{name}: predicted", deviation.predicted, "tokens/s", n),
            Figure("expected", f"{name}: measured", deviation.found, "tokens/s", n),
            Figure("expected", f"{name}: measured of predicted", deviation.ratio or 0, "ratio", n),
        ]
    expected = max(prediction.shares[1], 1e-9)
    hits = max(done.hit_rate, 1e-9)
    found.append(Figure("expected", f"decode; {tag}: hits, predicted", expected, "of experts", 1))
    found.append(Figure("expected", f"decode; {tag}: hits, measured", hits, "of experts", 1))
    return found


def measure(repeats: int) -> list[Figure]:
    """Every figure once; `repeats` of 1 takes the small model and one budget."""
    if repeats == 1:
        return deviations(model_of(bench_store.SMALL), SHARES[0])
    path = model_of(_SCALE[0])
    return [figure for share in SHARES for figure in deviations(path, share)]


_SCALE = [Scale()]


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gigabytes", type=float, default=Scale.gigabytes)
    parser.add_argument("--folder", type=Path, default=mid_model.DEFAULT_FOLDER)
    chosen, sys.argv[1:] = parser.parse_known_args()
    _SCALE[0] = Scale(chosen.gigabytes, Scale.share, chosen.folder)
    harness.main(measure)


if __name__ == "__main__":
    main()

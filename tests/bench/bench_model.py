"""Prefill and decode of a whole model by threads, and whether the configured context costs time.

The pocket model unless another one is named; it fits the caches, so what counts there is what a
step costs beside its arithmetic.

    python tests/bench/bench_model.py [--model FILE] [--repeats N] [--record]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import harness
from harness import Figure

from edgedsv4 import BenchOptions, Engine, EngineOptions, SamplingOptions, Session, measure_speed

THREADS = (1, 2)
SMALL_CONTEXT, LARGE_CONTEXT = 4096, 262_144
DEPTH = 512
DECODED = 64


def measure(repeats: int, model: str = "pocket-v4") -> list[Figure]:
    """Speeds at each number of threads, then times per token at two contexts."""
    figures = [figure for threads in THREADS for figure in _speeds(model, threads, repeats)]
    return [*figures, *_contexts(model, repeats)]


def _speeds(model: str, threads: int, repeats: int) -> Iterator[Figure]:
    measures = BenchOptions(
        prompt=DEPTH, generate=DECODED, depths=(0,), repeat=repeats, stream_bytes=1 << 28
    )
    options = EngineOptions(threads=threads, context=measures.context, prefill_chunk=DEPTH)
    with Engine.open(model, options) as engine:
        report = measure_speed(engine, measures)
    for reading in report.readings:
        name = f"{_name(model)}, {threads} threads: {reading.work}"
        yield Figure("model", name, reading.median, "tokens/s", repeats)
        yield Figure("model", f"{name}, best", reading.best, "tokens/s", repeats)
        share = reading.share(report.stream_rate)
        if share is not None:
            yield Figure("model", f"{name}, share of the reads", share, "of bytes", repeats)
    rate = report.stream_rate / 1e9
    yield Figure("model", f"memory reads, {threads} threads", rate, "GB/s", 10)


def _contexts(model: str, repeats: int) -> Iterator[Figure]:
    """Time per token at the same depth in a small and in the largest context, in turns."""
    with Engine.open(model, EngineOptions(threads=1)) as engine:
        largest = min(LARGE_CONTEXT, engine.config.max_context)
        ids = [number % engine.config.vocab_size for number in range(DEPTH)]
        readings: dict[int, list[float]] = {SMALL_CONTEXT: [], largest: []}
        sessions = {context: engine.new_session(context=context) for context in readings}
        for session in sessions.values():
            session.sync(ids)
        for _ in range(repeats + 1):
            for context, session in sessions.items():
                readings[context].append(_decode(session, ids))
    medians = {context: statistics.median(found[1:]) for context, found in readings.items()}
    for context, seconds in medians.items():
        name = f"{_name(model)}, context {context:,}: decode at depth {DEPTH}"
        yield Figure("model", name, 1e6 * seconds / DECODED, "µs per token", repeats)
    ratio = medians[largest] / medians[SMALL_CONTEXT]
    name = f"{_name(model)}, time per token, context {largest:,} to {SMALL_CONTEXT:,}"
    yield Figure("model", name, ratio, "times", repeats)


def _decode(session: Session, ids: list[int]) -> float:
    session.sync(ids)
    session.logits()
    greedy = SamplingOptions(temperature=0, max_tokens=DECODED)
    return harness.once(lambda: list(session.generate(greedy)))


def _name(model: str) -> str:
    return model.rpartition("/")[2].removesuffix(".gguf")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="pocket-v4", help="a GGUF file or a shipped name")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--record", action="store_true", help="add to results/<machine>.csv")
    given = parser.parse_args()
    harness.show(measure(given.repeats, given.model), is_recorded=given.record)


if __name__ == "__main__":
    main()

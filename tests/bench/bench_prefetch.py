"""What reading ahead is worth in decode: every kind of prefetch against the others, in turns.

Two models: the pocket model with 16 experts, whose routers were trained, greedily; and `mid_model`
with more experts than memory, whose weights are random, fed with random tokens. All settings have
to give the same tokens, or nothing is reported. Each reading opens the model anew and lets the
system forget the file.

    python tests/bench/bench_prefetch.py [--gigabytes 4] [--share 0.3] [--repeats 3] [--record]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import bench_store
import harness
import numpy as np
from bench_store import Scale
from harness import Figure

from edgedsv4 import Engine, EngineOptions, ExpertStats, Session
from edgedsv4.runtime.ram_store import ExpertStore

WIDE = Path(__file__).resolve().parents[2] / "apps/pocket/models/pocket-v4-e16.gguf"
WIDE_EXPERTS = 7 * 16 * 122_880
SETTINGS: tuple[tuple[str, int], ...] = (
    ("off", 0),
    ("hash", 0),
    ("gate", 2),
    ("gate", 4),
    ("gate", 6),
)
"""Kinds of prefetch, with experts that are guessed per layer."""


@dataclass(frozen=True)
class Case:
    """A model and what is decoded with it."""

    name: str
    path: Path
    bank: int
    """Bytes for experts."""
    decode: Callable[[Session], list[int]]
    """Decodes and returns the likeliest token after each one."""
    prompt: Sequence[int]
    most_guesses: int


@dataclass(frozen=True)
class Reading:
    """One run of a setting."""

    tokens: list[int]
    seconds: float
    processor_seconds: float
    stats: ExpertStats

    def values(self, *, has_guesses: bool) -> list[tuple[str, str, float]]:
        """(what, unit, value) of everything that is reported."""
        stats, count = self.stats, len(self.tokens)
        found = [
            ("decode", "tokens/s", count / self.seconds),
            ("waiting", "ms/token", 1e3 * stats.stall_seconds / count),
            ("processor", "ms/token", 1e3 * self.processor_seconds / count),
            ("read", "MB/token", stats.read_bytes / count / 1e6),
            ("not in memory", "of experts asked for", 1 - stats.hit_rate),
        ]
        if has_guesses:
            late = stats.prefetch_late / max(stats.prefetch_hits, 1)
            wasted = stats.prefetch_wasted / max(stats.prefetched, 1)
            found.append(("guessed", "of misses", stats.guess_recall))
            found.append(("late", "of misses read ahead", late))
            found.append(("in vain", "of reads ahead", wasted))
        return found


def pocket_case(share: float, tokens: int) -> Case:
    """The trained model, greedily."""

    def decode(session: Session) -> list[int]:
        found = []
        for _ in range(tokens):
            found.append(int(session.logits().argmax()))
            session.evaluate(found[-1:])
        return found

    name = f"pocket-v4-e16, {share:.0%} in memory"
    return Case(name, WIDE, int(WIDE_EXPERTS * share), decode, range(300, 340), 2)


def random_case(scale: Scale, tokens: int) -> Case:
    """The model of random weights, with tokens that do not follow from it."""
    path = bench_store.model_of(scale)
    total = 12 * bench_store.mid_config_experts(path) * bench_store.EXPERT_BYTES
    drawn = np.random.default_rng(2).integers(300, 32_000, tokens + 64).tolist()

    def decode(session: Session) -> list[int]:
        found = []
        for token in drawn[64:]:
            session.evaluate([token])
            found.append(int(session.logits().argmax()))
        return found

    name = f"random weights, {total / 1e9:.1f} GB, {scale.share:.0%} in memory"
    return Case(name, path, int(total * scale.share), decode, drawn[:64], 6)


def read_once(case: Case, prefetch: str, guesses: int) -> Reading:
    """Decode once, from a cold file and an empty store."""
    options = EngineOptions(
        context=1024,
        expert_place="stored",
        expert_ram_bytes=case.bank,
        prefetch=prefetch,  # type: ignore[arg-type]  # one of four kinds
    )
    bench_store.drop_pages(case.path)
    with Engine.open(case.path, options) as engine, engine.new_session() as session:
        store = engine._opened.model.experts  # type: ignore[union-attr]
        assert isinstance(store, ExpertStore)
        if guesses:  # below what can be chosen
            store._ahead._options = replace(store.options, guesses=guesses)
        session.evaluate(list(case.prompt))
        before, begin, used = store.stats(), time.perf_counter(), time.process_time()
        tokens = case.decode(session)
        seconds, used = time.perf_counter() - begin, time.process_time() - used
        return Reading(tokens, seconds, used, store.stats().since(before))


def figures_of(case: Case, repeats: int) -> list[Figure]:
    """All settings of a model, in turns."""
    settings = [pair for pair in SETTINGS if pair[1] <= case.most_guesses]
    readings: dict[tuple[str, int], list[Reading]] = {pair: [] for pair in settings}
    for _ in range(repeats):
        for pair, found in readings.items():
            found.append(read_once(case, *pair))
    if len({tuple(one.tokens) for found in readings.values() for one in found}) != 1:
        raise SystemExit("the settings do not give the same tokens: nothing is reported")
    figures: list[Figure] = []
    for (prefetch, guesses), found in readings.items():
        tag = f"{prefetch}{f' top-{guesses}' if guesses else ''}; {case.name}"
        for same in zip(*(one.values(has_guesses=guesses > 0) for one in found), strict=True):
            what, unit, _ = same[0]
            median = max(statistics.median(value for _, _, value in same), 1e-9)
            figures.append(Figure("prefetch", f"{what}; {tag}", median, unit, len(found)))
        # What else the machine does comes and goes, but less so within a round.
        pairs = zip(readings["hash", 0], found, strict=True)
        ratio = statistics.median(usual.seconds / own.seconds for usual, own in pairs)
        figures.append(Figure("prefetch", f"speed; {tag}", ratio, "of hash", len(found)))
    return figures


def measure(repeats: int) -> list[Figure]:
    """Every figure; `repeats` of 1 takes small models and few tokens."""
    if repeats == 1:
        cases = [pocket_case(0.3, 8), random_case(bench_store.SMALL, 4)]
    else:
        cases = [pocket_case(0.3, 300), random_case(_SCALE[0], 64)]
    return [figure for case in cases for figure in figures_of(case, repeats)]


_SCALE = [Scale(gigabytes=4.0)]


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--share", type=float, default=Scale.share)
    parser.add_argument("--folder", type=Path, default=Scale.folder)
    chosen, sys.argv[1:] = parser.parse_known_args()
    _SCALE[0] = Scale(chosen.gigabytes, chosen.share, chosen.folder)
    harness.main(measure, repeats=3)


if __name__ == "__main__":
    main()

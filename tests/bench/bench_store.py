"""Routed experts read from a drive: bytes against counted misses, and against the drive's own rate.

The model is `mid_model` with more experts than the store may keep. The drive's rate is that of the
same reader in the same process, reading experts in random order with nothing else to do. Bytes are
those that the system counts for the process (`/proc/self/io`), so a read too many shows.

    python tests/bench/bench_store.py [--gigabytes 3.5] [--share 0.3] [--record]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import harness
import mid_model
import numpy as np
from harness import Figure

from edgedsv4 import Engine, EngineOptions
from edgedsv4.runtime.ram_store import ExpertStore

EXPERT_BYTES = 3 * 2048 * 512 * 17 // 32
PREFILL, DECODED = 512, 96
RATE_BYTES = 2 << 30
"""Read to find the drive's rate."""


@dataclass(frozen=True)
class Scale:
    """How much is measured."""

    gigabytes: float = 3.5
    """Of all routed experts."""
    share: float = 0.3
    """Of them that memory is given for."""
    folder: Path = mid_model.DEFAULT_FOLDER


SMALL = Scale(gigabytes=0.32, share=0.3)
"""For the test that this file runs."""


def model_of(scale: Scale) -> Path:
    """The model file; written if it is not there."""
    config = mid_model.mid_config()
    count = max(config.experts_per_token, round(scale.gigabytes * 1e9 / EXPERT_BYTES / 12))
    path = scale.folder / f"store-{count}.gguf"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        mid_model.build(path, replace(config, num_experts=count), "MXFP4")
    return path


def system_bytes() -> int:
    """Bytes that this process had read from drives."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def drop_pages(path: Path) -> None:
    """Let the system forget what it has of a file."""
    descriptor = os.open(path, os.O_RDONLY)
    os.fdatasync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


def pure_rate(store: ExpertStore, layers: int, experts: int, nbytes: int) -> float:
    """Bytes per second of the reader alone, experts in random order."""
    rng = np.random.default_rng(1)
    count = min(nbytes // store.slot_bytes, layers * experts)
    chosen = rng.choice(layers * experts, count, replace=False).tolist()
    files, reader, bank = store._files, store.reader, store.bank  # below the store
    before, begin, seen, over = reader.counts().nbytes, time.perf_counter(), 0, 0
    for place, number in enumerate(chosen):
        reads = files.reads(number // experts, number % experts)
        address = bank.address_of(place % bank.slots)
        reader.submit(reads.ranges, address, is_urgent=True)
    while over < count:
        results, seen = reader.wait(seen, 100)
        over += len(results)
        if any(result.error for result in results):
            raise SystemExit("the drive gives errors: no rate is reported")
    return (reader.counts().nbytes - before) / (time.perf_counter() - begin)


def streamed_rate(store: ExpertStore, layers: int, experts: int) -> float:
    """Bytes per second of the store when whole layers are asked for and nothing is computed."""
    before, begin = store.reader.counts().nbytes, time.perf_counter()
    store.begin_forward(None)
    for layer in range(layers):
        for _batch in store.stream(layer, range(experts), 1000, lambda: None):
            pass
    store.end_forward(0)
    return (store.reader.counts().nbytes - before) / (time.perf_counter() - begin)


def figures_of(scale: Scale) -> list[Figure]:
    """All figures of one model."""
    path = model_of(scale)
    layers, experts = 12, mid_config_experts(path)
    total = layers * experts * EXPERT_BYTES
    options = EngineOptions(
        context=2048, expert_place="stored", expert_ram_bytes=int(total * scale.share)
    )
    rng = np.random.default_rng(2)
    prompt = rng.integers(300, 32_000, PREFILL).tolist()
    tag = f"{total / 1e9:.1f} GB, {scale.share:.0%} in memory"
    found: list[Figure] = []

    def add(what: str, value: float, unit: str) -> None:
        found.append(Figure("store", f"{what}; {tag}", value, unit, 1))

    with Engine.open(path, options) as engine, engine.new_session() as session:
        source = engine._opened.model.experts  # type: ignore[union-attr]
        assert isinstance(source, ExpertStore)
        drop_pages(path)
        rate = pure_rate(source, layers, experts, RATE_BYTES)
        add(f"drive alone ({source.method})", rate / 1e9, "GB/s")
        add("whole layers", streamed_rate(source, layers, experts) / rate, "of the drive alone")
        drop_pages(path)
        session.evaluate(prompt[:8])  # dense weights come into the system's cache
        for name, ids in (("prefill", [prompt]), ("decode", [[i] for i in prompt[:DECODED]])):
            stats, read, begin = source.stats(), system_bytes(), time.perf_counter()
            for part in ids:
                session.evaluate(part)
            seconds = time.perf_counter() - begin
            done, read = source.stats().since(stats), system_bytes() - read
            misses = done.disk_reads + done.prefetched
            add(f"{name}", sum(map(len, ids)) / seconds, "tokens/s")
            add(f"{name}: hit rate", max(done.hit_rate, 1e-9), "of experts asked for")
            add(f"{name}: bytes read", read / (misses * EXPERT_BYTES), "of counted misses")
            add(f"{name}: rate of reading", done.read_bytes / seconds / rate, "of the drive alone")
            add(f"{name}: waiting", max(done.stall_seconds / seconds, 1e-9), "of the time")
    return found


def mid_config_experts(path: Path) -> int:
    """Experts per layer of a model file of this benchmark."""
    return int(path.stem.rpartition("-")[2])


def measure(repeats: int) -> list[Figure]:
    """Every figure once; `repeats` of 1 takes the small model."""
    return figures_of(SMALL if repeats == 1 else _SCALE[0])


_SCALE = [Scale()]


def main() -> None:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--gigabytes", type=float, default=Scale.gigabytes)
    parser.add_argument("--share", type=float, default=Scale.share)
    parser.add_argument("--folder", type=Path, default=Scale.folder)
    chosen, sys.argv[1:] = parser.parse_known_args()
    _SCALE[0] = Scale(chosen.gigabytes, chosen.share, chosen.folder)
    harness.main(measure)


if __name__ == "__main__":
    main()

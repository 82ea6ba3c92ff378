"""What a measurement runs and reports; how fast anything is, no test asks."""

from __future__ import annotations

import json
from collections.abc import Iterator

import numpy as np
import pytest

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.kernels.native import library as native
from edgedsv4.runtime.benchmark import (
    BenchOptions,
    SpeedReading,
    SpeedReport,
    measure_speed,
    read_rate,
)
from edgedsv4.runtime.engine import Engine

SMALL = BenchOptions(prompt=5, generate=3, depths=(0, 7), repeat=2, stream_bytes=1 << 16)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(threads=1, context=SMALL.context, backend="reference")
    with Engine.open("random-tiny", options) as engine:
        yield engine


@pytest.fixture(scope="module")
def report(engine: Engine) -> SpeedReport:
    return measure_speed(engine, SMALL)


def test_every_depth_has_a_prefill_and_a_decode(report: SpeedReport) -> None:
    found = [(r.work, r.depth, r.tokens, len(r.seconds)) for r in report.readings]
    assert found == [
        ("prefill", 0, 5, 2),
        ("decode", 0, 3, 2),
        ("prefill", 7, 5, 2),
        ("decode", 7, 3, 2),
    ]


def test_bytes_of_a_decode_are_the_engines(report: SpeedReport, engine: Engine) -> None:
    expected = sum(engine.bytes_per_token(7 + 1).values())
    assert report.readings[-1].bytes_per_token == expected


def test_report_is_json(report: SpeedReport) -> None:
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert set(found) == {
        "engine",
        "machine",
        "versions",
        "weights_per_token",
        "stream",
        "results",
    }


def test_sessions_are_closed_and_the_stream_is_positive(
    report: SpeedReport, engine: Engine
) -> None:
    assert engine.memory()["sessions"] == 0
    assert report.stream_rate > 0


def test_progress_ends_complete(engine: Engine) -> None:
    seen: list[tuple[str, int, int]] = []
    options = BenchOptions(prompt=0, generate=1, depths=(2,), repeat=1, stream_bytes=64)
    measure_speed(engine, options, on_progress=lambda *step: seen.append(step))
    assert seen == [("depth 2", 1, 2), ("depth 2", 2, 2)]


def test_what_is_not_asked_for_is_not_measured(engine: Engine) -> None:
    options = BenchOptions(prompt=2, generate=0, repeat=1, stream_bytes=64)
    assert [r.work for r in measure_speed(engine, options).readings] == ["prefill"]


def test_median_and_best_come_from_the_runs() -> None:
    reading = SpeedReading(
        work="decode", depth=0, tokens=6, seconds=(3.0, 1.0, 2.0), bytes_per_token=50
    )
    assert (reading.median, reading.best, reading.share(600.0)) == (3.0, 6.0, 0.25)


def test_depths_beyond_the_context_are_refused(engine: Engine) -> None:
    with pytest.raises(ConfigError, match="context"):
        measure_speed(engine, BenchOptions(depths=(100,)))


@pytest.mark.parametrize(
    "bad",
    [{"prompt": 0, "generate": 0}, {"repeat": 0}, {"depths": ()}, {"depths": (-1,)}],
    ids="-".join,
)
def test_nothing_to_measure_is_refused(bad: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        BenchOptions(**bad)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.parametrize("has_native", [False, True])
def test_memory_is_read_with_and_without_the_kernels(
    monkeypatch: pytest.MonkeyPatch, has_native: bool
) -> None:
    monkeypatch.setattr(native, "HAVE_NATIVE", has_native)
    assert read_rate(np.ones(1 << 12, dtype=np.uint64), threads=1, reads=1) > 0

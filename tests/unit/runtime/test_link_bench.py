"""What a measurement of all links runs, and what it says it left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from link_samples import CARD

from edgedsv4.errors import BackendUnavailableError, ConfigError
from edgedsv4.kernels.native import library as native
from edgedsv4.runtime import link_bench
from edgedsv4.runtime.link_bench import (
    CALLED,
    CALLS,
    TOKENS,
    LinkOptions,
    measure_links,
    thread_counts,
)
from edgedsv4.runtime.link_memory import ExpertBench, ExpertShape
from edgedsv4.runtime.links import CardRate, DriveRate, DriveReading, MachineFacts

QUICK: dict[str, Any] = {
    "types": ("MXFP4",),
    "threads": 2,
    "device": "cpu",
    "repeat": 2,
    "run_seconds": 0.001,
    "memory_bytes": 1 << 20,
}


@pytest.fixture(autouse=True)
def _small_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    def small(name: str, nbytes: int) -> ExpertBench:
        return ExpertBench(name, nbytes, ExpertShape(256, 256))

    monkeypatch.setattr(link_bench, "ExpertBench", small)


def test_memory_and_experts_are_measured_by_threads_and_tokens() -> None:
    found = measure_links(LinkOptions(**QUICK))
    assert [rate.threads for rate in found.dram] == [1, 2]
    assert [(r.block_type, r.threads, r.tokens, len(r.runs)) for r in found.experts] == [
        ("MXFP4", 1, 1, 2),
        *(("MXFP4", 2, tokens, 2) for tokens in TOKENS),
    ]
    assert found.machine == MachineFacts.of()
    assert (found.card, found.overlap, found.drives) == (None, None, ())


def test_what_no_prediction_needs_can_be_left_out() -> None:
    found = measure_links(LinkOptions(**QUICK, is_thorough=False))
    assert [rate.threads for rate in found.dram] == [2]
    assert {rate.threads for rate in found.experts} == {2}
    assert found.calls == ()


def test_beside_a_card_calls_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, ...]] = []

    class NoCard:
        def __init__(self, _gpu: object) -> None:
            pass

    def measure(_card: Any, _repeat: int, _seconds: float, _report: Any, types: Any) -> CardRate:
        seen.append(types)
        return CARD

    monkeypatch.setattr(link_bench, "resolve_device", lambda _name: torch.device("cuda:0"))
    monkeypatch.setattr(link_bench, "gpu_of", lambda device: device)
    monkeypatch.setattr(link_bench, "TorchCard", NoCard)
    monkeypatch.setattr(link_bench, "measure_card", measure)
    monkeypatch.setattr(link_bench, "call_seconds", lambda *given: (1e-3 * given[3],) * given[4])
    found = measure_links(LinkOptions(**QUICK, is_thorough=False))
    assert seen == [("MXFP4",)]
    assert found.card == CARD
    assert found.overlap is None
    assert [(rate.experts, len(rate.runs)) for rate in found.calls] == [
        (count, CALLS) for count in CALLED
    ]
    assert all(rate.expert_weights == 3 * 256 * 256 for rate in found.calls)
    assert [rate.median for rate in found.calls] == [1e-3 * count for count in CALLED]


def test_what_was_left_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "HAVE_NATIVE", False)
    monkeypatch.setattr(native, "WHY_NOT", "they are not built")
    found = measure_links(LinkOptions(**QUICK))
    assert (found.experts, found.instructions) == ((), None)
    assert len(found.notes) == 3
    assert "no drive was named" in found.notes[0]
    assert "they are not built" in found.notes[1]
    assert "no card" in found.notes[2]


def test_drive_that_was_named_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    drive = DriveRate(
        mount="/m",
        access="direct",
        readings=(DriveReading(request_bytes=4096, depth=1, runs=(1.0,)),),
    )
    asked: list[Any] = []

    def measure(_reader: Any, file: Any, repeat: int, seconds: float, _report: Any) -> DriveRate:
        asked.append((file.path, file.nbytes, repeat, seconds))
        return drive

    monkeypatch.setattr(link_bench, "measure_drive", measure)
    options = LinkOptions(**{**QUICK, "types": ()}, path=tmp_path, temporary_bytes=64 << 20)
    found = measure_links(options)
    assert asked == [(tmp_path, 64 << 20, 2, 0.001)]
    assert found.drives == (drive,)


def test_progress_tells_of_every_part() -> None:
    seen: list[str] = []
    measure_links(LinkOptions(**QUICK), on_progress=lambda what, _done, _total: seen.append(what))
    assert seen == ["memory", "MXFP4 experts on the CPU"]


def test_card_that_is_not_there_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError):
        measure_links(LinkOptions(**{**QUICK, "device": "cuda:77"}))


@pytest.mark.parametrize(
    "change",
    [
        {"repeat": 0},
        {"repeat": 101},
        {"threads": 0},
        {"threads": 1025},
        {"run_seconds": 0.0},
        {"run_seconds": float("nan")},
        {"memory_bytes": 5},
        {"temporary_bytes": 1 << 50},
        {"types": ("MXFP4", "MXFP4")},
    ],
    ids=str,
)
def test_option_out_of_range_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as caught:
        LinkOptions(**change)
    assert caught.value.name in change


def test_unknown_type_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(ConfigError, match="Q9_K"):
        measure_links(
            LinkOptions(types=("Q9_K",)), on_progress=lambda *_: pytest.fail("it was measured")
        )


@pytest.mark.parametrize(
    ("most", "counts"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (8, (1, 2, 4, 8))]
)
def test_threads_double_up_to_all(most: int, counts: tuple[int, ...]) -> None:
    assert thread_counts(most) == counts

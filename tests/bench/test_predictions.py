"""Predicted beside measured: several budgets with one set of experts; the forward is a stand-in."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import predictions
import pytest
import torch
from link_samples import expert_rate, links
from predictions import ALL_ON_CPU, Case, figures_of, main, measured
from tiny_model import tiny_config

from edgedsv4.runtime import card_reads, expert_rates, synthetic_bench, synthetic_hybrid
from edgedsv4.runtime.gpu_devices import Gpu
from edgedsv4.runtime.synthetic_bench import SyntheticOptions
from edgedsv4.runtime.synthetic_hybrid import expert_sizes
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES

CONFIG = tiny_config(
    compress_ratios=(0, 0),
    hidden_size=256,
    expert_width=256,
    num_experts=4,
    experts_per_token=2,
    num_hash_layers=0,
)
OPTIONS = SyntheticOptions(
    experts="mxfp4",
    cpu_experts="auto",
    depths=(0,),
    generate=2,
    prompts=(3,),
    repeat=1,
    expert_threads=2,
)
CARD = Gpu(
    device=torch.device("cpu"),
    kind="cuda",
    description="Some Card",
    family="",
    shared_bytes=0,
    warp_size=32,
    multiprocessors=1,
    total_bytes=0,
    obstacle=None,
)
LINKS = links(experts=(expert_rate("MXFP4", 2, 1, 5e9), expert_rate("MXFP4", 2, 16, 1e9)))


class StandIn:
    """A model whose forward takes a while."""

    def __init__(self, _config: Any, _weights: Any, experts: Any, _numerics: Any, **_: Any) -> None:
        assert len(experts.fetch(0, (3,))) == 1  # they are open

    def new_cache(self, _capacity: int) -> Any:
        return SimpleNamespace(layers={}, ring_slots=(), length=0)

    def forward(self, _ids: torch.Tensor, _cache: Any) -> Any:
        time.sleep(1e-4)
        return SimpleNamespace(best=1)


def cases() -> tuple[Case, ...]:
    """Room for one expert, for three, and for one where the CPU computes all."""
    (size, _) = expert_sizes(CONFIG, EXPERT_TYPES["mxfp4"])
    passing = 2 * 2 * (size.card_bytes + size.stored_bytes)
    rooms = [passing + count * size.card_bytes for count in (1, 3)]
    return (*(Case("auto", room) for room in rooms), Case("on", rooms[0]))


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Sets of experts that were made; a card that is none."""
    found: list[Any] = []

    class Counted(synthetic_hybrid.RandomExperts):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            self.closed = False
            found.append(self)

        def close(self) -> None:
            self.closed = True
            super().close()

    monkeypatch.setattr(predictions, "RandomExperts", Counted)
    monkeypatch.setattr(synthetic_hybrid, "RandomExperts", Counted)
    monkeypatch.setattr(synthetic_bench, "GpuModel", StandIn)
    monkeypatch.setattr(card_reads.stream, "read_all", lambda _out, words: words.sum())
    monkeypatch.setattr(expert_rates, "READ_BYTES", 1 << 20)
    monkeypatch.setattr(synthetic_hybrid, "READ_BYTES", 1 << 20)
    return found


def test_one_set_of_experts_serves_all_budgets(
    made: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    reports = measured(CONFIG, OPTIONS, cases(), CARD, LINKS)
    (experts,) = made
    assert experts.closed
    assert [report["host"]["experts_on_card"] for report in reports] == [1, 3, 1]
    speeds = [report["expected"]["decode"][0]["tokens_per_second"] for report in reports]
    assert speeds[2] < speeds[0] < speeds[1]
    out = capsys.readouterr().out
    # Told before it is measured, case by case.
    marks = [line.split()[0] for line in out.splitlines() if line.startswith("  ")]
    assert len(marks) == 3 * 3
    assert out.count("expected decode at 0") == out.count("expected prefill of 3") == 3


def test_experts_are_given_back_after_a_failure(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(predictions, "measure_network", fail)
    with pytest.raises(RuntimeError, match="no"):
        measured(CONFIG, OPTIONS, cases(), CARD, LINKS)
    assert made[0].closed


@pytest.mark.usefixtures("made")
def test_command_measures_prints_and_records(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (one, _, every) = cases()
    monkeypatch.setattr(predictions, "OPTIONS", OPTIONS)
    monkeypatch.setattr(predictions, "ALL_ON_CPU", every)
    monkeypatch.setattr(predictions, "synthetic_config", lambda *_: CONFIG)
    monkeypatch.setattr(predictions, "check_gpu", lambda _device: CARD)
    monkeypatch.setattr(predictions, "resolve_device", lambda _name: CARD.device)
    monkeypatch.setattr(predictions, "needed_links", lambda *_: LINKS)
    out = tmp_path / "found.json"
    budget = repr(one.vram_bytes / 1e9)
    given = ["--budgets", budget, "--experts", "mxfp4", "--out", str(out), "--commit", "abc"]
    status = main([*given, "--record", "--results", str(tmp_path)])
    with (tmp_path / "some-card.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 3
    assert {row["commit"] for row in rows} == {"abc"}
    ratios = [float(row["value"]) for row in rows if row["unit"] == "ratio"]
    assert status == (0 if all(0.75 <= ratio <= 1.25 for ratio in ratios) else 1)
    assert "predicted   measured  ratio" in capsys.readouterr().out
    document = json.loads(out.read_text(encoding="utf-8"))
    assert document["links"] == json.loads(json.dumps(LINKS.to_json()))
    # The same figures again, later.
    assert main(["--from", str(out)]) == status


def test_figures_name_placement_and_kind() -> None:
    report = {
        "vram_bytes": 48 * 10**9,
        "model": {"name": "flash", "experts": "q2", "layers": 43},
        "host": {"cpu_experts": "auto"},
        "results": [
            {
                "work": "decode",
                "depth": 0,
                "n": 60,
                "tokens_per_second": 50.0,
                "expected_tokens_per_second": 40.0,
                "found_of_expected": 1.25,
            }
        ],
    }
    found = figures_of([report])
    assert [(figure.name, figure.value, figure.unit, figure.n) for figure in found] == [
        (f"{PREFIX}, predicted", 40.0, "tokens/s", 60),
        (f"{PREFIX}, measured", 50.0, "tokens/s", 60),
        (f"{PREFIX}, measured of predicted", 1.25, "ratio", 60),
    ]


PREFIX = "flash q2, 43 layers, cpu_experts auto, 48 GB of the card, decode at 0"


def test_cases_are_three_budgets_and_all_on_the_cpu() -> None:
    modes = [(case.mode, case.vram_bytes // 10**9) for case in (*predictions.CASES, ALL_ON_CPU)]
    assert modes == [("auto", 24), ("auto", 48), ("auto", 64), ("on", 24)]
    assert replace(predictions.OPTIONS, generate=1).cpu_experts == "auto"

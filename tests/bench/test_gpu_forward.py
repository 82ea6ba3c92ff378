"""A report becomes rows of results, here or on another machine than the one that measured."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_forward
import pytest
from gpu_forward import card_of, figures_of, main
from synthetic_samples import report

FOLDER = Path(__file__).parent
ABSENT = ("cffi", "_cffi_backend", "gguf", "textual", "tokenizers", "safetensors", "transformers")


def test_figures_are_speeds_and_the_kernels_that_count() -> None:
    found = [(figure.name, figure.value, figure.unit, figure.n) for figure in figures_of(sample())]
    flash = "flash q2, 43 layers"
    decode, prefill = f"{flash}, decode at 16384", f"{flash}, prefill of 512"
    assert found == [
        ("memory reads", 1e-6, "GB/s", 7),
        (f"{flash}, capture of a timeline", 0.75, "s", 1),
        (decode, 1.0, "tokens/s", 2),
        (f"{decode}, median token", 1000.0, "ms", 2),
        (f"{decode}, 99 of 100 tokens", 1000.0, "ms", 2),
        (f"{decode}, share of the reads", 0.5, "ratio", 2),
        (f"{decode}, all kernels", 800.0, "ms", 5),
        (f"{decode}, _matvec_kernel (7 launches)", 600_000.0, "us", 5),
        (f"{decode}, _new_kernel (1 launches)", 200_000.0, "us", 5),
        (prefill, 1024.0, "tokens/s", 3),
    ]


def sample(**changes: Any) -> dict[str, Any]:
    return json.loads(json.dumps(report(**changes).to_json()))


def test_report_is_recorded_for_its_card(tmp_path: Path) -> None:
    source = tmp_path / "report.json"
    source.write_text(json.dumps(sample()), encoding="utf-8")
    options = ["--from", str(source), "--commit", "abc", "--record", "--results", str(tmp_path)]
    assert main(options) == 0
    assert main(options) == 0
    with (tmp_path / "nvidia-h200.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * len(figures_of(sample()))
    assert {row["commit"] for row in rows} == {"abc"}
    assert {(row["machine"], row["torch"]) for row in rows} == {("nvidia-h200", "2.11.0")}


def test_what_is_measured_goes_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def measure(options: Any, on_progress: Any) -> Any:
        asked.append(options)
        on_progress("decode", 0, 1)
        return report(read_rate=1.0)

    monkeypatch.setattr(gpu_forward, "measure_synthetic", measure)
    out = tmp_path / "new" / "report.json"
    options = ["pro", "--layers", "2", "--prompts", "", "--depth", "0,5", "--generate", "3"]
    assert main([*options, "--out", str(out)]) == 1  # more than memory gives
    assert json.loads(out.read_text(encoding="utf-8")) == sample(read_rate=1.0)
    (chosen,) = asked
    assert (chosen.name, chosen.layers, chosen.prompts) == ("pro", 2, ())
    assert (chosen.depths, chosen.generate, chosen.kernels) == ((0, 5), 3, True)


def test_card_is_a_file_name() -> None:
    assert card_of({"device": {"description": "AMD Instinct(TM) MI300X"}}) == (
        "amd-instinct-tm-mi300x"
    )


def test_runs_with_torch_numpy_and_triton_alone() -> None:
    code = f"import sys; sys.modules.update(dict.fromkeys({ABSENT!r})); import gpu_forward"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")

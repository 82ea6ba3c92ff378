"""Every benchmark runs once, so that none of them rots; what they measure is not judged here."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
NAMES = sorted(path.stem for path in FOLDER.glob("bench_*.py"))


@pytest.mark.parametrize("name", NAMES)
def test_benchmark_runs_and_reports_figures(name: str) -> None:
    figures = importlib.import_module(name).measure(1)
    assert figures
    assert all(figure.value > 0 for figure in figures)

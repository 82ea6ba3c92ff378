"""What benchmarks share: repeating, the machine's own memory rate, a CSV row per figure.

A benchmark is a module with `measure(repeats) -> list[Figure]`, which checks its result before it
times anything. `python tests/bench/NAME.py [--repeats N] [--record]` prints the figures and, with
`--record`, adds them to `results/<machine>.csv`.
"""

from __future__ import annotations

import argparse
import csv
import datetime
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import torch

from edgedsv4.runtime import benchmark

RESULTS = Path(__file__).parent / "results"
COLUMNS = ("date", "commit", "machine", "torch", "benchmark", "figure", "value", "unit", "n")


@dataclass(frozen=True)
class Figure:
    """One measured figure: the median of n readings, or a ratio of two such medians."""

    benchmark: str
    name: str
    value: float
    unit: str
    n: int


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median wall time of `repeats` calls, after one that is not counted."""
    work()
    return statistics.median(once(work) for _ in range(repeats))


def once(work: Callable[[], object]) -> float:
    """Wall time of one call, seconds."""
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def read_rate(threads: int, nbytes: int = 1 << 29) -> float:
    """Bytes per second at which this process reads memory, the best of five reads of `nbytes`."""
    return benchmark.read_rate(np.ones(nbytes // 8, dtype=np.uint64), threads)


def machine() -> str:
    """Processor and cores of this machine, as a file name."""
    info = Path("/proc/cpuinfo")
    text = info.read_text(encoding="utf-8") if info.exists() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    name = found.group(1) if found else platform.processor() or platform.machine()
    cores = text.count("processor\t:") or 1
    return re.sub(r"[^A-Za-z0-9]+", "-", f"{name} {cores} cores").strip("-").lower()


def commit() -> str:
    """Short name of the commit that is measured, with `+` where files were changed since."""
    command = ["git", "describe", "--always", "--dirty=+"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return found.stdout.strip() or "unknown"


def record(
    figures: list[Figure],
    *,
    machine_name: str | None = None,
    torch_version: str | None = None,
    commit_name: str | None = None,
    folder: Path = RESULTS,
) -> Path:
    """Append figures to the machine's file; what is not named is this machine and this checkout."""
    machine_name = machine_name or machine()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{machine_name}.csv"
    is_new = not path.exists()
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    place = (today, commit_name or commit(), machine_name, torch_version or torch.__version__)
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if is_new:
            writer.writerow(COLUMNS)
        for figure in figures:
            benchmark, name, value, unit, n = astuple(figure)
            writer.writerow((*place, benchmark, name, f"{value:.4g}", unit, n))
    return path


def main(measure: Callable[[int], list[Figure]], repeats: int = 5) -> None:
    """Command line of one benchmark."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=repeats)
    parser.add_argument("--record", action="store_true", help="add to results/<machine>.csv")
    options = parser.parse_args()
    show(measure(options.repeats), is_recorded=options.record)


def show(figures: list[Figure], *, is_recorded: bool) -> None:
    """Print figures, and add them to the machine's file where that is asked for."""
    for figure in figures:
        print(f"{figure.benchmark}  {figure.name}: {figure.value:.4g} {figure.unit} (n={figure.n})")
    if is_recorded:
        print(f"added to {record(figures)}")

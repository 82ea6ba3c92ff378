"""Random networks of released shapes on this machine's GPU: a report as JSON, and rows of results.

`python tests/bench/gpu_forward.py flash --out build/bench/flash.json` measures; with `--record` the
figures are added to `results/<card>.csv`. It needs torch, NumPy and Triton, nothing else, so it
runs where nothing can be installed; there `--commit` names what is measured, and
`--from flash.json --commit NAME --record` adds the figures later, elsewhere.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from harness import RESULTS, Figure, record  # noqa: E402  # found by the line above

from edgedsv4.runtime.synthetic_bench import (  # noqa: E402
    SyntheticOptions,
    measure_synthetic,
)

LEAST_SHARE = 0.02
"""Of a step: kernels that take less are in the report, and not among the figures."""
BENCHMARK = "forward"


def figures_of(report: dict[str, Any]) -> list[Figure]:
    """The figures of a report that are worth a history."""
    model = report["model"]
    prefix = f"{model['name']} {model['experts']}, {model['layers']} layers"
    found = [
        Figure(BENCHMARK, "memory reads", report["stream"]["bytes_per_second"] / 1e9, "GB/s", 7)
    ]
    if report["capture_seconds"] is not None:
        capture = report["capture_seconds"]
        found.append(Figure(BENCHMARK, f"{prefix}, capture of a timeline", capture, "s", 1))
    for result in report["results"]:
        found += _result_figures(prefix, result)
    return found


def _result_figures(prefix: str, result: dict[str, Any]) -> list[Figure]:
    is_decode = result["work"] == "decode"
    place = f"decode at {result['depth']}" if is_decode else f"prefill of {result['tokens']}"
    name, n = f"{prefix}, {place}", result["n"]
    figures = [Figure(BENCHMARK, name, result["tokens_per_second"], "tokens/s", n)]
    if is_decode:
        median, p99 = result["median_seconds"] * 1e3, result["p99_seconds"] * 1e3
        share = result["share_of_reads"]
        figures += [
            Figure(BENCHMARK, f"{name}, median token", median, "ms", n),
            Figure(BENCHMARK, f"{name}, 99 of 100 tokens", p99, "ms", n),
            Figure(BENCHMARK, f"{name}, share of the reads", share, "ratio", n),
        ]
    kernels = result.get("kernels", [])
    total = sum(kernel["seconds"] for kernel in kernels)
    # Of a decode the tokens that are profiled, see `synthetic_bench`.
    steps, scale, unit = (5, 1e6, "us") if is_decode else (1, 1e3, "ms")
    if kernels:
        figures.append(Figure(BENCHMARK, f"{name}, all kernels", total * 1e3, "ms", steps))
    for kernel in kernels:
        if kernel["seconds"] >= LEAST_SHARE * total:
            label = f"{name}, {kernel['name']} ({kernel['launches']} launches)"
            figures.append(Figure(BENCHMARK, label, kernel["seconds"] * scale, unit, steps))
    return figures


def card_of(report: dict[str, Any]) -> str:
    """The card, as the name of its file of results."""
    return re.sub(r"[^a-z0-9]+", "-", str(report["device"]["description"]).lower()).strip("-")


def measured(options: argparse.Namespace) -> dict[str, Any]:
    """Measure as the command line says, telling of every step."""
    chosen = SyntheticOptions(name=options.name, experts=options.experts, kernels=True)
    given = {
        "layers": options.layers,
        "generate": options.generate,
        "prompts": options.prompts,
        "depths": options.depth,
    }
    chosen = replace(chosen, **{name: value for name, value in given.items() if value is not None})
    report = measure_synthetic(chosen, on_progress=lambda what, *_: print(what, flush=True))
    return report.to_json()


def numbers(text: str) -> tuple[int, ...]:
    """Numbers such as `512,4096`; nothing where the text is empty."""
    return tuple(int(part) for part in text.split(",") if part)


def main(arguments: list[str] | None = None) -> int:
    """Measure or read a report; write it, print its figures, and record them where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("name", nargs="?", default="flash")
    parser.add_argument("--experts", default="q2")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--generate", type=int)
    parser.add_argument("--prompts", type=numbers, help="512,4096")
    parser.add_argument("--depth", type=numbers, help="0,16384")
    parser.add_argument("--from", dest="source", type=Path, help="a report; nothing is measured")
    parser.add_argument("--out", type=Path, help="file for the report, .json")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--record", action="store_true", help="add to RESULTS/<card>.csv")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.source is None:
        report = measured(options)
    else:
        report = json.loads(options.source.read_text(encoding="utf-8"))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
    figures = figures_of(report)
    for figure in figures:
        print(f"{figure.name}: {figure.value:.4g} {figure.unit} (n={figure.n})")
    if options.record:
        place = {"machine_name": card_of(report), "torch_version": report["versions"]["torch"]}
        path = record(figures, commit_name=options.commit, folder=options.results, **place)
        print(f"added to {path}")
    for problem in report["problems"]:
        print(f"WRONG: {problem}")
    return 1 if report["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())

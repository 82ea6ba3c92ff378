"""Predicted speeds beside measured ones, with several budgets of a card and all experts on the CPU.

`python tests/bench/predictions.py --out build/bench/predictions.json --record` measures the links
of the machine, makes the experts of V4-Flash's shape once in main memory (78 GB with q2), and for
each budget tells what the links let expect before it builds and measures a network with as many of
them on the card as there is room for. No budget is used for calibration. It needs torch, NumPy and
Triton and the C kernels; where git cannot tell, `--commit` names what is measured, and
`--from predictions.json --commit NAME --record` adds the figures later, elsewhere.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from gpu_forward import card_of  # noqa: E402  # found by the line above
from harness import RESULTS, Figure, record  # noqa: E402

from edgedsv4.runtime.device import resolve_device  # noqa: E402
from edgedsv4.runtime.gpu_devices import check_gpu, release_unused_memory  # noqa: E402
from edgedsv4.runtime.host import physical_cores  # noqa: E402
from edgedsv4.runtime.synthetic_bench import (  # noqa: E402
    Hooks,
    SyntheticOptions,
    measure_network,
)
from edgedsv4.runtime.synthetic_hybrid import RandomExperts  # noqa: E402
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES, synthetic_config  # noqa: E402
from edgedsv4.runtime.synthetic_prediction import Expectation, needed_links  # noqa: E402

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.runtime.gpu_devices import Gpu
    from edgedsv4.runtime.links import Links

BENCHMARK = "predictions"
ALLOWED = 0.25
"""Share by which a measured speed may differ from its prediction."""


@dataclass(frozen=True)
class Case:
    """One placement."""

    mode: CpuExperts
    vram_bytes: int


CASES = tuple(Case("auto", gigabytes * 10**9) for gigabytes in (24, 48, 64))
ALL_ON_CPU = Case("on", 24 * 10**9)
OPTIONS = SyntheticOptions(
    cpu_experts="auto", depths=(0,), generate=60, prompts=(512, 4096), repeat=2
)


def say(text: str) -> None:
    """Tell of the progress, at once."""
    print(text, flush=True)


def told(case: Case, expectation: Expectation) -> None:
    """What is expected of a case, before it is measured."""
    for depth, prediction in expectation.decode:
        decode = prediction.decode
        parts = {name: round(value * 1e3, 2) for name, value in decode.seconds.items()}
        say(
            f"  {case}: expected decode at {depth} {decode.tokens_per_second:.1f} tok/s, ms {parts}"
        )
    for prefill in expectation.prefill.prefill:
        parts = {name: round(value * 1e3, 1) for name, value in prefill.seconds.items()}
        speed = prefill.tokens_per_second
        say(f"  {case}: expected prefill of {prefill.tokens} {speed:.0f} tok/s, ms {parts}")


def measured(
    config: ModelConfig,
    options: SyntheticOptions,
    cases: Sequence[Case],
    card: Gpu,
    links: Links,
) -> list[dict[str, Any]]:
    """A report of each case, as JSON; the experts are made once."""
    threads = options.expert_threads or physical_cores()
    began = time.perf_counter()
    is_locked = card.device.type == "cuda"
    experts = RandomExperts(config, EXPERT_TYPES[options.experts], threads, is_locked=is_locked)
    say(f"experts made in {time.perf_counter() - began:.1f} s")
    found = []
    try:
        for case in cases:
            began = time.perf_counter()
            chosen = replace(options, cpu_experts=case.mode, vram_bytes=case.vram_bytes)
            hooks = Hooks(on_expectation=partial(told, case))
            report = measure_network(config, chosen, card, hooks, links=links, experts=experts)
            found.append({**report.to_json(), "vram_bytes": case.vram_bytes})
            del report
            gc.collect()
            release_unused_memory(card.device)
            say(f"  measured in {time.perf_counter() - began:.1f} s")
    finally:
        experts.close()
    return found


def figures_of(reports: Sequence[dict[str, Any]]) -> list[Figure]:
    """Predicted, measured and their ratio, of every reading."""
    found = []
    for report in reports:
        model, host = report["model"], report["host"]
        budget = f"{report['vram_bytes'] / 1e9:g} GB of the card"
        kind = f"{model['name']} {model['experts']}, {model['layers']} layers"
        prefix = f"{kind}, cpu_experts {host['cpu_experts']}, {budget}"
        for result in report["results"]:
            is_decode = result["work"] == "decode"
            what = f"decode at {result['depth']}" if is_decode else f"prefill of {result['tokens']}"
            name, n = f"{prefix}, {what}", result["n"]
            values = {
                "predicted": (result["expected_tokens_per_second"], "tokens/s"),
                "measured": (result["tokens_per_second"], "tokens/s"),
                "measured of predicted": (result["found_of_expected"], "ratio"),
            }
            found += [Figure(BENCHMARK, f"{name}, {k}", v, u, n) for k, (v, u) in values.items()]
    return found


def print_table(figures: Sequence[Figure]) -> bool:
    """Predicted, measured, ratio by line; whether all ratios are within `ALLOWED`."""
    say(f"{'':76}{'predicted':>11}{'measured':>11}{'ratio':>7}")
    are_near = True
    for predicted, reached, ratio in zip(figures[::3], figures[1::3], figures[2::3], strict=True):
        name = predicted.name.removesuffix(", predicted")
        is_near = abs(ratio.value - 1) <= ALLOWED
        are_near = are_near and is_near
        mark = "" if is_near else f"  more than {ALLOWED:.0%} off"
        say(f"{name:76}{predicted.value:>11,.1f}{reached.value:>11,.1f}{ratio.value:>7.2f}{mark}")
    return are_near


def on_this_machine(options: argparse.Namespace) -> dict[str, Any]:
    """Links and reports of this machine's card."""
    chosen = replace(OPTIONS, experts=options.experts, layers=options.layers)
    config = synthetic_config(chosen.name, chosen.layers)
    card = check_gpu(resolve_device(chosen.device))
    cases = tuple(Case("auto", round(size * 1e9)) for size in options.budgets) or CASES
    began = time.perf_counter()
    links = needed_links(config, chosen, lambda what, *_: say(f"  {what}"))
    say(f"links measured in {time.perf_counter() - began:.1f} s")
    reports = measured(config, chosen, (*cases, ALL_ON_CPU), card, links)
    return {"links": links.to_json(), "reports": reports}


def main(arguments: list[str] | None = None) -> int:
    """Measure or read; print the table, write and record where asked to."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--budgets", type=float, nargs="*", default=[], help="GB of the card")
    parser.add_argument("--experts", default="q2")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--from", dest="source", type=Path, help="a report; nothing is measured")
    parser.add_argument("--out", type=Path, help="file for links and reports, .json")
    parser.add_argument("--commit", help="what is measured, where git cannot tell")
    parser.add_argument("--record", action="store_true", help="add to RESULTS/<card>.csv")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the results")
    options = parser.parse_args(arguments)
    if options.source is None:
        document = on_this_machine(options)
    else:
        document = json.loads(options.source.read_text(encoding="utf-8"))
    if options.out is not None:
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(document, indent=1), encoding="utf-8")
    reports = document["reports"]
    figures = figures_of(reports)
    are_near = print_table(figures)
    if options.record:
        versions = reports[0]["versions"]
        place = {"machine_name": card_of(reports[0]), "torch_version": versions["torch"]}
        path = record(figures, commit_name=options.commit, folder=options.results, **place)
        say(f"added to {path}")
    return 0 if are_near else 1


if __name__ == "__main__":
    sys.exit(main())

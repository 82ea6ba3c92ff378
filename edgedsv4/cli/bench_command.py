"""`edgedsv4 bench`: how fast a model runs here, beside what the memory allows."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli import bench_links, bench_synthetic
from edgedsv4.cli.flags import ENGINE_FLAGS, Flag, engine_options, parse_numbers, parse_whole
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import SpeedReading, SpeedReport
    from edgedsv4.cli.terminal import Terminal


MEASURES = (
    Flag(
        names=("--prompt",),
        metavar="N",
        parse=parse_whole,
        help="tokens of a prefill, 0 for none; 512 if left out",
    ),
    Flag(
        names=("--generate",),
        metavar="N",
        parse=parse_whole,
        help=(
            "tokens of a decode, sampled greedily, 0 for none; 64 if left out, 100 with --synthetic"
        ),
    ),
    Flag(
        names=("--depth",),
        metavar="N,...",
        parse=parse_numbers,
        help=(
            "tokens in the timeline before, several numbers for several depths; 0 if left out, with"
            " --synthetic 0, 16K, 64K, 256K and the end of the context"
        ),
    ),
    Flag(
        names=("--repeat",),
        metavar="N",
        parse=parse_whole,
        help=(
            "runs that count, after one that does not; 5 if left out, with --synthetic 3 of each"
            " prefill"
        ),
    ),
)
BENCH_FLAGS = (*MEASURES, *bench_synthetic.FLAGS, *bench_links.FLAGS, *ENGINE_FLAGS)
_FIELDS = {"prompt": "prompt", "generate": "generate", "depth": "depths", "repeat": "repeat"}


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures a model, a random network where there is no file, or the links of the machine.

    The context of a model is as large as the depths need unless given.
    """
    _check_subject(args)
    if args.model == bench_links.SUBJECT:
        return bench_links.bench(args, terminal)
    if args.synthetic is not None:
        return bench_synthetic.bench(args, terminal)
    given = {field: getattr(args, flag) for flag, field in _FIELDS.items()}
    measures = edgedsv4.BenchOptions(**{k: v for k, v in given.items() if v is not None})
    options = engine_options(args)
    if options.context is None:
        options = dataclasses.replace(options, context=measures.context)
    with edgedsv4.Engine.open(args.model, options, on_progress=terminal.progress) as engine:
        report = edgedsv4.measure_speed(engine, measures, on_progress=terminal.progress)
    if args.json:
        terminal.json(report.to_json())
    else:
        _print_report(report, terminal)
    return 0


def _check_subject(args: argparse.Namespace) -> None:
    """One thing to measure, and no option that belongs to the other kind.

    Raises:
        ConfigError: naming what is too much or missing.
    """
    if args.model is None and args.synthetic is None:
        names = "|".join(bench_synthetic.NAMES)
        raise ConfigError(
            f"nothing to measure: name a MODEL, or {bench_links.SUBJECT}, or --synthetic {names}"
        )
    if args.model is not None and args.synthetic is not None:
        raise ConfigError(
            f"MODEL and --synthetic exclude each other, found {args.model!r} and"
            f" --synthetic {args.synthetic}; leave one out"
        )
    is_links = args.model == bench_links.SUBJECT
    refused: list[tuple[Flag, str]] = []
    if args.synthetic is None:
        refused += [(flag, "--synthetic") for flag in bench_synthetic.FLAGS]
    if not is_links:
        refused += [(flag, f"`bench {bench_links.SUBJECT}`") for flag in bench_links.FLAGS]
    if is_links or args.synthetic is not None:
        shared = bench_links.SHARED_FLAGS if is_links else bench_synthetic.SHARED_FLAGS
        others = (flag for flag in (*MEASURES, *ENGINE_FLAGS) if flag.destination not in shared)
        refused += [(flag, "a MODEL") for flag in others]
    for flag, subject in refused:
        if getattr(args, flag.destination) is not None:
            raise ConfigError(
                f"{flag.names[0]} goes with {subject}, which was not given; leave it out"
            )


def _print_report(report: SpeedReport, terminal: Terminal) -> None:
    engine, machine = report.engine, report.machine
    weights = report.weights_per_token
    pairs = {
        "model": engine["model"],
        "computed by": _computed_by(report),
        "machine": f"{machine['processor']}, cores: {machine['cores']}",
        "versions": ", ".join(f"{name} {number}" for name, number in report.versions.items()),
        "weights per token": (
            f"{sum(weights.values()):,} bytes: {weights['dense_weights']:,} dense,"
            f" {weights['expert_weights']:,} of experts"
        ),
        "memory reads": f"{report.stream_rate / 1e9:.1f} GB/s with the same threads",
    }
    for name, value in pairs.items():
        terminal.line(f"{name:20}{value}")
    terminal.line()
    terminal.line(
        f"{'work':8}{'depth':>10}{'tokens':>8}{'n':>4}{'median t/s':>13}{'best t/s':>13}"
        f"{'bytes/token':>15}  share of the reads"
    )
    for reading in report.readings:
        terminal.line(_row(reading, report.stream_rate))


def _computed_by(report: SpeedReport) -> str:
    engine = report.engine
    kernels = engine["kernels"]
    names = set(kernels.values()) if isinstance(kernels, dict) else set()
    instructions = report.machine["instructions"]
    used = f" ({instructions})" if instructions and "native" in names else ""
    threads = "1 thread" if engine["threads"] == 1 else f"{engine['threads']} threads"
    return (
        f"{', '.join(sorted(names))}{used} on {engine['device']}, {threads},"
        f" profile {engine['profile']}, {engine['dtype']}"
    )


def _row(reading: SpeedReading, stream_rate: float) -> str:
    share = reading.share(stream_rate)
    reads = "" if share is None else f"{reading.bytes_per_token:>15,}  {share:.1%}"
    return (
        f"{reading.work:8}{reading.depth:>10,}{reading.tokens:>8,}{len(reading.seconds):>4}"
        f"{reading.median:>13,.2f}{reading.best:>13,.2f}{reads}"
    )

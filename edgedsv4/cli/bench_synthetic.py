"""`edgedsv4 bench --synthetic`: a random network of a released shape on a GPU, kernel by kernel."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.expectation import parts_text
from edgedsv4.cli.flags import Flag, parse_numbers, parse_whole

if TYPE_CHECKING:
    from edgedsv4 import Expectation, KernelTime, SyntheticReading, SyntheticReport
    from edgedsv4.cli.terminal import Terminal

FAILED = 1
NAMES = ("flash", "pro")
SHARED_FLAGS = (
    "generate",
    "depth",
    "repeat",
    "device",
    "vram_bytes",
    "cpu_experts",
    "expert_threads",
)
"""Destinations of the flags that mean the same for a model."""

FLAGS = (
    Flag(
        names=("--synthetic",),
        metavar="NAME",
        choices=NAMES,
        help="random weights of this shape instead of a MODEL, on a GPU",
    ),
    Flag(
        names=("--experts",),
        metavar="TYPES",
        choices=("q2", "mxfp4", "q4k"),
        help="routed experts of --synthetic; q2 (IQ2_XXS and Q2_K) if left out",
    ),
    Flag(
        names=("--layers",),
        metavar="N",
        parse=parse_whole,
        help="first layers of --synthetic only",
    ),
    Flag(
        names=("--prompts",),
        metavar="N,...",
        parse=parse_numbers,
        help="tokens of each prefill of --synthetic, 0 for none; 512,4096 if left out",
    ),
    Flag(
        names=("--kernels",),
        help="time, bytes and launches of every kernel of --synthetic, too",
    ),
    Flag(
        names=("--predict",),
        help="tell what to expect before --synthetic is measured; measures the links, some seconds",
    ),
    Flag(
        names=("--links",),
        metavar="FILE",
        help="the same from figures of `bench links --json`, without measuring the links",
    ),
)
_FIELDS = {
    "synthetic": "name",
    "experts": "experts",
    "layers": "layers",
    "prompts": "prompts",
    "kernels": "kernels",
    "predict": "predict",
    "generate": "generate",
    "depth": "depths",
    "repeat": "repeat",
    "device": "device",
    "vram_bytes": "vram_bytes",
    "cpu_experts": "cpu_experts",
    "expert_threads": "expert_threads",
}


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures; exit status 1 when the figures cannot be true."""
    given = {field: getattr(args, flag) for flag, field in _FIELDS.items()}
    given = {field: value for field, value in given.items() if value is not None}
    if "prompts" in given:
        given["prompts"] = tuple(tokens for tokens in given["prompts"] if tokens)
    options = edgedsv4.SyntheticOptions(**given)
    links = None if args.links is None else edgedsv4.Links.read(Path(args.links))
    report = edgedsv4.measure_synthetic(
        options,
        links=links,
        on_progress=terminal.progress,
        on_expectation=partial(_print_expectation, terminal=terminal),
    )
    if args.json:
        terminal.json(report.to_json())
    else:
        _print_report(report, terminal)
    problems = report.problems()
    for problem in problems:
        terminal.note(f"edgedsv4: {problem}")
    return FAILED if problems else 0


def _print_expectation(expectation: Expectation, terminal: Terminal) -> None:
    """Told on stderr, before the measurement: with --json stdout is one document."""
    for depth, prediction in expectation.decode:
        decode = prediction.decode
        terminal.note(
            f"expected: decode at {depth:,} {decode.tokens_per_second:,.1f} tokens/s, the limit is"
            f" {edgedsv4.limit_text(decode.limit)} ({parts_text(decode.seconds)} ms)"
        )
    for prefill in expectation.prefill.prefill:
        terminal.note(
            f"expected: prefill of {prefill.tokens:,} {prefill.tokens_per_second:,.0f} tokens/s,"
            f" the limit is {edgedsv4.limit_text(prefill.limit)} ({parts_text(prefill.seconds)} ms)"
        )


def _print_deviations(report: SyntheticReport, terminal: Terminal) -> None:
    if report.expectation is None:
        return
    terminal.line()
    for reading in report.readings:
        deviation = report.expectation.deviation(reading)
        if deviation is not None:
            terminal.line(f"{reading.label}: {deviation}")


def _print_report(report: SyntheticReport, terminal: Terminal) -> None:
    model, device = report.model, report.device
    types = model["expert_types"]
    stored = " and ".join(map(str, types)) if isinstance(types, list) else ""
    pairs = {
        "model": (
            f"random weights of the shape {model['name']}, {model['layers']} layers,"
            f" experts {stored}"
        ),
        "device": f"{device['name']}, {device['description']}, {device['family']}",
        "versions": ", ".join(f"{name} {number}" for name, number in report.versions.items()),
        "weights": f"{report.weight_bytes:,} bytes, made in {report.build_seconds:.1f} s",
        "memory reads": f"{report.read_rate / 1e9:,.1f} GB/s",
    }
    if report.host:
        pairs["main memory reads"] = f"{_gigabytes(report.host['read_rate'])} GB/s"
        pairs["experts"] = (
            f"cpu_experts {report.host['cpu_experts']}, {report.host['threads']} threads;"
            f" {report.host['experts_on_card']:,} of {report.host['experts']:,} on the card"
        )
    if report.capture_seconds is not None and report.first_token_seconds is not None:
        pairs["capture"] = (
            f"{report.capture_seconds:.2f} s for a new timeline; the first token of all took"
            f" {report.first_token_seconds:.2f} s, with compiling"
        )
    for name, value in pairs.items():
        terminal.line(f"{name:20}{value}")
    terminal.line()
    terminal.line(
        f"{'work':8}{'depth':>10}{'tokens':>8}{'n':>5}{'tokens/s':>12}{'median ms':>12}"
        f"{'p99 ms':>12}{'bytes/token':>16}  share of the reads"
    )
    for reading in report.readings:
        terminal.line(_row(reading, report))
    _print_deviations(report, terminal)
    for reading in report.readings:
        if reading.kernels:
            _print_kernels(reading, report.read_rate, terminal)


def _row(reading: SyntheticReading, report: SyntheticReport) -> str:
    share, host = reading.share(report.read_rate), report.host_share(reading)
    if host is not None and reading.host is not None:
        last = (
            f"{reading.host.nbytes:>16,.0f}  {host:.1%} of main memory's,"
            f" {reading.host.seconds * 1e3:.2f} ms by the CPU"
        )
    elif share is None:
        rate = reading.rate * report.operations_per_token / 1e12
        last = f"{'':16}  {rate:,.1f} TFLOP/s of products with weights"
    else:
        last = f"{reading.bytes_per_token:>16,}  {share:.1%}"
    return (
        f"{reading.work:8}{reading.depth:>10,}{reading.tokens:>8,}{len(reading.seconds):>5}"
        f"{reading.rate:>12,.1f}{reading.median_seconds * 1e3:>12,.3f}"
        f"{reading.p99_seconds * 1e3:>12,.3f}{last}"
    )


def _gigabytes(rate: object) -> str:
    return f"{rate / 1e9:,.1f}" if isinstance(rate, float) else "?"


def _print_kernels(reading: SyntheticReading, read_rate: float, terminal: Terminal) -> None:
    tokens = 1 if reading.work == "decode" else reading.tokens
    launches = sum(kernel.launches for kernel in reading.kernels)
    terminal.line()
    terminal.line(
        f"{reading.label}: {launches:,} launches, {reading.kernel_seconds * 1e3:,.3f} ms of kernels"
        f" that overlap, the device busy for {reading.busy_seconds * 1e3:,.3f} of"
        f" {reading.median_seconds * 1e3:,.3f} ms"
    )
    terminal.line(
        f"{'kernel':50}{'launches':>9}{'us/launch':>12}{'us/token':>12}{'time':>8}"
        f"{'GB':>10}{'GB/s':>10}  share of the reads"
    )
    for kernel in reading.kernels:
        terminal.line(_kernel_row(kernel, tokens, reading.kernel_seconds, read_rate))
    for name, moved in reading.unseen.items():
        terminal.line(f"{name:50}{'none':>9}{'':32}{moved.total / 1e9:>10.4f}")


def _kernel_row(kernel: KernelTime, tokens: int, total: float, read_rate: float) -> str:
    rate, moved = kernel.read_rate, kernel.traffic
    reads = (
        ""
        if rate is None or moved is None
        else f"{moved.total / 1e9:>10.4f}{rate / 1e9:>10,.1f}  {rate / read_rate:.1%}"
    )
    return (
        f"{kernel.name:50}{kernel.launches:>9,}"
        f"{kernel.seconds * 1e6 / max(1, kernel.launches):>12,.2f}"
        f"{kernel.seconds * 1e6 / tokens:>12,.2f}{kernel.seconds / total:>8.1%}{reads}"
    )

"""`edgedsv4 inspect` and `edgedsv4 plan`: what a file holds and needs, without loading it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.flags import engine_options
from edgedsv4.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgedsv4 import Inspection, MemoryPlan
    from edgedsv4.cli.terminal import Terminal


def inspect(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what the header says; exit status 2 when the file could not run."""
    try:
        report = edgedsv4.inspect_model(args.model)
    except FormatError as error:
        if args.json:
            terminal.json({"path": args.model, "problems": list(error.problems)})
        raise
    if args.json:
        terminal.json(report.to_json())
    else:
        _print_inspection(report, terminal)
    if report.problems:
        raise FormatError(
            f"{len(report.problems)} problems, so it cannot run: {report.problems[0]}",
            path=report.path,
            problems=report.problems,
        )
    return 0


def _print_inspection(report: Inspection, terminal: Terminal) -> None:
    _print_pairs(terminal, report.facts())
    terminal.line()
    terminal.line(f"{'weights':20}{'tensors':>8}{'bytes':>18}  block types")
    for role in report.roles:
        types = ", ".join(f"{name} {count}" for name, count in role.block_types.items())
        terminal.line(f"{role.name:20}{role.tensors:>8,}{role.nbytes:>18,}  {types}")
    for label, texts in (("warning", report.warnings), ("problem", report.problems)):
        for text in texts:
            terminal.line(f"{label}: {text}")


def _print_pairs(terminal: Terminal, pairs: Mapping[str, object]) -> None:
    for name, value in pairs.items():
        shown = ", ".join(str(v) for v in value) if isinstance(value, tuple) else value
        terminal.line(f"{name:20}{shown}")


def plan(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the memory of one session by item; exit status 0 also when it does not fit."""
    options = engine_options(args)
    if options.vram_bytes is not None:
        terminal.note("edgedsv4: --vram has no effect: the plan is for the CPU, --ram bounds that")
    report = edgedsv4.plan_model(args.model, options)
    if args.json:
        terminal.json(report.to_json())
    else:
        _print_plan(report, terminal)
    return 0


def _print_plan(report: MemoryPlan, terminal: Terminal) -> None:
    terminal.line(f"{f'context of {report.context:,} tokens':30}{'bytes':>20}")
    for item in report.items:
        note = "" if item.is_required else "  may stay on disk"
        terminal.line(f"{item.name:30}{item.nbytes:>20,}{note}")
    terminal.line(f"{'needed':30}{report.needed_bytes:>20,}")
    terminal.line(f"{'available':30}{report.available_bytes:>20,}")
    terminal.line(f"{'per token':30}{float(report.state_bytes_per_token):>20,.2f}")
    if report.fits:
        experts = "they all stay in memory" if report.experts_fit else "some are read from disk"
        terminal.line(f"fits; routed experts: {experts}")
    else:
        terminal.line(f"does not fit: {report.limiting_item} exceeds the budget")
    terminal.line(f"largest context that fits: {report.largest_context:,} tokens")

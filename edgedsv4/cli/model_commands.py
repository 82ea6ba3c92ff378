"""`edgedsv4 inspect`: what a file holds, without loading it."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.errors import FormatError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgedsv4 import Inspection
    from edgedsv4.cli.terminal import Terminal


def inspect(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what the header says; exit status 2 when the file could not run."""
    try:
        report = edgedsv4.inspect_model(args.model, dense_model=args.dense_model)
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

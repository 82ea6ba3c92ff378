"""`edgedsv4 pack build`, `verify` and `info`: expert packs, made, checked and looked into."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.convert_commands import FP8_CHOICES, MTP_CHOICES
from edgedsv4.cli.flags import Flag, parse_size, parse_whole
from edgedsv4.cli.sources import output_path
from edgedsv4.errors import FormatError

if TYPE_CHECKING:
    from edgedsv4.cli.terminal import Terminal

_JSON = Flag(names=("--json",), help="print one JSON document")
_PACK = Flag(names=("PACK",), help="an expert pack, or its manifest")
_DENSE = Flag(
    names=("--dense",),
    metavar="FILE",
    help="the file with the rest of the model; if left out, what the pack names",
)
BUILD_FLAGS = (
    Flag(names=("SRC",), help="a GGUF file, or an official checkpoint directory"),
    Flag(names=("OUT",), help="the pack to write; replaced if it exists"),
    Flag(names=("--resume",), help="go on with an unfinished build"),
    Flag(
        names=("--dense-out",),
        metavar="FILE.gguf",
        help="also write a GGUF file with everything but the routed experts",
    ),
    Flag(
        names=("--fp8",),
        metavar="TYPE",
        choices=FP8_CHOICES,
        help="in --dense-out, type of FP8 matrices of an official checkpoint (default Q8_0)",
    ),
    Flag(
        names=("--mtp",),
        metavar="PLACE",
        choices=MTP_CHOICES,
        help="where the MTP block of an official checkpoint goes beside --dense-out (default"
        " separate)",
    ),
    Flag(
        names=("--expert-freq",),
        metavar="FILE",
        help="JSON file with tokens and counts [layers][experts] to put into a version 2 pack",
    ),
    Flag(
        names=("--alignment",),
        metavar="BYTES",
        parse=parse_whole,
        help="where experts may begin, a power of two, 4096..1048576 (default 4096)",
    ),
    Flag(
        names=("--safety-margin",),
        metavar="SIZE",
        parse=parse_size,
        help="space on the disk that must be left at the end (default 16G)",
    ),
    _JSON,
)
VERIFY_FLAGS = (
    _PACK,
    _DENSE,
    Flag(
        names=("--sampled",),
        help="instead of everything, 96 matrices and the small tensors of the other file",
    ),
    _JSON,
)
INFO_FLAGS = (_PACK, _JSON)


def build(args: argparse.Namespace, terminal: Terminal) -> int:
    """Writes the routed experts of a model as a pack."""
    out = output_path(args.out, "OUT")
    given = {
        "resume": args.resume,
        "dense_out": None if args.dense_out is None else output_path(args.dense_out, "--dense-out"),
        "frequency": None if args.expert_freq is None else Path(args.expert_freq),
        "fp8": args.fp8,
        "mtp": args.mtp,
        "alignment": args.alignment,
        "safety_margin_bytes": args.safety_margin,
    }
    options = edgedsv4.PackOptions(
        **{name: value for name, value in given.items() if value is not None}
    )
    report = edgedsv4.build_pack(args.src, out, options, on_progress=terminal.progress)
    if args.json:
        terminal.json(report.to_json())
        return 0
    for note in report.notes:
        terminal.note(f"edgedsv4: {note}")
    if report.resumed_layers:
        count = report.resumed_layers
        terminal.note(f"edgedsv4: finished layers that were there already: {count}")
    for path in (report.pack, report.manifest, *([report.dense] if report.dense else [])):
        terminal.line(f"{path}")
    terminal.line(
        f"version {report.version}, {report.layers} layers of {report.experts} experts,"
        f" {report.nbytes:,} bytes"
    )
    for name, nbytes in report.block_types.items():
        terminal.line(f"{name:8}{nbytes:>20,}")
    return 0


def verify(args: argparse.Namespace, terminal: Terminal) -> int:
    """Compares a pack with its digests; exit status 2 when something differs."""
    try:
        report = edgedsv4.verify_pack(
            Path(args.pack),
            dense=None if args.dense is None else Path(args.dense),
            sampled=bool(args.sampled),
            on_progress=terminal.progress,
        )
    except FormatError as error:
        if args.json:
            terminal.json({"pack": args.pack, "problems": list(error.problems)})
        raise
    if args.json:
        terminal.json(report.to_json())
        return 0
    for warning in report.warnings:
        terminal.note(f"edgedsv4: warning: {warning}")
    for name, count in report.checked.items():
        terminal.line(f"{name:20}{count:>20,}")
    return 0


def info(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what header, index and manifest of a pack say."""
    report = edgedsv4.inspect_pack(Path(args.pack))
    if args.json:
        terminal.json(report.to_json())
        return 0
    for name, value in report.facts().items():
        shown = f"{value:,}" if isinstance(value, int) else value
        terminal.line(f"{name:20}{shown}")
    for warning in report.warnings:
        terminal.line(f"warning: {warning}")
    return 0

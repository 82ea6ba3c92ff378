"""`edgedsv4 convert` and `edgedsv4 quantize`: model files into GGUF files."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.flags import Flag, parse_size
from edgedsv4.cli.sources import output_path

if TYPE_CHECKING:
    from edgedsv4 import ConvertReport
    from edgedsv4.cli.terminal import Terminal

_OUT = Flag(names=("OUT",), metavar="OUT.gguf", help="the file to write; replaced if it exists")
_SPLIT = Flag(
    names=("--split-max-bytes",),
    metavar="SIZE",
    parse=parse_size,
    help="write parts of at most this size, such as 40G",
)
MTP_CHOICES = ("separate", "inside", "none")
FP8_CHOICES = ("Q8_0", "BF16", "F16", "F32")


def _mtp(default: str) -> Flag:
    return Flag(
        names=("--mtp",),
        metavar="PLACE",
        choices=MTP_CHOICES,
        help="where the MTP block goes: a file mtp-OUT.gguf for llama.cpp, inside (llama.cpp"
        f" cannot read that), or nowhere (default {default})",
    )


CONVERT_FLAGS = (
    Flag(names=("SRC",), help="an official checkpoint directory, or a GGUF file"),
    _OUT,
    Flag(
        names=("--fp8",),
        metavar="TYPE",
        choices=FP8_CHOICES,
        help="type of FP8 matrices; BF16 and F32 hold them exactly (default Q8_0)",
    ),
    _mtp("separate"),
    _SPLIT,
    Flag(names=("--json",), help="print one JSON document"),
)
QUANTIZE_FLAGS = (
    Flag(names=("SRC",), help="a GGUF file, or an official checkpoint directory"),
    _OUT,
    *(
        Flag(names=(f"--{name}",), metavar="TYPE", parse=str.upper, help=text)
        for name, text in (
            ("experts", "type of the routed experts, such as Q2_K or MXFP4"),
            ("dense", "type of attention, index queries and shared experts, such as Q8_0"),
            ("head", "type of the output matrix"),
            ("embed", "type of the token embedding"),
            ("compressors", "type of the compressors' projections"),
        )
    ),
    _mtp("inside"),
    _SPLIT,
    Flag(names=("--json",), help="print one JSON document"),
)


def convert(args: argparse.Namespace, terminal: Terminal) -> int:
    """Writes a checkpoint as GGUF."""
    given = _given(args, ("fp8", "mtp", "split_max_bytes"))
    options = edgedsv4.ConvertOptions(**given)  # type: ignore[arg-type]  # parsed by name
    out = output_path(args.out, "OUT")
    report = edgedsv4.convert_model(args.src, out, options, on_progress=terminal.progress)
    return _show(report, args, terminal)


def quantize(args: argparse.Namespace, terminal: Terminal) -> int:
    """Writes a model with other storage types."""
    names = ("experts", "dense", "head", "embed", "compressors", "mtp", "split_max_bytes")
    given = _given(args, names)
    options = edgedsv4.QuantizeOptions(**given)  # type: ignore[arg-type]  # parsed by name
    out = output_path(args.out, "OUT")
    report = edgedsv4.quantize_model(args.src, out, options, on_progress=terminal.progress)
    return _show(report, args, terminal)


def _given(args: argparse.Namespace, names: tuple[str, ...]) -> dict[str, object]:
    """What was given; the option record's own defaults hold for the rest."""
    found = {name: getattr(args, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _show(report: ConvertReport, args: argparse.Namespace, terminal: Terminal) -> int:
    if args.json:
        terminal.json(report.to_json())
        return 0
    for note in report.notes:
        terminal.note(f"edgedsv4: {note}")
    for path in report.files:
        terminal.line(f"{path}")
    terminal.line(f"{report.tensors:,} tensors, {report.nbytes:,} bytes")
    for name, nbytes in report.block_types.items():
        terminal.line(f"{name:8}{nbytes:>20,}")
    return 0

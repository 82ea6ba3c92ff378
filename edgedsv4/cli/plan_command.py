"""`edgedsv4 plan`: memory by item, where experts lie, and how fast that should be."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.expectation import parts_text
from edgedsv4.cli.flags import Flag, engine_options
from edgedsv4.cli.links_file import AGAIN, store_links, stored_links
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import Links, Prediction, TierReport
    from edgedsv4.cli.terminal import Terminal

_PLACES = {"vram": "on the card", "ram": "in memory", "drive": "on the drive"}
_DENSE_TYPES = ("Q8_0", "BF16", "F16", "Q4_0", "Q4_K", "Q5_K", "Q6_K", "MXFP4")
"""Types of dense weights whose products are worth measuring; others are rare, or vectors."""
_DRIVE_FILE_BYTES = 64 << 20
"""A file below this is too small to measure its drive by."""

PLAN_FLAGS = (
    Flag(
        names=("--links",),
        metavar="FILE",
        help=(
            "figures of the machine, from `bench links --json`; if left out, those that `bench"
            " links` kept"
        ),
    ),
    Flag(
        names=("--refresh",),
        help="measure the links now, with the model's drive and block types, and keep the figures",
    ),
)


def plan(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints the plan of one session; exit status 0 also when it does not fit."""
    options = engine_options(args)
    links, why_not = _links(args, terminal)
    report = edgedsv4.plan_tiers(args.model, options, links=links)
    if why_not:
        terminal.note(f"edgedsv4: {why_not}")
    if args.json:
        terminal.json(report.to_json())
    else:
        _print_memory(report, terminal)
        _print_tiers(report, terminal)
        _print_speed(report, terminal)
    return 0


def _links(args: argparse.Namespace, terminal: Terminal) -> tuple[Links | None, str]:
    """Figures to predict by; without any, why there are none."""
    if args.links is not None:
        if args.refresh:
            raise ConfigError("--links and --refresh exclude each other; leave one out")
        return edgedsv4.Links.read(Path(args.links)), ""
    if not args.refresh:
        return stored_links(terminal)
    inspection = edgedsv4.inspect_model(args.model)
    types = {
        name
        for role in inspection.roles
        for kinds in role.block_types
        for name in kinds.split("+")
        if role.name == "routed experts" or name in _DENSE_TYPES
    }
    options = edgedsv4.LinkOptions(
        path=_file_on_drive(inspection.path),
        types=tuple(sorted(types)),
        device=args.device or "auto",
    )
    links = edgedsv4.measure_links(options, on_progress=terminal.progress)
    store_links(links, terminal)
    return links, ""


def _file_on_drive(model: Path) -> Path | None:
    """The largest file of a model, by which its drive is measured; None when all are small."""
    files = [model] if model.is_file() else [path for path in model.glob("*") if path.is_file()]
    largest = max(files, key=lambda path: path.stat().st_size, default=None)
    if largest is None or largest.stat().st_size < _DRIVE_FILE_BYTES:
        return None
    return largest


def _print_memory(report: TierReport, terminal: Terminal) -> None:
    memory = report.plan.memory
    terminal.line(f"{f'context of {memory.context:,} tokens':30}{'bytes':>20}")
    for item in memory.items:
        note = "" if item.is_required else "  may be elsewhere"
        terminal.line(f"{item.name:30}{item.nbytes:>20,}{note}")
    terminal.line(f"{'needed':30}{memory.needed_bytes:>20,}")
    where = "available on the card" if report.plan.has_card else "available"
    terminal.line(f"{where:30}{memory.available_bytes:>20,}")
    terminal.line(f"{'per token':30}{float(memory.state_bytes_per_token):>20,.2f}")
    if memory.fits:
        terminal.line(f"fits; routed experts: {_experts_text(report)}")
    else:
        terminal.line(f"does not fit: {memory.limiting_item} exceeds the budget")
    terminal.line(f"largest context that fits: {memory.largest_context:,} tokens")


def _experts_text(report: TierReport) -> str:
    plan = report.plan
    if any(plan.drive.slots):
        return "some are read from disk"
    return "they all stay in memory" if any(plan.ram.slots) else "they all are on the card"


def _print_tiers(report: TierReport, terminal: Terminal) -> None:
    plan = report.plan
    terminal.line()
    terminal.line(
        f"{'routed experts':30}{'bytes':>20}{'experts':>9}{'per layer':>14}  share of selections"
    )
    for tier in plan.tiers:
        if any(tier.slots):
            low, high = min(tier.slots), max(tier.slots)
            span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
            terminal.line(
                f"{_PLACES[tier.name]:30}{tier.nbytes:>20,}{sum(tier.slots):>9,}{span:>14}"
                f"  {tier.share:.1%}"
            )
    staging = {"card": plan.vram_staging_bytes, "memory": plan.ram_staging_bytes}
    for place, nbytes in staging.items():
        if nbytes:
            terminal.line(f"{f'staging, {place}':30}{nbytes:>20,}")
    if plan.has_card:
        terminal.line(f"{'memory, all':30}{plan.ram_bytes:>20,}  of {plan.request.ram_bytes:,}")
    _print_store(report, terminal)
    terminal.line(f"{'one token uses':30}{plan.bytes_per_token:>20,}")
    if not plan.has_slots_for_a_token:
        terminal.line("too little memory to keep the experts of even one token")
    if sum(any(tier.slots) for tier in plan.tiers) > 1:
        terminal.line("shares: as if all experts were as likely; a cache that learns hits more")


def _print_store(report: TierReport, terminal: Terminal) -> None:
    """The store as opening would make it; nothing where files are mapped and all fit."""
    if report.why_mapped:
        terminal.line(report.why_mapped)
    store, options = report.plan.store, report.plan.request.options
    if store is None:
        return
    terminal.line(f"{'slot of the store':30}{store.slot_bytes:>20,}{store.slots:>9,} that stay")
    terminal.line(f"{'':50}{store.staging:>9,} that others pass through")
    terminal.line(
        f"the others are read as they are needed: io {options.io}, up to {options.io_depth:,}"
        f" reads of 1 MiB at a time, prefetch {options.prefetch}"
    )


def _print_speed(report: TierReport, terminal: Terminal) -> None:
    terminal.line()
    prediction = report.prediction
    if prediction is None:
        terminal.line(f"no speed is predicted without: {', '.join(report.missing)}; {AGAIN}")
        return
    _print_prediction(prediction, terminal)
    for text in report.advice:
        terminal.line(f"faster: {text}")


def _print_prediction(prediction: Prediction, terminal: Terminal) -> None:
    decode = prediction.decode
    terminal.line(
        f"decode {decode.tokens_per_second:,.1f} tokens/s expected, at most"
        f" {decode.bound_tokens_per_second:,.1f}; the limit is"
        f" {edgedsv4.limit_text(decode.limit)}"
    )
    terminal.line(f"  ms of a token: {parts_text(decode.seconds)}")
    for prefill in prediction.prefill:
        terminal.line(
            f"prefill {prefill.tokens_per_second:,.0f} tokens/s in chunks of {prefill.tokens:,};"
            f" the limit is {edgedsv4.limit_text(prefill.limit)}"
        )
        terminal.line(f"  ms of a chunk: {parts_text(prefill.seconds)}")

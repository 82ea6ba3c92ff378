"""`edgedsv4 bench links`: memory, experts on the CPU, a drive, a card and its bus."""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.flags import Flag
from edgedsv4.cli.links_file import store_links

if TYPE_CHECKING:
    from edgedsv4 import Links
    from edgedsv4.cli.terminal import Terminal

SUBJECT = "links"
"""What is given for MODEL; a file of this name is `./links`."""
SHARED_FLAGS = ("repeat", "threads", "device")
"""Destinations of the flags that mean the same for a model."""
_LOOK_UP_BOUND = 0.7
"""Of the rate of memory: below it decoding and products take the time, not reading."""


def parse_types(text: str) -> tuple[str, ...]:
    """Reads names of block types: `MXFP4,Q4_K`."""
    return tuple(part.strip().upper() for part in text.split(",") if part.strip())


FLAGS = (
    Flag(
        names=("--path",),
        metavar="DIR|FILE",
        help=(
            "drive that `bench links` reads: a large file, which is only read, or a directory, in"
            " which one of 1 GiB is made and removed"
        ),
    ),
    Flag(
        names=("--types",),
        metavar="TYPE,...",
        parse=parse_types,
        help="block types of experts and dense weights that `bench links` measures",
    ),
)


def bench(args: argparse.Namespace, terminal: Terminal) -> int:
    """Measures, prints and keeps the figures."""
    links = edgedsv4.measure_links(link_options(args), on_progress=terminal.progress)
    if args.json:
        terminal.json(links.to_json())
    else:
        print_links(links, terminal)
    store_links(links, terminal)
    return 0


def link_options(args: argparse.Namespace) -> edgedsv4.LinkOptions:
    """The options that were given."""
    given: dict[str, object] = {name: getattr(args, name, None) for name in SHARED_FLAGS}
    given |= {
        "types": args.types,
        "path": None if args.path is None else Path(args.path),
    }
    chosen = {name: value for name, value in given.items() if value is not None}
    return edgedsv4.LinkOptions(**chosen)  # type: ignore[arg-type]  # the fields were parsed by name


def print_links(links: Links, terminal: Terminal) -> None:
    """The figures as a table, medians of their runs."""
    machine = links.machine
    terminal.line(f"{'machine':20}{machine.processor}, cores: {machine.cores}")
    terminal.line(f"{'instructions':20}{links.instructions or 'none: the C kernels are missing'}")
    for memory in links.dram:
        threads = _counted(memory.threads, "thread")
        terminal.line(f"{'memory reads':20}{threads:>12}{_rate(memory.median):>14}")
    _print_card(links, terminal)
    for drive in links.drives:
        terminal.line(f"{'drive':20}{drive.mount}, {drive.access} reads")
        for reading in drive.readings:
            shape = f"{reading.request_bytes >> 10:,} KiB x {reading.depth}"
            terminal.line(f"{'':14}{shape:>18}{_rate(reading.median):>14}")
    _print_experts(links, terminal)
    for note in links.notes:
        terminal.line(f"left out: {note}")


def _print_card(links: Links, terminal: Terminal) -> None:
    card = links.card
    if card is None:
        return
    terminal.line(f"{'card':20}{card.name}, {card.description}")
    rates = {
        "from pinned memory": card.to_card,
        "into pinned memory": card.from_card,
        "copies": card.copy,
        "reads": card.read,
    }
    for name, runs in rates.items():
        if runs:
            terminal.line(f"{'':12}{name:>20}{_rate(statistics.median(runs)):>14}")
    products = 2 * statistics.median(card.products) / 1e12
    terminal.line(f"{'':12}{'products':>20}{products:>7,.1f} TFLOP/s")
    exchange = statistics.median(card.exchange_seconds) * 1e6
    terminal.line(f"{'':12}{'exchange':>20}{exchange:>12,.1f} us")
    if links.overlap is not None:
        both = links.overlap
        experts = statistics.median(both.expert_runs) * both.bytes_per_weight
        terminal.line(
            f"{'both at once':20}{both.block_type} experts {_rate(experts).strip()}, copies"
            f" {_rate(statistics.median(both.to_card_runs)).strip()}"
        )


def _print_experts(links: Links, terminal: Terminal) -> None:
    if not links.experts:
        return
    terminal.line()
    terminal.line(
        f"{'experts on the CPU':20}{'threads':>8}{'tokens':>8}{'Gweights/s':>12}{'GB/s':>10}"
        f"{'Gproducts/s':>13}  bound by"
    )
    for rate in links.experts:
        memory = next((m.median for m in links.dram if m.threads == rate.threads), 0.0)
        share = rate.bytes_per_second / memory if memory else 1.0
        bound = "memory" if share >= _LOOK_UP_BOUND else f"the kernel ({share:.0%} of memory)"
        terminal.line(
            f"{rate.block_type:20}{rate.threads:>8}{rate.tokens:>8}{rate.median / 1e9:>12,.2f}"
            f"{rate.bytes_per_second / 1e9:>10,.2f}{rate.products_per_second / 1e9:>13,.1f}"
            f"  {bound}"
        )
    _print_switches(links, terminal)


def _print_switches(links: Links, terminal: Terminal) -> None:
    for name in dict.fromkeys(rate.block_type for rate in links.experts):
        tokens = links.switch_tokens(name)
        if tokens is not None:
            terminal.line(
                f"{name}: copied to the card faster than computed by the CPU from"
                f" {_counted(tokens, 'token')} per expert on"
            )


def _rate(value: float) -> str:
    return f"{value / 1e9:,.2f} GB/s"


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"

"""`edgedsv4 profile` and `edgedsv4 replay`: the experts a model uses, and what caches would do."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

import edgedsv4
from edgedsv4.cli.flags import SCORING_FLAGS, Flag, engine_options, parse_size, parse_whole
from edgedsv4.cli.sources import output_path, read_text
from edgedsv4.config import ReplayPolicy
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import ExpertFrequency, RouteTrace
    from edgedsv4.cli.terminal import Terminal

DEFAULT_OUT = "expert_freq.json"
DEFAULT_WINDOW = 512
DEFAULT_RESIDENT = ((0.15,), (0.3,), (0.5,))
SHOWN_GUESSES = (1, 2, 4, 8)
POLICIES: tuple[ReplayPolicy, ...] = get_args(ReplayPolicy)

Shares = tuple[float, ...]
"""Share of all experts that each tier holds, fastest first."""


def parse_resident(text: str) -> tuple[Shares, ...]:
    """Reads `15%,30%` or, with a tier above another, `10%+40%`."""
    try:
        return tuple(tuple(_share(s) for s in case.split("+")) for case in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"expected shares such as 15%,30% or 10%+40%, found {text[:40]!r}"
        ) from None


def _share(text: str) -> float:
    if not text.endswith("%"):
        raise ValueError(text)
    return float(text[:-1]) / 100


def parse_policies(text: str) -> tuple[ReplayPolicy, ...]:
    """Reads names of policies, separated by commas."""
    found = tuple(policy for name in text.split(",") for policy in POLICIES if policy == name)
    if len(found) != len(text.split(",")):
        names = ", ".join(POLICIES)
        raise argparse.ArgumentTypeError(f"expected some of {names}, found {text[:40]!r}")
    return found


PROFILE_FLAGS = (
    Flag(
        names=("--out",),
        metavar="FILE",
        help=f"frequency file to write; {DEFAULT_OUT} if left out",
    ),
    Flag(
        names=("--trace",),
        metavar="FILE",
        help="write the experts of every token too, and what was guessed of them",
    ),
    Flag(
        names=("--pairs",),
        metavar="N",
        parse=parse_whole,
        help="keep the N experts of the next layer that most often follow each, for --prefetch"
        " pairs, 1..16; none if left out",
    ),
    Flag(
        names=("--token-text",),
        metavar="FILE",
        help="a larger text, not run: its tokens give the frequencies of hash-routed layers",
    ),
    *SCORING_FLAGS,
)
REPLAY_FLAGS = (
    Flag(
        names=("--resident",),
        metavar="SHARES",
        parse=parse_resident,
        help="shares of all experts in the cache, 10%+40% for two tiers; 15%,30%,50% if left out",
    ),
    Flag(
        names=("--policy",),
        metavar="NAMES",
        parse=parse_policies,
        help=f"some of {', '.join(POLICIES)}; all if left out",
    ),
    Flag(names=("--keep",), help="every expert that is read is kept, also one that is used once"),
    Flag(
        names=("--prefill-chunk",),
        metavar="N",
        parse=parse_whole,
        help="tokens evaluated at once in prefill; 512 if left out",
    ),
    Flag(
        names=("--expert-freq",),
        metavar="FILE",
        help="frequency file that the policy aged starts with",
    ),
    Flag(
        names=("--pairs",),
        help="judge the pairs of --expert-freq instead of the guesses in the trace",
    ),
    Flag(
        names=("--expert-bytes",),
        metavar="SIZE",
        parse=parse_size,
        help="size of one expert, to print the bytes that a token reads",
    ),
)


def profile(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs a text through a model and writes which experts it used."""
    out = output_path(args.out or DEFAULT_OUT, "--out")
    trace = None if args.trace is None else output_path(args.trace, "--trace")
    options = engine_options(args)
    text = read_text(args.file, "FILE")
    tokens = None if args.token_text is None else read_text(args.token_text, "--token-text")
    settings = edgedsv4.ProfileOptions(
        corpus="stdin" if args.file == "-" else Path(args.file).name,
        window=options.context or DEFAULT_WINDOW,
        trace=trace,
        token_text=tokens,
        pairs=args.pairs or 0,
    )
    with edgedsv4.Engine.open(args.model, options, on_progress=terminal.progress) as engine:
        frequency = edgedsv4.profile_experts(engine, text, settings, terminal.evaluated)
    edgedsv4.write_expert_frequency(out, frequency)
    if args.json:
        terminal.json(_profile_json(frequency, out, trace))
        return 0
    layers, experts = frequency.counts.shape
    terminal.line(f"{out}: {layers} x {experts} experts over {frequency.tokens:,} tokens")
    for share in (0.05, 0.1, 0.2, 0.5):
        covered = frequency.covered_by(share)
        terminal.line(
            f"the busiest {share:.0%} of the experts have {covered:.1%} of the selections"
        )
    if trace is not None:
        terminal.line(f"{trace}: experts of {frequency.tokens:,} tokens")
    return 0


def _profile_json(frequency: ExpertFrequency, out: Path, trace: Path | None) -> dict[str, object]:
    return {
        "out": str(out),
        "trace": None if trace is None else str(trace),
        "model_identity_sha256": frequency.identity_sha256,
        "tokens": frequency.tokens,
        "layers": frequency.counts.shape[0],
        "experts": frequency.counts.shape[1],
        "busiest": {
            str(share): round(frequency.covered_by(share), 6) for share in (0.05, 0.1, 0.2, 0.5)
        },
    }


def replay(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what cache policies would have done on a recorded trace."""
    trace = edgedsv4.read_route_trace(Path(args.trace))
    cases: tuple[Shares, ...] = args.resident or DEFAULT_RESIDENT
    if any(sum(case) > 1.0 for case in cases):
        raise ConfigError("--resident: the tiers hold more than 100 % of the experts together")
    frequency = _frequency(args.expert_freq, trace)
    given: dict[str, object] = {
        "prior": None if frequency is None else frequency.rates(),
        "may_refuse": not args.keep,
    }
    if args.pairs:
        if frequency is None or frequency.pairs is None:
            raise ConfigError("--pairs needs --expert-freq with a file of `profile --pairs`")
        given["pairs"] = frequency.pairs
    if args.prefill_chunk is not None:
        given["prefill_chunk"] = args.prefill_chunk
    rows: list[dict[str, object]] = []
    if not args.json:
        _print_heading(terminal, trace, args.expert_bytes)
    for case in cases:
        held = tuple(edgedsv4.slots_of_share(trace.shape, share) for share in case)
        for policy in args.policy or POLICIES:
            options = edgedsv4.ReplayOptions(slots=held, policy=policy, **given)  # type: ignore[arg-type]  # by name
            figures = edgedsv4.replay_routes(trace, options).to_json(args.expert_bytes)
            rows.append({"resident": list(case), "slots": list(held), "policy": policy, **figures})
            if not args.json:
                _print_row(terminal, rows[-1])
    if args.json:
        terminal.json({"trace": args.trace, "tokens": len(trace.ids), "replays": rows})
    return 0


def _frequency(path: str | None, trace: RouteTrace) -> ExpertFrequency | None:
    """The frequency file, which must belong to the model of the trace if that is known."""
    if path is None:
        return None
    frequency = edgedsv4.read_expert_frequency(Path(path))
    identity = trace.identity_sha256 or frequency.identity_sha256
    frequency.check_model(identity, trace.shape.layers, trace.shape.experts)
    return frequency


def _print_heading(terminal: Terminal, trace: RouteTrace, expert_bytes: int | None) -> None:
    shape = trace.shape
    terminal.line(
        f"{len(trace.ids):,} tokens, {shape.layers} layers of {shape.experts} experts,"
        f" {shape.experts_per_token} used; figures are of decoded tokens"
    )
    size = "" if expert_bytes is None else f"{'bytes/token':>16}"
    terminal.line(
        f"{'resident':12}{'slots':>12}  {'policy':8}{'hits':>8}{'by tier':>16}{'reads/token':>13}"
        f"{'moved up':>10}{'evictions':>11}{size}"
    )


def _print_row(terminal: Terminal, row: dict[str, Any]) -> None:
    resident = "+".join(f"{100 * share:g}%" for share in row["resident"])
    slots = "+".join(str(count) for count in row["slots"])
    tiers = " ".join(f"{rate:.1%}" for rate in row["hit_rate_by_tier"])
    size = f"{row['bytes_per_token']:>16,}" if "bytes_per_token" in row else ""
    terminal.line(
        f"{resident:12}{slots:>12}  {row['policy']:8}{row['hit_rate']:>8.1%}{tiers:>16}"
        f"{row['reads_per_token']:>13.2f}{row['moved_up_per_token']:>10.2f}"
        f"{row['evictions_per_token']:>11.2f}{size}"
    )
    if "guesses" in row:
        _print_guesses(terminal, row["guesses"])


def _print_guesses(terminal: Terminal, found: dict[str, Any]) -> None:
    shown = [most for most in SHOWN_GUESSES if most <= len(found["recall"])]
    parts = (
        f"top-{most} {found['recall'][most - 1]:.0%}"
        f" ({found['wasted_per_useful'][most - 1]:.2f} wasted per useful read)"
        for most in shown
    )
    terminal.line(f"{'':12}misses that were guessed: {', '.join(parts)}")

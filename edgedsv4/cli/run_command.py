"""`edgedsv4 run`: one prompt in, one reply out."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.cli.expectation import announced, tell_outcome
from edgedsv4.cli.flags import engine_options, prompt_options, sampling_options
from edgedsv4.cli.interrupt import cancel_on_interrupt
from edgedsv4.cli.replies import ReplyStream, reply_json, stats_json, stats_line
from edgedsv4.cli.sources import check_argument, read_text
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import SamplingOptions, Session, StepStats, Tokenizer
    from edgedsv4.cli.terminal import Terminal


def run(args: argparse.Namespace, terminal: Terminal) -> int:
    """Streams one reply to stdout, or prints it as JSON when it is complete."""
    sampling = sampling_options(args)
    options = engine_options(args)
    prompting = prompt_options(args)
    if args.raw and (args.system is not None or args.think is not None):
        raise ConfigError("--raw leaves out the chat template; drop --system and --think")
    text = prompt_text(args)
    show = _ignore if args.json else terminal.write
    with (
        edgedsv4.Engine.open(args.model, options, on_progress=terminal.progress) as engine,
        engine.new_session() as session,
    ):
        if shipped := edgedsv4.SHIPPED_MODELS.get(args.model):
            terminal.note(shipped.note)
        expected = announced(engine, terminal) if args.stats else None
        # Before the session works there is nothing to cancel: here Ctrl+C just leaves.
        prompt_ids = raw_ids(engine.tokenizer, text) if args.raw else []
        try:
            with cancel_on_interrupt(session.cancel):
                if args.raw:
                    report, stats = continue_text(
                        engine.tokenizer, session, prompt_ids, sampling, show
                    )
                    line = stats_line(stats)
                else:
                    stream = ReplyStream(show, _ignore if args.json else terminal.aside)
                    events = session.reply(
                        messages(args, text),
                        sampling,
                        prompt=prompting,
                        on_progress=terminal.evaluated,
                    )
                    done = stream.consume(events)
                    report, stats = reply_json(done), done.stats
                    line = stats_line(stats, done.report)
        finally:
            show("\n")
    if args.json:
        terminal.json(report)
    if args.stats:
        terminal.note(line)
    if expected is not None:
        tell_outcome(expected, stats, terminal)
    return 0


def prompt_text(args: argparse.Namespace) -> str:
    """The text of `-p`, `-f` or stdin; raises ConfigError unless exactly one is given."""
    given = [name for name in ("prompt", "file", "input") if getattr(args, name) is not None]
    if len(given) != 1:
        found = f"{len(given)} of them" if given else "none"
        raise ConfigError(f"expected one text, as -p TEXT, -f FILE or - for stdin; found {found}")
    if given == ["prompt"]:
        return check_argument(args.prompt, "-p")
    return read_text(args.file if given == ["file"] else "-", "file")


def messages(args: argparse.Namespace, text: str) -> list[edgedsv4.Message]:
    """The conversation of a single prompt, with the system message if one was given."""
    first = []
    if args.system is not None:
        first.append(edgedsv4.Message("system", check_argument(args.system, "--system")))
    return [*first, edgedsv4.Message("user", text)]


def raw_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Tokens of a text without the chat template, the opening one included."""
    start = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    prompt_ids = [*start, *tokenizer.encode(text)]
    if not prompt_ids:
        raise ConfigError("the prompt is empty; give at least one character")
    return prompt_ids


def continue_text(
    tokenizer: Tokenizer,
    session: Session,
    prompt_ids: list[int],
    sampling: SamplingOptions,
    show: Callable[[str], None],
) -> tuple[dict[str, object], StepStats]:
    """Continues a text without the chat template and returns the report and its figures."""
    before = session.totals.experts
    began = time.perf_counter()
    session.sync(prompt_ids)
    prefilled = time.perf_counter()
    decoder = tokenizer.stream()
    pieces: list[str] = []
    count = 0
    stop_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    for token_id in session.generate(sampling, stop_ids=stop_ids):
        count += 1
        pieces.append(decoder.push(token_id))
        show(pieces[-1])
    pieces.append(decoder.finish())
    show(pieces[-1])
    seconds, totals = time.perf_counter() - prefilled, session.totals
    stats = edgedsv4.StepStats(
        prompt_tokens=len(prompt_ids),
        generated_tokens=count,
        prefill_seconds=prefilled - began,
        decode_seconds=seconds,
        drafts=totals.drafts,
        experts=totals.experts.since(before) if totals.experts and before else None,
    )
    return {"text": "".join(pieces), "stats": stats_json(stats)}, stats


def _ignore(_text: str) -> None:
    """Shows nothing: with --json the reply is printed once, complete."""

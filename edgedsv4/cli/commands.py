"""The commands that exist, as one table: parser and documents are both made from it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

import edgedsv4
from edgedsv4.cli import (
    bench_command,
    convert_commands,
    expert_commands,
    machine_commands,
    model_commands,
    pack_commands,
    plan_command,
    repl,
    run_command,
    score_commands,
    text_commands,
)
from edgedsv4.cli.flags import (
    ENGINE_FLAGS,
    SAMPLING_FLAGS,
    SCORING_FLAGS,
    Flag,
    field_default,
    parse_think,
)
from edgedsv4.cli.terminal import Terminal, one_line

SUMMARY = "DeepSeek-V4 on one machine: open a model file, talk to it, look into it."


@dataclass(frozen=True, slots=True)
class Command:
    """One command: its words for the user, its arguments and the function that does it."""

    name: str
    """One word, or a group and a word."""
    help: str
    flags: tuple[Flag, ...]
    handler: Callable[[argparse.Namespace, Terminal], int]
    note: str = ""
    """A paragraph below the summary; empty when the summary says it all."""


MODEL = Flag(
    names=("MODEL",),
    help=(
        "a GGUF file (any part of a split one), an official checkpoint directory, an expert pack,"
        " or the name of a shipped model: pocket-v4, random-tiny"
    ),
)
JSON = Flag(names=("--json",), help="print one JSON document")
PROMPT = (
    Flag(names=("-p", "--prompt"), metavar="TEXT", help="the text"),
    Flag(names=("-f", "--file"), metavar="FILE", help="read the text from a file"),
    Flag(
        names=("input",),
        metavar="-",
        choices=("-",),
        optional=True,
        help="read the text from stdin",
    ),
)
THINK = Flag(
    names=("--think",),
    metavar="MODE",
    parse=parse_think,
    help="none, low, high (if left out), max or 1..100; which ones exist depends on the model",
)
SYSTEM = Flag(names=("--system",), metavar="TEXT", help="system message")
SPECIAL = Flag(names=("--special",), help="text of control tokens becomes those tokens")
TOKENS = Flag(
    names=("--tokens",), metavar="FILE", help="token ids, int32, little-endian", required=True
)
OUT = Flag(
    names=("--out",), metavar="FILE", help="file to write, float32 [T, V], .npy", required=True
)


def _flag(*fields: str) -> tuple[Flag, ...]:
    return tuple(flag for flag in ENGINE_FLAGS if flag.field in fields)


COMMANDS = (
    Command(
        "run",
        "one reply, streamed",
        (
            MODEL,
            *PROMPT,
            Flag(names=("--raw",), help="continue the text itself, without the chat template"),
            SYSTEM,
            THINK,
            Flag(
                names=("--stats",),
                help="print token counts, speed, drafts, reads of experts, and the speed predicted"
                " from `bench links`, to stderr",
            ),
            JSON,
            *SAMPLING_FLAGS,
            *ENGINE_FLAGS,
        ),
        run_command.run,
        "The reply goes to stdout, the model's thinking to stderr.",
    ),
    Command(
        "chat",
        "a conversation, line by line; works over a pipe",
        (
            Flag(names=("MODEL",), help=f"{MODEL.help}; pocket-v4 if left out", optional=True),
            SYSTEM,
            THINK,
            Flag(names=("--load",), metavar="FILE", help="go on with a saved conversation"),
            Flag(names=("--save",), metavar="FILE", help="save the conversation at the end"),
            *SAMPLING_FLAGS,
            *ENGINE_FLAGS,
        ),
        repl.run,
        "Type /help inside for the commands. Ctrl+C stops a reply, twice it leaves.",
    ),
    Command(
        "inspect",
        "what a model file holds; reads the header only",
        (MODEL, *_flag("dense_model"), JSON),
        model_commands.inspect,
    ),
    Command(
        "plan",
        "memory by item, the largest context that fits, where experts lie, and the speed expected",
        (
            MODEL,
            JSON,
            *plan_command.PLAN_FLAGS,
            *_flag("device", "context", "ram_bytes", "vram_bytes", "profile", "dtype"),
            *_flag("prefill_chunk", "draft", "draft_model", "dense_model", "cpu_experts"),
            *_flag("expert_place", "expert_ram_bytes", "io", "io_depth", "prefetch"),
        ),
        plan_command.plan,
        "Budgets may be those of another machine; its figures are given with --links. A card takes"
        " part if --vram is given or `bench links` measured one.",
    ),
    Command(
        "tokenize",
        "text to token ids, or back",
        (
            MODEL,
            *PROMPT,
            Flag(names=("--decode",), help="the input is token ids; print their text"),
            SPECIAL,
            JSON,
        ),
        text_commands.tokenize,
    ),
    Command(
        "render",
        "the exact prompt of a conversation",
        (
            MODEL,
            Flag(names=("CHAT",), help="JSON file with messages, - for stdin", metavar="CHAT.json"),
            THINK,
            JSON,
        ),
        text_commands.render,
        "Without --json the bytes of the prompt are printed as they are, with nothing added.",
    ),
    Command(
        "logits",
        "the logits of every position, for comparing engines",
        (
            MODEL,
            TOKENS,
            OUT,
            *SCORING_FLAGS,
        ),
        score_commands.logits,
        "--chunk 1 is pure decode. The file appears under its name only when it is complete.",
    ),
    Command(
        "perplexity",
        "how well a model predicts a text, and how far it is from another",
        (
            MODEL,
            Flag(names=("FILE",), help="UTF-8 text, - for stdin"),
            Flag(names=("--kld-save",), metavar="OUT", help="save the logits of every position"),
            Flag(names=("--kld-base",), metavar="SAVED", help="compare with logits saved before"),
            JSON,
            *SCORING_FLAGS,
        ),
        score_commands.perplexity,
        "The text is cut into windows of --ctx tokens (512 if not given); each starts anew.",
    ),
    Command(
        "profile",
        "which experts a model uses on a text, as a file that expert placement starts from",
        (
            MODEL,
            Flag(names=("FILE",), help="UTF-8 text, - for stdin"),
            JSON,
            *expert_commands.PROFILE_FLAGS,
        ),
        expert_commands.profile,
        "The text is cut into windows of --ctx tokens (512 if not given); each starts anew.",
    ),
    Command(
        "replay",
        "what cache policies would have done on a trace of `profile`",
        (
            Flag(names=("TRACE",), help="file of `profile --trace`"),
            JSON,
            *expert_commands.REPLAY_FLAGS,
        ),
        expert_commands.replay,
        "The policies: aged is what the program uses, lru, lfu counts without ageing, belady knows"
        " the future and is the bound.",
    ),
    Command(
        "bench",
        "prefill and decode in tokens per second, beside what the memory allows",
        (
            Flag(names=("MODEL",), help=f"{MODEL.help}; or links; or --synthetic", optional=True),
            JSON,
            *bench_command.BENCH_FLAGS,
        ),
        bench_command.bench,
        "A decoded token has to read its weights once; the share says how near to that it comes."
        " With --synthetic a network of random weights is made on a GPU, and no file is needed;"
        " exit status 1 when its figures cannot be true. `bench links` measures the machine"
        " instead: memory, experts on the CPU, a drive (--path), a card and its bus, three runs of"
        " each, the median. `edgedsv4 plan` uses the figures, which are kept with the facts of the"
        " machine in `$XDG_CACHE_HOME/edgedsv4/links.json`, without it in"
        " `~/.cache/edgedsv4/links.json`.",
    ),
    Command(
        "convert",
        "an official checkpoint, or any model, as GGUF, without loss where GGUF has a type for it",
        convert_commands.CONVERT_FLAGS,
        convert_commands.convert,
        "FP4 experts become MXFP4 exactly; llama.cpp reads the files too.",
    ),
    Command(
        "quantize",
        "a model with other storage types",
        convert_commands.QUANTIZE_FLAGS,
        convert_commands.quantize,
        "TYPE is Q8_0, Q6_K, Q4_K, Q2_K, MXFP4, BF16, F16 or F32; what is not named keeps its own.",
    ),
    Command(
        "pack build",
        "the routed experts of a model as an expert pack, for reading them from a disk",
        pack_commands.BUILD_FLAGS,
        pack_commands.build,
        "MXFP4 experts and FP4 ones of official checkpoints make a pack that SGLang reads too. A"
        " build that was ended in any way goes on with --resume.",
    ),
    Command(
        "pack verify",
        "an expert pack against all of its digests",
        pack_commands.VERIFY_FLAGS,
        pack_commands.verify,
        "Reads the pack and the file with the rest of the model; exit status 2 when they differ.",
    ),
    Command(
        "pack info",
        "what an expert pack holds, and what a token reads of it",
        pack_commands.INFO_FLAGS,
        pack_commands.info,
    ),
    Command(
        "selftest",
        "every kernel once against its reference, and the stored tokens of pocket-v4",
        (*_flag("device"), JSON),
        machine_commands.selftest,
        "The C kernels run with every instruction set of this machine; exit status 1 when a check"
        " failed.",
    ),
    Command(
        "devices",
        "what --device can name on this machine",
        (JSON,),
        machine_commands.devices,
    ),
)


def sentence(text: str) -> str:
    """The text with a capital letter and a full stop."""
    return f"{text[0].upper()}{text[1:]}."


class _Parser(argparse.ArgumentParser):
    """An argparse parser that tells of wrong use in one line."""

    def error(self, message: str) -> NoReturn:
        sys.stderr.write(f"{self.prog}: {one_line(message)}; see {self.prog} --help\n")
        raise SystemExit(2)


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; parsed arguments carry the function to call as `handler`."""
    parser = _Parser(prog="edgedsv4", description=SUMMARY, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"edgedsv4 {edgedsv4.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    groups = {"": subparsers}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group not in groups:
            groups[group] = _add_group(subparsers, group)
        sub = groups[group].add_parser(
            name,
            help=command.help,
            description=f"{sentence(command.help)} {command.note}".replace("%", "%%"),
            allow_abbrev=False,
        )
        for flag in command.flags:
            flag.add_to(sub, field_default(flag.field))
        sub.set_defaults(handler=command.handler)
    return parser


# What `add_subparsers` returns has no public name.
def _add_group(
    subparsers: argparse._SubParsersAction[_Parser], group: str
) -> argparse._SubParsersAction[_Parser]:
    """A word that other commands follow."""
    members = [
        command.name.split(" ")[1] for command in COMMANDS if command.name.startswith(f"{group} ")
    ]
    parser = subparsers.add_parser(group, help=", ".join(members), allow_abbrev=False)
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parses the arguments of one call; wrong use ends in SystemExit.

    argparse settles an optional positional together with the first one, so `-` behind a flag is
    left over; it is put in its place here.
    """
    parser = build_parser()
    args, rest = parser.parse_known_args(argv)
    if rest == ["-"] and getattr(args, "input", "-") is None:
        args.input = rest.pop()
    if rest:
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    return args

"""Command-line flags as data, so that parser, documents and option records cannot disagree.

A flag that sets an option names the field of `EngineOptions` or `SamplingOptions` it stands for. No
default is written here: a flag that was not given is not passed on, and the record's own default
holds.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, get_args

import edgedsv4
from edgedsv4.config import (
    Backend,
    CpuExperts,
    Dtype,
    EngineOptions,
    ExpertPlace,
    ExpertVerify,
    IoMode,
    Prefetch,
    Profile,
    SamplingOptions,
)
from edgedsv4.errors import ConfigError

if TYPE_CHECKING:
    from edgedsv4 import PromptOptions

logger = logging.getLogger(__name__)

_GUARD = "edgedsv4.formats.native._sigbus"
_SIZE_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flag:
    """One argument of a command."""

    names: tuple[str, ...]
    """`-p`, `--prompt`, or one name without dashes for a positional argument."""
    help: str
    """One line, without the default."""
    metavar: str | None = None
    """How the value is called in help; None for a switch."""
    parse: Callable[[str], object] | None = None
    """Text to value; raises ArgumentTypeError. None keeps the text."""
    choices: tuple[str, ...] | None = None
    """The only values accepted."""
    field: str | None = None
    """Field of the option record that this flag sets."""
    optional: bool = False
    """A positional argument that may be left out."""
    required: bool = False
    """A named argument that must be given."""
    repeat: bool = False
    """May be given more than once; the values add up to a list."""

    @property
    def is_positional(self) -> bool:
        """Whether the argument is known by its place and not by a name."""
        return not self.names[0].startswith("-")

    @property
    def destination(self) -> str:
        """Attribute of the parsed arguments that holds the value."""
        return self.field or self.names[-1].lstrip("-").replace("-", "_").lower()

    def add_to(self, parser: argparse.ArgumentParser, default: object = None) -> None:
        """Adds the argument to an argparse parser; `default` is only shown, never set."""
        shown = self.help if default is None else f"{self.help} (default {show_default(default)})"
        keywords: dict[str, object] = {"help": shown.replace("%", "%%")}
        if self.metavar is None and not self.is_positional:
            keywords["action"] = "store_true"
            keywords["default"] = None
        else:
            keywords["metavar"] = "|".join(self.choices) if self.choices else self.metavar
            keywords["type"] = self.parse
            keywords["choices"] = self.choices
            if self.repeat:
                keywords["action"] = "append"
        if self.is_positional:
            keywords["nargs"] = "?" if self.optional else None
            keywords["metavar"] = self.metavar or self.names[0]
            parser.add_argument(self.destination, **keywords)  # type: ignore[arg-type]  # by key
            return
        keywords["dest"] = self.destination
        keywords["required"] = self.required
        parser.add_argument(*self.names, **keywords)  # type: ignore[arg-type]  # built by key


def parse_size(text: str) -> int:
    """Reads a number of bytes: `123`, `64K`, `1.5G`, `32GiB`; units are powers of 1024."""
    body = text.strip().upper().removesuffix("IB").removesuffix("B")
    unit = body[-1:] if body[-1:] in _SIZE_UNITS else ""
    number = body.removesuffix(unit) if unit else body
    try:
        value = float(number)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and 0 <= value < 1 << 60):
        raise argparse.ArgumentTypeError(f"expected bytes such as 32G or 512M, found {text!r}")
    return int(value * 1024 ** _SIZE_UNITS[unit])


def parse_think(text: str) -> str | int:
    """Reads a thinking mode: a name, or an effort as a number."""
    if text in ("none", "low", "high", "max"):
        return text
    if text.isascii() and text.isdigit() and len(text) <= 3 and 1 <= int(text) <= 100:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected none, low, high, max or 1..100, found {text!r}")


def parse_bias(text: str) -> tuple[int, float]:
    """Reads `ID=V`: a token id and what is added to its logit; `-inf` bans it."""
    token_id, separator, value = text.partition("=")
    try:
        if separator and token_id.isascii():
            return int(token_id), float(value)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"expected ID=V such as 17=-inf, found {text!r}")


def parse_whole(text: str) -> int:
    """Reads a whole number in decimal digits."""
    if text.isascii() and text.removeprefix("-").isdigit() and len(text) <= 20:
        return int(text)
    raise argparse.ArgumentTypeError(f"expected a whole number, found {text[:40]!r}")


def parse_numbers(text: str) -> tuple[int, ...]:
    """Reads numbers of tokens: `0,4096,16384`."""
    parts = text.split(",")
    if not all(part.isascii() and part.isdigit() and len(part) <= 9 for part in parts):
        raise argparse.ArgumentTypeError(f"expected numbers such as 0,4096, found {text[:40]!r}")
    return tuple(int(part) for part in parts)


def parse_number(text: str) -> float:
    """Reads a number; the option record judges its range."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number, found {text[:40]!r}") from None


def _option(
    names: str,
    field: str,
    metavar: str | None,
    parse: Callable[[str], object] | None,
    text: str,
    choices: tuple[str, ...] | None = None,
) -> Flag:
    return Flag(
        names=tuple(names.split()),
        field=field,
        metavar=metavar,
        parse=parse,
        help=text,
        choices=choices,
    )


ENGINE_FLAGS = (
    _option("--device", "device", "NAME", None, "auto, cpu, cuda, cuda:1, rocm, xpu"),
    _option(
        "--ctx",
        "context",
        "N",
        parse_whole,
        "tokens one session can hold; if left out, what model and memory allow, at most 32,768",
    ),
    _option(
        "--threads",
        "threads",
        "N",
        parse_whole,
        "CPU threads; if left out, one per physical core, or one in all for a tiny model",
    ),
    _option("--pin-threads", "pin_threads", None, None, "each native thread keeps to one CPU"),
    _option(
        "--profile",
        "profile",
        "P",
        None,
        "exact rounds nothing, default stores FP8 rows and FP4 index keys and multiplies with int8",
        get_args(Profile),
    ),
    _option(
        "--backend",
        "backend",
        "B",
        None,
        "which implementation computes: PyTorch's operations (reference), C kernels for CPUs"
        " (native), Triton kernels for GPUs (triton), or the fastest that can run",
        get_args(Backend),
    ),
    _option("--dtype", "dtype", "T", None, "type the model computes in", get_args(Dtype)),
    _option(
        "--chunk",
        "prefill_chunk",
        "N",
        parse_whole,
        "tokens evaluated at once in prefill; 256 on a CPU, up to 4,096 on a GPU if left out",
    ),
    _option(
        "--ram",
        "ram_bytes",
        "SIZE",
        parse_size,
        "memory budget, such as 64G; if left out, what the machine has",
    ),
    _option(
        "--vram",
        "vram_bytes",
        "SIZE",
        parse_size,
        "memory budget on the device; if left out, what is free",
    ),
    _option(
        "--cpu-experts",
        "cpu_experts",
        "WHO",
        None,
        "routed experts of a model on a GPU that the CPU computes: on all, off none, auto the rest",
        get_args(CpuExperts),
    ),
    _option(
        "--expert-threads",
        "expert_threads",
        "N",
        parse_whole,
        "CPU threads for them; if left out, one per physical core",
    ),
    _option(
        "--expert-place",
        "expert_place",
        "P",
        None,
        "routed experts: mapped in the file, or stored in memory as far as they fit and else read",
        get_args(ExpertPlace),
    ),
    _option(
        "--expert-ram",
        "expert_ram_bytes",
        "SIZE",
        parse_size,
        "memory for stored experts; if left out, what the budget has left",
    ),
    _option(
        "--expert-freq",
        "expert_freq",
        "FILE",
        None,
        "frequency file of `edgedsv4 profile`: which experts to expect at first",
    ),
    _option(
        "--expert-verify",
        "expert_verify",
        "V",
        None,
        "stored experts to compare with their pack's checksums: none, one in a hundred, or all",
        get_args(ExpertVerify),
    ),
    _option("--io", "io", "M", None, "how stored experts are read", get_args(IoMode)),
    _option("--io-depth", "io_depth", "N", parse_whole, "reads of 1 MiB under way at a time"),
    _option(
        "--prefetch",
        "prefetch",
        "P",
        None,
        "which experts to read before they are needed: off none, hash those that are certain;"
        " while the drive is idle, pairs also those that --expert-freq lists as likely next,"
        " gate those that the next layer's router will probably choose",
        get_args(Prefetch),
    ),
    _option(
        "--checkpoint-ram",
        "checkpoint_bytes",
        "SIZE",
        parse_size,
        "memory one session may spend on turn checkpoints",
    ),
    _option(
        "--draft",
        "draft",
        "N",
        parse_whole,
        "tokens the MTP block drafts ahead of each step; the same text, faster or switched off",
    ),
    _option(
        "--draft-model",
        "draft_model",
        "FILE",
        None,
        "file with the MTP block, for a model without one inside",
    ),
    _option(
        "--dense",
        "dense_model",
        "FILE",
        None,
        "beside an expert pack, the file with the rest of the model; if left out, what the pack"
        " names",
    ),
    _option("--verify", "verify", None, None, "read every tensor at open and report broken scales"),
)
"""One flag per field of `EngineOptions`, except those of `CLI_ENGINE_CHOICES`."""

SCORING_FLAGS = tuple(flag for flag in ENGINE_FLAGS if flag.field not in ("draft", "draft_model"))
"""What commands that write no text take: nothing is sampled there."""

CLI_ENGINE_CHOICES = ("sigbus_guard",)
"""Fields without a flag: the command line owns the process, so it always guards its mappings."""

SAMPLING_FLAGS = (
    _option("--temp", "temperature", "X", parse_number, "temperature; 0 takes the likeliest token"),
    _option("--top-k", "top_k", "N", parse_whole, "keep the N likeliest tokens; 0 keeps all"),
    _option("--top-p", "top_p", "X", parse_number, "keep the likeliest tokens that reach X"),
    _option("--min-p", "min_p", "X", parse_number, "drop tokens below X of the likeliest one"),
    _option(
        "--repeat-penalty",
        "repetition_penalty",
        "X",
        parse_number,
        "weaken tokens seen before: divide positive logits by X, multiply negative ones",
    ),
    _option(
        "--presence-penalty",
        "presence_penalty",
        "X",
        parse_number,
        "subtract X from the logit of each token generated before",
    ),
    _option(
        "--frequency-penalty",
        "frequency_penalty",
        "X",
        parse_number,
        "subtract X from the logit of a token for each time it was generated",
    ),
    Flag(
        names=("--logit-bias",),
        field="logit_bias",
        metavar="ID=V",
        parse=parse_bias,
        help="add V to the logit of token ID, -inf bans it; may be repeated",
        repeat=True,
    ),
    _option(
        "--seed", "seed", "N", parse_whole, "the same seed gives the same text; if left out, drawn"
    ),
    _option(
        "-n --max-tokens",
        "max_tokens",
        "N",
        parse_whole,
        "tokens to generate at most; if left out, until the context is full",
    ),
)
"""One flag per field of `SamplingOptions`."""


def field_default(field: str | None) -> object:
    """The default of the option a flag sets; None when there is none to show."""
    for record in (EngineOptions, SamplingOptions):
        for candidate in dataclasses.fields(record):
            if candidate.name == field and candidate.default is not dataclasses.MISSING:
                return candidate.default
    return None


def show_default(value: object) -> str:
    """A default the way a user would type it."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and value >= 1 << 20 and value % (1 << 20) == 0:
        return f"{value >> 30}G" if value % (1 << 30) == 0 else f"{value >> 20}M"
    return str(value)


def _given(args: argparse.Namespace, flags: Iterable[Flag]) -> dict[str, object]:
    found = {flag.destination: getattr(args, flag.destination, None) for flag in flags}
    return {name: value for name, value in found.items() if value is not None}


def engine_options(args: argparse.Namespace) -> EngineOptions:
    """The engine options that were given; raises ConfigError when one is out of range."""
    given = _given(args, ENGINE_FLAGS)
    given["sigbus_guard"] = importlib.util.find_spec(_GUARD) is not None
    if not given["sigbus_guard"]:
        logger.warning(
            "the guard against shortened files is not built; `pip install -e .` builds it"
        )
    return EngineOptions(**given)  # type: ignore[arg-type]  # the fields were parsed by name


def sampling_options(args: argparse.Namespace) -> SamplingOptions:
    """The sampling options that were given; raises ConfigError when one is out of range."""
    given = _given(args, SAMPLING_FLAGS)
    pairs = given.pop("logit_bias", None)
    if isinstance(pairs, list):
        bias = dict(pairs)
        if len(bias) != len(pairs):
            raise ConfigError("logit_bias names a token twice; give each id once")
        given["logit_bias"] = bias
    return SamplingOptions(**given)  # type: ignore[arg-type]  # the fields were parsed by name


def prompt_options(args: argparse.Namespace) -> PromptOptions:
    """How the conversation is rendered; the model's variant judges the thinking mode."""
    think = getattr(args, "think", None)
    return edgedsv4.PromptOptions() if think is None else edgedsv4.PromptOptions(thinking=think)

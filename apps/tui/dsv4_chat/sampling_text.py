"""Sampling options as a person types them, and back: `/set` and the sampling panel.

The idea: keys, types and limits are those of `SamplingOptions`; a text is turned into a value here,
and whether the value will do is said by `SamplingOptions` itself.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from functools import cache
from itertools import pairwise
from typing import Final

from edgedsv4 import ConfigError, SamplingOptions

_NOTHING: Final = ("", "none", "auto")
"""Ways to type None."""

SAMPLING_KEYS: Final = tuple(field.name for field in dataclasses.fields(SamplingOptions))
"""Every option, in the order of the record."""


def option_text(sampling: SamplingOptions, key: str) -> str:
    """The value of an option as it would be typed; empty for None and for no bias."""
    value = getattr(sampling, key)
    if value is None:
        return ""
    if isinstance(value, dict):
        return ", ".join(f"{token_id}={_number(bias)}" for token_id, bias in value.items())
    return _number(value)


@cache
def option_help(key: str) -> str:
    """What an option does and its range: the text under its field in `SamplingOptions`."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(SamplingOptions)))
    texts: dict[str, str] = {}
    for field, text in pairwise(
        tree.body[0].body if isinstance(tree.body[0], ast.ClassDef) else ()
    ):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            texts[ast.unparse(field.target)] = " ".join(str(ast.literal_eval(text.value)).split())
    return texts[key]


def option_value(key: str, text: str) -> object:
    """The value that a text means for an option; its range is not checked here.

    Raises:
        ConfigError: no such option, or a text of another type.
    """
    text = text.strip()
    if key not in SAMPLING_KEYS:
        raise ConfigError(f"expected one of {', '.join(SAMPLING_KEYS)}, found {key!r}", name=key)
    if key == "logit_bias":
        return _bias(text)
    if key in ("seed", "max_tokens") and text.lower() in _NOTHING:
        return None
    if key in ("seed", "max_tokens", "top_k"):
        return _whole(key, text)
    try:
        return float(text)
    except ValueError:
        raise ConfigError(f"{key} must be a number, found {text!r}", name=key) from None


def with_option(sampling: SamplingOptions, key: str, text: str) -> SamplingOptions:
    """The options with one of them changed to what a text says.

    Raises:
        ConfigError: no such option, a text of another type, or a value out of its range.
    """
    changed = SamplingOptions(**{key: option_value(key, text)})  # type: ignore[arg-type]  # checked
    return dataclasses.replace(sampling, **{key: getattr(changed, key)})


def _number(value: float) -> str:
    """A number with as few digits as give it back; a whole one without an exponent."""
    if isinstance(value, int):
        return str(value)
    short = f"{value:g}"
    return short if float(short) == value else repr(value)


def _whole(key: str, text: str) -> int:
    try:
        return int(text.replace("_", "").replace(",", ""))
    except ValueError:
        raise ConfigError(f"{key} must be a whole number, found {text!r}", name=key) from None


def _bias(text: str) -> dict[int, float]:
    """Pairs as `id=bias`, separated by commas or blanks."""
    bias = {}
    for pair in text.replace(",", " ").split():
        token_id, _, value = pair.partition("=")
        try:
            bias[int(token_id)] = float(value)
        except ValueError:
            raise ConfigError(
                f"logit_bias must be pairs such as 42=-1.5, 7=-inf; found {pair!r}",
                name="logit_bias",
            ) from None
    return bias

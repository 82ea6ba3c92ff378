"""Thinking modes: what a requested effort means in each prompt variant.

Names and aliases are those of DeepSeek's `deepseek-recipe` 0.2.0; the prefix texts are part of what
the models were trained on and must not change by a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from edgedsv4.errors import ConfigError

Variant = Literal["v4", "v4-0731", "v4-vision", "v4.1"]
Effort = str | int | float

VARIANTS: tuple[str, ...] = get_args(Variant)

ABSOLUTE_MAXIMUM = (
    "Reasoning Effort: Absolute maximum with no shortcuts permitted.\n"
    "You MUST be very thorough in your thinking and comprehensively decompose the problem to"
    " resolve the root cause, rigorously stress-testing your logic against all potential paths,"
    " edge cases, and adversarial scenarios.\n"
    "Explicitly write out your entire deliberation process, documenting every intermediate step,"
    " considered alternative, and rejected hypothesis to ensure absolutely no assumption is left"
    " unchecked.\n\n"
)
BEYOND_MAXIMUM = (
    "Reasoning Effort: Beyond maximum — exhaustive, relentless, and uncompromising.\n"
    "You MUST reason with the utmost depth and rigor, leaving absolutely nothing to chance:"
    " exhaustively decompose the problem into its most fundamental components, trace every causal"
    " chain to its root, and resolve the underlying cause rather than any surface symptom.\n"
    "Do not stop reasoning until you have independently verified the solution from multiple angles"
    " and are certain that no assumption remains unchecked and no error remains undiscovered.\n\n"
)
_PREFIXES: dict[str, dict[str, str]] = {
    "v4": {"high": "", "max": ABSOLUTE_MAXIMUM},
    "v4-vision": {"high": "", "max": ABSOLUTE_MAXIMUM},
    "v4-0731": {"low": "", "high": ABSOLUTE_MAXIMUM, "max": BEYOND_MAXIMUM},
}
_ALIASES = {"minimal": "low", "medium": "high", "xhigh": "high", "ultra": "max"}
_V41_NAMES = {"low": 50, "high": 75, "max": 100}


@dataclass(frozen=True, slots=True)
class Thinking:
    """A resolved thinking mode."""

    is_on: bool
    prefix: str = ""
    """Text right after BOS (V4) or after the first system token (V4.1)."""


def resolve_effort(effort: Effort, variant: str) -> Thinking:
    """Turn a requested effort into the mode of one variant.

    Args:
        effort: `none`, `low`, `high`, `max` or an alias (`minimal`, `medium`, `xhigh`, `ultra`);
            for v4.1 also an integer 1..100 or a float 0..0.99 (a share of the full effort).
        variant: one of `VARIANTS`.

    Raises:
        ConfigError: an unknown variant, or a mode the variant lacks; the message lists its modes.
    """
    if variant not in VARIANTS:
        raise ConfigError(f"variant must be one of {', '.join(VARIANTS)}, found {variant!r}")
    if effort == "none":
        return Thinking(is_on=False)
    if variant == "v4.1":
        return Thinking(is_on=True, prefix=_effort_line(_v41_effort(effort)))
    prefixes = _PREFIXES[variant]
    name = _ALIASES.get(effort, effort) if isinstance(effort, str) else None
    if name not in prefixes:
        raise ConfigError(
            f"thinking must be one of none, {', '.join(prefixes)} for {variant}, found {effort!r}"
        )
    return Thinking(is_on=True, prefix=prefixes[name])


def _v41_effort(effort: Effort) -> int:
    if isinstance(effort, str):
        level = _V41_NAMES.get(_ALIASES.get(effort, effort), 0)
    elif isinstance(effort, bool):
        level = 0
    elif isinstance(effort, float):
        level = max(1, round(effort * 100)) if 0 <= effort <= 0.99 else 0
    else:
        level = effort
    if not 1 <= level <= 100:
        raise ConfigError(
            "thinking must be none, low, high, max, an integer 1..100 or a float 0..0.99 for v4.1,"
            f" found {effort!r}"
        )
    return level


def _effort_line(level: int) -> str:
    return (
        f"Reasoning Effort: {level} (range 1-100, the higher the value,"
        " the more thorough the reasoning)\n\n"
    )

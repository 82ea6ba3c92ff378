"""What changes over a training run: phases, sequence lengths, rates and loss weights.

Phases share the wall time; `progress` is the fraction of the whole run, whatever part of it this
process does. Rates that need a number of steps (warm-up, the router's) count steps.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from edgedsv4.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One phase of training."""

    name: str
    start: float
    """Progress at its start."""
    width: float
    """Share of the whole run's time."""
    length: int
    """S, tokens of a sequence."""
    long_length: int | None = None
    """S where the store has long rows."""
    batch_tokens: int
    """Tokens per optimizer step."""
    selection: Literal["dense", "sparse"]
    is_quantised: bool = False
    prompt_weight: float = 0.1
    """Loss weight of tokens that are no targets: the prompts' own language is learnt too."""

    def shape(self, is_long: bool = False) -> tuple[int, int]:
        """(sequences, S) of a step, from parts of the store with long rows or from the others."""
        length = self.long_length if is_long and self.long_length else self.length
        return max(1, self.batch_tokens // length), length


def _phases(lengths: tuple[int, int, int, int, int], batch_tokens: int) -> dict[str, Phase]:
    base, sparse, long, finish, finish_long = lengths
    return {
        "A": Phase(
            name="A",
            start=0.0,
            width=0.5,
            length=base,
            batch_tokens=batch_tokens,
            selection="dense",
        ),
        "B": Phase(
            name="B",
            start=0.5,
            width=0.25,
            length=sparse,
            batch_tokens=batch_tokens,
            selection="sparse",
        ),
        "C": Phase(
            name="C",
            start=0.75,
            width=0.12,
            length=long,
            batch_tokens=batch_tokens,
            selection="sparse",
        ),
        "D": Phase(
            name="D",
            start=0.87,
            width=0.13,
            length=finish,
            long_length=finish_long,
            batch_tokens=batch_tokens,
            selection="sparse",
            is_quantised=True,
        ),
    }


_GPU_PHASES: Final = _phases((1024, 4096, 16384, 2048, 16384), 65536)
_CPU_PHASES: Final = _phases((256, 512, 1024, 256, 1024), 1024)
PHASES: Final[Mapping[str, Mapping[str, Phase]]] = {
    "pocket-v4": _GPU_PHASES,
    "pocket-v4-e16": _GPU_PHASES,
    "ci-v4": _CPU_PHASES,
}


def phases_of(config_name: str, names: str) -> list[Phase]:
    """Phases by comma-separated names, in the order of the run.

    Raises:
        ConfigError: if there is none of a name.
    """
    known = PHASES[config_name]
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        raise ConfigError(f"phase must be some of {', '.join(known)}, found {names!r}")
    return [phase for name, phase in known.items() if name in wanted]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates and loss weights of one step."""

    learning: float
    selection_bias: float
    """u, change of a router's bias per step."""
    balance: float
    """Weight of the sequence balance loss."""
    draft: float
    """Weight of the MTP loss."""
    draft_steps: int
    """1, or 2 when the block is also fed with its own streams."""


@dataclass(frozen=True, kw_only=True)
class RateOptions:
    """Constants of the schedule."""

    peak: float = 2e-3
    """Learning rate after warm-up."""
    warmup_steps: int = 200
    """Counted from the start of the run, or of a resume without optimizer state."""
    decay_from: float = 0.75
    """Progress from which the rate falls linearly to 0."""
    early_steps: int = 500
    """Steps with the router's fast rates."""


def rates(options: RateOptions, *, step: int, warm_step: int, progress: float) -> Rates:
    """Rates of one step.

    Args:
        options: constants.
        step: optimizer steps since the start of the run.
        warm_step: optimizer steps since the optimizer's state was fresh.
        progress: 0..1, of the whole run.
    """
    warm = min(1.0, (warm_step + 1) / options.warmup_steps) if options.warmup_steps else 1.0
    left = 1.0
    if progress > options.decay_from:
        left = max(0.0, (1 - progress) / (1 - options.decay_from))
    is_early, is_last = step < options.early_steps, progress >= 0.9
    return Rates(
        learning=options.peak * warm * left,
        selection_bias=0.0 if is_last else (1e-2 if is_early else 1e-3),
        balance=1e-3 if is_early else 1e-4,
        draft=0.3 if progress < 2 / 3 else 0.1,
        draft_steps=2 if is_last else 1,
    )


class Clock:
    """How much of a phase is over: by wall time, or by steps where a run must be repeatable."""

    def __init__(self, *, seconds: float | None = None, steps: int | None = None) -> None:
        """Start.

        Args:
            seconds: until the phase ends, or
            steps: until the phase ends.
        """
        self._seconds, self._steps = seconds, steps
        self._begin = time.monotonic()

    def fraction(self, steps_done: int) -> float:
        """0..1, of the time since the clock was started, or of the steps."""
        if self._steps is not None:
            return min(1.0, steps_done / max(1, self._steps))
        if self._seconds is None or self._seconds <= 0:
            return 1.0
        return min(1.0, (time.monotonic() - self._begin) / self._seconds)

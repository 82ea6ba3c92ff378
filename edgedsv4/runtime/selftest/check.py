"""One check: what is computed, what is right, and how far apart the two may be."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import NumericError, ShapeError
from edgedsv4.runtime.device import place_weights
from edgedsv4.runtime.selftest.computing import Computing, computing_by

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation

LIMIT = 1e-5
"""Error of float32 results. Kernels stay below a fifth of it; one wrong element exceeds it."""

Outputs = Sequence[Tensor]


@dataclass(frozen=True, slots=True)
class Check:
    """Something that every way to compute has to get right."""

    name: str
    """What is checked."""
    compute: Callable[[Implementation], Outputs]
    """The results of one backend."""
    expected: Callable[[], Outputs]
    """The right results: floats in any type, all else exactly."""
    limit: float = LIMIT
    """Largest error that passes."""
    backends: Sequence[Implementation] = ("native", "reference")
    """What it is made for."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a check went."""

    has_passed: bool
    detail: str
    error: float | None


def judge(check: Check, way: Computing) -> Verdict:
    """Run a check in one way; whatever it raises is its verdict, except an interrupt."""
    try:
        with computing_by(way):
            error = largest_error(check.compute(way.backend), check.expected())
    except Exception as raised:  # noqa: BLE001  # the checks after it have to run
        text = " ".join(str(raised).split())
        return Verdict(False, f"{type(raised).__name__}: {text}", None)
    return Verdict(error <= check.limit, f"error {error:.3g}, limit {check.limit:.3g}", error)


def largest_error(got: Outputs, expected: Outputs) -> float:
    """The largest error of some results.

    Of floats it is ||got - ref||_2 / ||ref||_2 in float64 (where the reference is zero, the norm of
    what was got), of all else the number of elements that differ.

    Raises:
        ShapeError: results of another shape or kind.
        NumericError: NaN or infinity where there should be a number.
    """
    errors = [0.0]
    for place, (result, right) in enumerate(zip(got, expected, strict=True)):
        mine = result.cpu()
        is_float = right.is_floating_point()
        if mine.shape != right.shape or mine.is_floating_point() != is_float:
            raise ShapeError(
                f"result {place} is {mine.dtype} {list(mine.shape)}, expected {right.dtype}"
                f" {list(right.shape)}"
            )
        if not is_float:
            errors.append(float((mine.long() != right.long()).sum()))
            continue
        norm = float(torch.linalg.vector_norm(right.double()))
        distance = float(torch.linalg.vector_norm(mine.double() - right.double()))
        if not math.isfinite(distance):
            bad = int((~torch.isfinite(mine)).sum())
            raise NumericError(
                f"{bad:,} of {mine.numel():,} elements of result {place} are not finite"
            )
        errors.append(distance / norm if norm else distance)
    return max(errors)


def against_float64(
    name: str,
    device: torch.device,
    call: Callable[..., Outputs],
    inputs: tuple[Any, ...],
    backends: tuple[Implementation, ...] = ("native", "reference"),
) -> Check:
    """The check that a call gives what the reference gives for the same numbers in float64.

    Args:
        name: what is checked.
        device: where it computes.
        call: takes the inputs and `backend=`; tensors of floats decide the type it computes in.
        inputs: on the CPU.
        backends: what it is made for.
    """

    def compute(backend: Implementation) -> Outputs:
        return call(*place_weights(inputs, device), backend=backend)

    def expected() -> Outputs:
        return call(*(_doubled(value) for value in inputs), backend="reference")

    return Check(name, compute, cache(expected), backends=backends)


def _doubled(value: Any) -> Any:
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def draw(seed: int, *shape: int) -> Tensor:
    """Normal numbers, float32; the same seed gives the same ones."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

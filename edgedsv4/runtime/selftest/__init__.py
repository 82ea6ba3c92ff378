"""Does this machine compute what it should: every kernel against its reference, then a model.

Everything that can run an operation here, the C kernels with each instruction set of the machine or
the Triton kernels on a GPU, computes it once with a small odd shape and is compared with the
reference in float64. Then the shipped model has to decode the token ids that are stored beside it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from edgedsv4.errors import BusyError
from edgedsv4.kernels.native.library import WHY_NOT
from edgedsv4.runtime.device import resolve_device
from edgedsv4.runtime.selftest.check import judge
from edgedsv4.runtime.selftest.computing import ways_to_compute
from edgedsv4.runtime.selftest.gpu import gpu_checks, gpu_obstacle
from edgedsv4.runtime.selftest.matrices import matrix_checks
from edgedsv4.runtime.selftest.native_only import native_checks
from edgedsv4.runtime.selftest.operations import operation_checks
from edgedsv4.runtime.selftest.sampling import sampling_checks
from edgedsv4.runtime.selftest.shipped import model_checks
from edgedsv4.runtime.single_user import SingleUser, Use

logger = logging.getLogger(__name__)

_TESTING = SingleUser()


@dataclass(frozen=True, slots=True)
class SelfTestResult:
    """What one check found."""

    name: str
    """What was checked and, in brackets, what computed it: `rms_norm (avx2)`."""
    has_passed: bool
    """Whether the error is within the limit."""
    detail: str
    """One line: the error and its limit, or what went wrong."""
    index: int
    """Place among the results, from 0."""
    total: int
    """How many results there will be."""
    seconds: float
    """Time that the check took."""
    error: float | None
    """||got - ref|| / ||ref||, or the number of wrong elements where they have to be equal; None
    where none could be told: something raised, or gave NaN."""
    limit: float
    """Largest error that passes."""


def run_selftest(device: str = "auto") -> Iterator[SelfTestResult]:
    """Check every kernel of a device, and the shipped model; takes a few seconds on a CPU.

    On a GPU it takes some minutes the first time, while Triton compiles what has to be checked.

    The C kernels are switched to each instruction set in turn, and torch to its own settings, for
    the whole process: no session should work meanwhile. Between results all is as it was before.

    Args:
        device: as `EngineOptions.device`.

    Returns:
        The results, each as soon as it is there. A check that fails or raises is a result like any
        other, and the ones after it still run. Ctrl+C ends the iterator as usual.

    Raises:
        BackendUnavailableError: a device that this machine or this torch does not have.
        BusyError: another self test of this process has not ended.
    """
    place, use = resolve_device(device), Use()
    if not _TESTING.take(use):
        raise BusyError("another self test is running in this process; wait until it has ended")
    obstacle = WHY_NOT if place.type == "cpu" else gpu_obstacle(place)
    if obstacle:
        logger.warning("the references alone are checked: %s", obstacle)
    return _run(place, use)


def _run(device: torch.device, use: Use) -> Iterator[SelfTestResult]:
    try:
        checks = (
            *operation_checks(device),
            *matrix_checks(device),
            *native_checks(),
            *sampling_checks(),
            *gpu_checks(device),
            *model_checks(device),
        )
        ways = ways_to_compute(device)
        runs = [(check, way) for check in checks for way in ways if way.backend in check.backends]
        for index, (check, way) in enumerate(runs):
            start = time.perf_counter()
            verdict = judge(check, way)
            yield SelfTestResult(
                name=f"{check.name} ({way.name})",
                has_passed=verdict.has_passed,
                detail=verdict.detail,
                index=index,
                total=len(runs),
                seconds=time.perf_counter() - start,
                error=verdict.error,
                limit=check.limit,
            )
    finally:
        _TESTING.give_back(use)

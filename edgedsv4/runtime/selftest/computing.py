"""What can compute on a device: C kernels with each instruction set, Triton's, the references."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgedsv4.kernels.native.library import (
    HAVE_NATIVE,
    InstructionSet,
    instruction_sets,
    using_instruction_set,
)
from edgedsv4.runtime.gpu_devices import gpu_of

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation


@dataclass(frozen=True, slots=True)
class Computing:
    """One way to compute on a device."""

    backend: Implementation
    """What to ask operations for."""
    instructions: InstructionSet | None = None
    """What the C kernels use; None for everything else."""

    @property
    def name(self) -> str:
        """For the user."""
        return self.backend if self.instructions is None else f"native {self.instructions.name}"


def ways_to_compute(device: torch.device) -> tuple[Computing, ...]:
    """Everything that computes on a device, the references last."""
    reference = Computing("reference")
    if device.type != "cpu":
        return (reference,) if gpu_of(device).obstacle else (Computing("triton"), reference)
    if not HAVE_NATIVE:
        return (reference,)
    return *(Computing("native", found) for found in instruction_sets()), reference


@contextmanager
def computing_by(way: Computing) -> Iterator[None]:
    """In the block, the C kernels use the instructions of `way`, and new memory holds NaN for them.

    Without the NaN, an element that a kernel forgets could hold what another kernel left there.
    Afterwards everything is as it was, torch's number of threads too.
    """
    threads, mode = torch.get_num_threads(), torch.get_deterministic_debug_mode()
    try:
        if way.instructions is None:
            yield
            return
        # In this mode torch fills what `empty` returns. `use_deterministic_algorithms` sets it too,
        # but loads torch's compiler first, which takes longer than all checks of operations.
        torch.set_deterministic_debug_mode("warn")
        with using_instruction_set(way.instructions):
            yield
    finally:
        torch.set_deterministic_debug_mode(mode)
        torch.set_num_threads(threads)

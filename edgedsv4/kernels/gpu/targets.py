"""What GPUs can run these kernels, and how much shared memory a program may use there.

A family is the name under which kernels keep their tile sizes: `sm_90` for an NVIDIA compute
capability, `gfx942` for an AMD architecture, `xpu` for Intel. The tests compile every launch for
the families listed here and hold it to the limit.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1 << 10


@dataclass(frozen=True, slots=True)
class GpuTarget:
    """One family."""

    backend: str
    """Triton's name of the compiler: `cuda` or `hip`."""
    arch: int | str
    """Triton's name of the architecture."""
    warp_size: int
    shared_bytes: int
    """Shared memory (LDS) that one program may use."""


TARGETS: Mapping[str, GpuTarget] = {
    "sm_89": GpuTarget("cuda", 89, 32, 99 * KIB),
    "sm_90": GpuTarget("cuda", 90, 32, 227 * KIB),
    "sm_120": GpuTarget("cuda", 120, 32, 99 * KIB),
    "sm_121": GpuTarget("cuda", 121, 32, 99 * KIB),
    "gfx942": GpuTarget("hip", "gfx942", 64, 64 * KIB),
    "gfx1151": GpuTarget("hip", "gfx1151", 32, 64 * KIB),
    "gfx1201": GpuTarget("hip", "gfx1201", 32, 64 * KIB),
}
"""Families that every kernel is compiled for before a release."""

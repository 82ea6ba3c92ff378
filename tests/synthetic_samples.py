"""Readings of a random network that nobody measured."""

from __future__ import annotations

from typing import Any

from edgedsv4.runtime.synthetic_report import (
    KernelTime,
    SyntheticReading,
    SyntheticReport,
    Work,
)
from edgedsv4.runtime.synthetic_traffic import Traffic


def reading(work: Work, **changes: Any) -> SyntheticReading:
    """A reading with some fields of its own."""
    fields: dict[str, Any] = {"depth": 0, "tokens": 2, "seconds": (1.0, 1.0)}
    return SyntheticReading(work=work, **{**fields, **changes})


def report(**changes: Any) -> SyntheticReport:
    """A decode with kernels and a prefill without; some fields can be replaced."""
    kernels = (
        KernelTime(name="_matvec_kernel", launches=7, seconds=0.6, traffic=Traffic(60, 0, 6)),
        KernelTime(name="_new_kernel", launches=1, seconds=0.2),
    )
    decode = reading(
        "decode",
        depth=16_384,
        bytes_per_token=500,
        kernels=kernels,
        busy_seconds=0.7,
        unseen={"_old_kernel": Traffic(weights=2_000_000)},
    )
    fields: dict[str, Any] = {
        "model": {
            "name": "flash",
            "layers": 43,
            "experts": "q2",
            "expert_types": ["IQ2_XXS", "Q2_K"],
        },
        "device": {"name": "cuda:0", "description": "NVIDIA H200", "family": "sm_90"},
        "versions": {"edgedsv4": "0.1", "python": "3.12.1", "torch": "2.11.0", "triton": "3.6.0"},
        "weight_bytes": 86_620_000_000,
        "operations_per_token": 25_000_000_000,
        "build_seconds": 0.3,
        "read_rate": 1000.0,
        "read_bytes": 4 << 30,
        "first_token_seconds": 12.5,
        "capture_seconds": 0.75,
        "readings": (decode, reading("prefill", tokens=512, seconds=(0.5, 0.25, 0.75))),
    }
    return SyntheticReport(**{**fields, **changes})

"""Checks of every Triton kernel, on a card that they run on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgedsv4.runtime.gpu_devices import gpu_of
from edgedsv4.runtime.selftest.gpu_products import product_checks, scaled_checks
from edgedsv4.runtime.selftest.gpu_rows import row_checks
from edgedsv4.runtime.selftest.gpu_steps import step_checks

if TYPE_CHECKING:
    import torch

    from edgedsv4.runtime.selftest.check import Check


def gpu_checks(device: torch.device) -> Iterator[Check]:
    """None for a CPU."""
    if device.type != "cpu":
        family = gpu_of(device).family
        yield from product_checks(device, family)
        yield from scaled_checks(device, family)
        yield from row_checks(device, family)
        yield from step_checks(device)


def gpu_obstacle(device: torch.device) -> str | None:
    """Why no Triton kernel can run on a device; None where they can, and for a CPU."""
    return None if device.type == "cpu" else gpu_of(device).obstacle

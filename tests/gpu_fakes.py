"""GPUs that are not there, as torch would describe them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgedsv4.runtime import gpu_devices

GIB = 1 << 30


def nvidia_card(major: int = 9, minor: int = 0, **changes: Any) -> SimpleNamespace:
    """Properties of an NVIDIA card."""
    card = {
        "name": "Card",
        "major": major,
        "minor": minor,
        "total_memory": 80 * GIB,
        "multi_processor_count": 132,
        "warp_size": 32,
        "shared_memory_per_block": 48 << 10,
        "shared_memory_per_block_optin": 227 << 10,
    }
    return SimpleNamespace(**{**card, **changes})


def amd_card(architecture: str = "gfx942:sramecc+:xnack-") -> SimpleNamespace:
    """Properties of an AMD card; its capability means something else than NVIDIA's."""
    return SimpleNamespace(
        name="Instinct",
        major=9,
        minor=4,
        gcnArchName=architecture,
        total_memory=192 * GIB,
        multi_processor_count=304,
        warp_size=64,
        shared_memory_per_block=64 << 10,
    )


def intel_card() -> SimpleNamespace:
    """Properties of an Intel card."""
    return SimpleNamespace(
        name="Arc",
        total_memory=16 * GIB,
        max_compute_units=256,
        sub_group_sizes=[16, 32],
        local_mem_size=128 << 10,
    )


class Machine:
    """What torch says of the cards of a machine; every figure can be changed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.free = 70 * GIB
        self.reserved = 0
        self.allocated = 0
        self.released = 0
        monkeypatch.setattr(gpu_devices, "HAVE_TRITON", True)
        self.cuda()
        self.xpu()

    def cuda(self, *cards: SimpleNamespace, hip: str | None = None) -> None:
        """A torch for NVIDIA cards, or with a version of HIP for AMD's."""
        self._patch.setattr(torch.version, "hip", hip)
        self._cards(torch.cuda, cards)

    def xpu(self, *cards: SimpleNamespace) -> None:
        """A torch for Intel cards."""
        self._cards(torch.xpu, cards)

    def _cards(self, module: Any, cards: tuple[SimpleNamespace, ...]) -> None:
        def release() -> None:
            self.released += 1

        replaced = {
            "device_count": lambda: len(cards),
            "get_device_properties": lambda device: cards[torch.device(device).index],
            "mem_get_info": lambda _device: (self.free, 80 * GIB),
            "memory_reserved": lambda _device: self.reserved,
            "memory_allocated": lambda _device: self.allocated,
            "empty_cache": release,
        }
        for name, value in replaced.items():
            self._patch.setattr(module, name, value)

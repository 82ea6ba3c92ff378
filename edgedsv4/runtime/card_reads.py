"""The rate at which a card reads its own memory, by a kernel that does nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from edgedsv4.kernels.gpu import stream

_READS = 7


def read_rate(device: torch.device, nbytes: int, reads: int = _READS) -> float:
    """Bytes per second of the best of several reads of a tensor.

    Args:
        device: whose memory is read.
        nbytes: size of the tensor, whole blocks of `stream.BLOCK` words.
        reads: how often.
    """
    words = torch.empty(nbytes // 4, dtype=torch.int32, device=device)
    words.random_()
    out = torch.zeros(1, dtype=torch.int32, device=device)
    times = [_seconds(partial(stream.read_all, out, words), device) for _ in range(reads)]
    return nbytes / min(times)


def _seconds(launch: Callable[[], object], device: torch.device) -> float:
    """Time of a launch on the device."""
    if device.type == "cpu":
        began = time.perf_counter()
        launch()
        return time.perf_counter() - began
    events: Any = torch.xpu if device.type == "xpu" else torch.cuda
    first, last = events.Event(enable_timing=True), events.Event(enable_timing=True)
    first.record()
    launch()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / 1e3

"""Which kernels some steps ran on a device, and for how long, as torch's profiler sees them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch

from edgedsv4.runtime.synthetic_report import KernelTime, merged


def profiled(
    run: Callable[[], object], steps: int, device: torch.device
) -> tuple[tuple[KernelTime, ...], float]:
    """Kernels of some steps by the time they take on the device, and its busy seconds, per step.

    None and 0 on the CPU.
    """
    if device.type == "cpu":
        return (), 0.0
    kinds = torch.profiler.ProfilerActivity
    activity = kinds.XPU if device.type == "xpu" else kinds.CUDA
    with torch.profiler.profile(activities=[activity], acc_events=True) as profiler:
        run()
    kernels = merged(kernel_times(profiler.key_averages(), steps))
    return kernels, busy_seconds(profiler.events() or (), steps)


def busy_seconds(events: Iterable[Any], steps: int) -> float:
    """Seconds of a step in which at least one kernel was on the device.

    A kernel that begins while the one before ends, and waits for its results, is on the device
    beside it, so the kernels' own times add up to more.
    """
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in events
        if event.self_device_time_total
    )
    busy, until = 0.0, -math.inf
    for start, end in spans:
        busy += max(0.0, end - max(start, until))
        until = max(until, end)
    return busy / 1e6 / steps


def kernel_times(events: Iterable[Any], steps: int) -> list[KernelTime]:
    """What a profiler saw on the device, per step."""
    return [
        KernelTime(
            name=event.key,
            launches=round(event.count / steps),
            seconds=event.self_device_time_total / 1e6 / steps,
        )
        for event in events
        if event.self_device_time_total
    ]

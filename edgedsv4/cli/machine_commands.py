"""`edgedsv4 selftest` and `devices`: whether this machine computes right, and what it has."""

from __future__ import annotations

import argparse
import dataclasses
import time
from typing import TYPE_CHECKING

import edgedsv4
from edgedsv4.config import EngineOptions

if TYPE_CHECKING:
    from edgedsv4 import DeviceInfo, SelfTestResult
    from edgedsv4.cli.terminal import Terminal

FAILED = 1


def selftest(args: argparse.Namespace, terminal: Terminal) -> int:
    """Runs every check, a line each as it ends; exit status 1 when one failed."""
    given = {} if args.device is None else {"device": args.device}
    device = EngineOptions(**given).device
    results: list[SelfTestResult] = []
    start = time.perf_counter()
    for result in edgedsv4.run_selftest(device):
        if not args.json:
            _print_result(result, terminal)
        results.append(result)
        terminal.progress("self test", len(results), result.total)
    failed = [result for result in results if not result.has_passed]
    if args.json:
        terminal.json(
            {
                "device": device,
                "has_passed": not failed,
                "results": [dataclasses.asdict(result) for result in results],
            }
        )
    else:
        terminal.line()
        _print_summary(failed, len(results), time.perf_counter() - start, terminal)
    return FAILED if failed else 0


def _print_result(result: SelfTestResult, terminal: Terminal) -> None:
    if result.index == 0:
        terminal.line(f"{'check':64}{'result':>8}{'error':>10}{'limit':>10}{'seconds':>9}")
    verdict = "ok" if result.has_passed else "FAILED"
    error = "-" if result.error is None else f"{result.error:.2g}"
    terminal.line(
        f"{result.name:64}{verdict:>8}{error:>10}{result.limit:>10.2g}{result.seconds:>9.3f}"
    )


def _print_summary(
    failed: list[SelfTestResult], total: int, seconds: float, terminal: Terminal
) -> None:
    for result in failed:
        terminal.line(f"FAILED {result.name}: {result.detail}")
    passed = total - len(failed)
    terminal.line(f"{passed} of {total} checks passed in {seconds:.1f} seconds")


def devices(args: argparse.Namespace, terminal: Terminal) -> int:
    """Prints what `--device` can name."""
    found = edgedsv4.devices()
    if args.json:
        terminal.json([dataclasses.asdict(device) for device in found])
        return 0
    for device in found:
        terminal.line(_device_line(device))
    return 0


def _device_line(device: DeviceInfo) -> str:
    parts = [device.description, f"{device.memory_bytes / (1 << 30):.1f} GiB"]
    if device.instruction_set is not None:
        parts.append(device.instruction_set)
    if device.threads is not None:
        parts.append("1 thread" if device.threads == 1 else f"{device.threads} threads")
    if device.family is not None:
        parts.append(device.family)
    if device.obstacle is not None:
        parts.append(f"no kernels: {device.obstacle}")
    if device.is_default:
        parts.append("the default")
    return f"{device.name:10}{', '.join(parts)}"

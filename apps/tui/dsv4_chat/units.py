"""Quantities as a person reads them: bytes, rates and durations, each in a few columns."""

from __future__ import annotations

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """Bytes with the unit that leaves one to four digits: `512 B`, `1.9 MiB`, `284 GiB`."""
    value = float(count)
    for unit in _STEPS:
        if abs(value) < 1024 or unit == _STEPS[-1]:
            break
        value /= 1024
    digits = 1 if unit != "B" and abs(value) < 100 else 0
    return f"{value:.{digits}f} {unit}"


def speed_text(bytes_per_second: float) -> str:
    """A rate in GB/s, powers of ten as memory and disks are sold."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def seconds_text(seconds: float) -> str:
    """A duration: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

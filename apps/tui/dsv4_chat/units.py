"""Quantities as a person reads them: bytes, rates and durations, each in a few columns."""

from __future__ import annotations

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def bytes_text(count: float) -> str:
    """Bytes with the unit that leaves one to four digits: `512 B`, `1.9 MiB`, `284 GiB`."""
    value, step = float(count), 0
    # Compared as it will be shown, so that nothing reads `1024 KiB`.
    while round(abs(value)) >= 1024 and step < len(_STEPS) - 1:
        value, step = value / 1024, step + 1
    digits = 1 if step and round(abs(value), 1) < 100 else 0
    return f"{value:.{digits}f} {_STEPS[step]}"


def speed_text(bytes_per_second: float) -> str:
    """A rate in GB/s, powers of ten as memory and disks are sold."""
    return f"{bytes_per_second / 1e9:.2f} GB/s"


def seconds_text(seconds: float) -> str:
    """A duration: `0.4 s`, `12 s`, `3 min 05 s`, `2 h 10 min`."""
    if round(seconds, 1) < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

"""What this machine offers the process: cores and memory, with the limits of its control group.

Containers see the whole machine in `/proc` but may use a part of it, so the smaller figure counts.
Functions take the root of the file system, which lets tests describe another machine.
"""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path

ROOT = Path("/")
UNLIMITED_V1 = 1 << 60
_ADAPTER_CLASSES = ("0x03", "0x12")  # PCI: display controller, processing accelerator


def physical_cores(root: Path = ROOT, usable: set[int] | None = None) -> int:
    """Physical cores this process may use, at least 1; hyperthreads of one core count once.

    Args:
        root: file system root with `sys/devices/system/cpu` and `sys/fs/cgroup`.
        usable: logical CPUs; None takes the affinity of this process.
    """
    if usable is None:
        usable = _usable_cpus()
    cores = {_core_of(root, cpu) for cpu in usable}
    return max(1, min(len(cores), math.ceil(_cpu_quota(root))))


def available_ram_bytes(root: Path = ROOT) -> int:
    """Bytes this process can still use without swapping; droppable page cache counts as free."""
    limits = [_meminfo(root, "MemAvailable"), *_control_group_free(root)]
    known = [value for value in limits if value is not None]
    return max(0, min(known)) if known else _sysconf_memory()


def total_ram_bytes(root: Path = ROOT) -> int:
    """Bytes the machine has, or the smallest limit of this process's control groups."""
    folders = _control_groups(root, "memory")
    limits = [_first(folder, "memory.max", "memory.limit_in_bytes") for folder in folders]
    known = [value for value in (_meminfo(root, "MemTotal"), *limits) if value is not None]
    return min(known) if known else _sysconf_memory()


def processor_name(root: Path = ROOT) -> str:
    """What the processor calls itself, or the name of its architecture."""
    info = _read(root / "proc/cpuinfo") or ""
    found = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def display_adapters(root: Path = ROOT) -> tuple[str, ...]:
    """Display adapters and accelerators on the bus, as `vendor:device`, sorted."""
    found = []
    for folder in sorted((root / "sys/bus/pci/devices").glob("*")):
        kind = _read(folder / "class") or ""
        if kind[:4] in _ADAPTER_CLASSES:
            names = (_read(folder / name) or "" for name in ("vendor", "device"))
            found.append(":".join(name.removeprefix("0x") for name in names))
    return tuple(sorted(found))


def _usable_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return set(os.sched_getaffinity(0))
    return set(range(os.cpu_count() or 1))


def _core_of(root: Path, cpu: int) -> tuple[str, str]:
    topology = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
    package, core = (_read(topology / name) for name in ("physical_package_id", "core_id"))
    if package is None or core is None:
        return "cpu", str(cpu)
    return package, core


def _cpu_quota(root: Path) -> float:
    """CPUs that the control groups grant, inf without a limit."""
    quotas = []
    for folder in _control_groups(root, "cpu"):
        words = (_read(folder / "cpu.max") or "").split()
        if not words:
            words = [_read(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        quota, period = (_number(word) for word in (*words, "", "")[:2])
        if quota is not None and period is not None and quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=float(1 << 20))


def _meminfo(root: Path, name: str) -> int | None:
    for line in (_read(root / "proc/meminfo") or "").splitlines():
        words = line.split()
        if len(words) >= 2 and words[0] == f"{name}:":
            kib = _number(words[1])
            return None if kib is None else kib * 1024
    return None


def _control_group_free(root: Path) -> list[int]:
    """What each enclosing control group still grants; its clean file pages count as free."""
    free = []
    for folder in _control_groups(root, "memory"):
        limit, used = _first(folder, "memory.max", "memory.limit_in_bytes"), None
        if limit is not None and limit < UNLIMITED_V1:
            used = _first(folder, "memory.current", "memory.usage_in_bytes")
        if limit is not None and used is not None:
            free.append(limit - used + _inactive_file(folder))
    return free


def _inactive_file(folder: Path) -> int:
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            return _number(value) or 0
    return 0


def _control_groups(root: Path, controller: str) -> list[Path]:
    """Folders of this process's control group and its parents, version 2 and version 1."""
    folders: list[Path] = []
    for line in (_read(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        inner = mount / path.lstrip("/")
        parents = [inner, *inner.parents]
        # Inside a container the path may name a folder that only the host sees; the mount counts.
        folders += [p for p in parents if p == mount or mount in p.parents]
    return folders


def _first(folder: Path, *names: str) -> int | None:
    return next(
        (v for name in names if (v := _number(_read(folder / name) or "")) is not None), None
    )


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,20}", text) else None


def _read(path: Path) -> str | None:
    # A file that is absent or unreadable means that this source says nothing.
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None


def _sysconf_memory() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

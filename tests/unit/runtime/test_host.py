"""Cores and memory read from described machines."""

from __future__ import annotations

import os
from pathlib import Path

from edgedsv4.runtime.host import (
    available_ram_bytes,
    display_adapters,
    physical_cores,
    processor_name,
    total_ram_bytes,
)

MIB = 1 << 20


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def topology(cores: dict[int, tuple[int, int]]) -> dict[str, str]:
    files = {}
    for cpu, (package, core) in cores.items():
        folder = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{folder}/physical_package_id"] = str(package)
        files[f"{folder}/core_id"] = str(core)
    return files


def test_hyperthreads_of_one_core_count_once(tmp_path: Path) -> None:
    root = machine(tmp_path, topology({0: (0, 0), 1: (0, 0), 2: (0, 1), 3: (0, 1)}))
    assert physical_cores(root, {0, 1, 2, 3}) == 2


def test_equal_core_ids_of_two_packages_are_two_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, topology({0: (0, 0), 1: (1, 0)}))
    assert physical_cores(root, {0, 1}) == 2


def test_affinity_limits_cores(tmp_path: Path) -> None:
    root = machine(tmp_path, topology({0: (0, 0), 1: (0, 1), 2: (0, 2)}))
    assert physical_cores(root, {2}) == 1


def test_unknown_topology_counts_logical_cpus(tmp_path: Path) -> None:
    assert physical_cores(tmp_path, {0, 1, 2}) == 3


def test_cpu_quota_of_a_parent_group_limits_cores(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/cpu.max": "150000 100000",
        "sys/fs/cgroup/outer/inner/cpu.max": "max 100000",
    }
    assert physical_cores(machine(tmp_path, files), set(range(8))) == 2


def test_cpu_quota_of_version_one_limits_cores(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu,cpuacct:/box",
        "sys/fs/cgroup/cpu/box/cpu.cfs_quota_us": "300000",
        "sys/fs/cgroup/cpu/box/cpu.cfs_period_us": "100000",
    }
    assert physical_cores(machine(tmp_path, files), set(range(8))) == 3


def test_unlimited_quota_changes_nothing(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "3:cpu:/",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
    }
    assert physical_cores(machine(tmp_path, files), set(range(8))) == 8


def test_meminfo_gives_available_memory(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 4096 kB\nMemFree: 1 kB\nMemAvailable:  2048 kB"}
    assert available_ram_bytes(machine(tmp_path, files)) == 2 * MIB


def test_control_group_limit_beats_meminfo(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1048576 kB",
        "proc/self/cgroup": "0::/box",
        "sys/fs/cgroup/box/memory.max": str(100 * MIB),
        "sys/fs/cgroup/box/memory.current": str(70 * MIB),
        "sys/fs/cgroup/box/memory.stat": f"anon 5\ninactive_file {20 * MIB}",
    }
    assert available_ram_bytes(machine(tmp_path, files)) == 50 * MIB


def test_control_group_of_version_one_is_read(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1048576 kB",
        "proc/self/cgroup": "4:memory:/box",
        "sys/fs/cgroup/memory/box/memory.limit_in_bytes": str(10 * MIB),
        "sys/fs/cgroup/memory/box/memory.usage_in_bytes": str(4 * MIB),
    }
    assert available_ram_bytes(machine(tmp_path, files)) == 6 * MIB


def test_path_that_only_the_host_sees_falls_back_to_the_mount(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemAvailable: 1048576 kB",
        "proc/self/cgroup": "0::/kubepods/pod1/c1",
        "sys/fs/cgroup/memory.max": str(8 * MIB),
        "sys/fs/cgroup/memory.current": str(MIB),
    }
    assert available_ram_bytes(machine(tmp_path, files)) == 7 * MIB


def test_group_over_its_limit_has_nothing_left(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/",
        "sys/fs/cgroup/memory.max": str(MIB),
        "sys/fs/cgroup/memory.current": str(2 * MIB),
    }
    assert available_ram_bytes(machine(tmp_path, files)) == 0


def test_without_proc_the_physical_memory_is_taken(tmp_path: Path) -> None:
    expected = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    assert available_ram_bytes(tmp_path) == expected


def test_this_machine_has_a_core_and_memory() -> None:
    assert physical_cores() >= 1
    assert available_ram_bytes() > 0


def test_processor_is_called_by_its_own_name(tmp_path: Path) -> None:
    root = machine(tmp_path, {"proc/cpuinfo": "processor\t: 0\nmodel name\t: A Chip 9000"})
    assert processor_name(root) == "A Chip 9000"


def test_processor_without_a_name_is_its_architecture(tmp_path: Path) -> None:
    assert processor_name(tmp_path)


def test_total_memory_is_the_machines(tmp_path: Path) -> None:
    files = {"proc/meminfo": "MemTotal: 4096 kB\nMemAvailable: 1 kB"}
    assert total_ram_bytes(machine(tmp_path, files)) == 4 * MIB


def test_total_memory_is_the_smallest_limit_of_the_groups(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": "MemTotal: 4096 kB",
        "proc/self/cgroup": "0::/outer/inner",
        "sys/fs/cgroup/outer/memory.max": "2097152",
        "sys/fs/cgroup/outer/inner/memory.max": "max",
    }
    assert total_ram_bytes(machine(tmp_path, files)) == 2 * MIB


def test_adapters_are_those_of_display_and_accelerator_classes(tmp_path: Path) -> None:
    devices = "sys/bus/pci/devices"
    kinds = {"0": "0x020000", "1": "0x030200", "2": "0x120000", "3": "0x010802"}
    files = {f"{devices}/{name}/class": kind for name, kind in kinds.items()}
    for name in kinds:
        files |= {f"{devices}/{name}/vendor": "0x10de", f"{devices}/{name}/device": f"0x{name}"}
    assert display_adapters(machine(tmp_path, files)) == ("10de:1", "10de:2")
    assert display_adapters(tmp_path / "nothing") == ()

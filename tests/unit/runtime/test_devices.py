"""What `devices` says of a machine."""

from __future__ import annotations

import pytest
from gpu_fakes import Machine, nvidia_card

from edgedsv4 import EngineOptions, devices
from edgedsv4.kernels.native.library import instruction_sets
from edgedsv4.runtime import device as device_module
from edgedsv4.runtime.device import available_devices, resolve_device
from edgedsv4.runtime.host import physical_cores


def test_names_are_what_options_can_name() -> None:
    names = [device.name for device in devices()]
    assert names == list(available_devices())
    assert [str(resolve_device(EngineOptions(device=name).device)) for name in names] == names


def test_default_is_what_auto_means() -> None:
    assert [d.name for d in devices() if d.is_default] == [str(resolve_device("auto"))]


def test_cpu_is_described() -> None:
    cpu = devices()[0]
    assert (cpu.name, cpu.kind) == ("cpu", "cpu")
    assert cpu.description
    assert cpu.memory_bytes > 1 << 20
    assert cpu.threads == physical_cores()
    assert cpu.instruction_set in {found.name for found in instruction_sets()}


def test_without_c_kernels_there_is_no_instruction_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "HAVE_NATIVE", False)
    assert devices()[0].instruction_set is None


def test_each_gpu_is_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    Machine(monkeypatch).cuda(nvidia_card(), nvidia_card(12, 0, name="Other", total_memory=8 << 30))
    first, second = devices()[1:]
    assert (first.name, second.name) == ("cuda:0", "cuda:1")
    assert (first.is_default, second.is_default) == (True, False)
    assert (second.kind, second.description, second.memory_bytes) == ("cuda", "Other", 8 << 30)
    assert (second.family, second.obstacle) == ("sm_120", None)
    assert (second.instruction_set, second.threads) == (None, None)

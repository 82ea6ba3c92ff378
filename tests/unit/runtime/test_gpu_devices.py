"""Cards as records, the choice among them, and what their libraries raise."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from gpu_fakes import GIB, Machine, amd_card, intel_card, nvidia_card

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BackendUnavailableError, CapacityError, DeviceLostError
from edgedsv4.runtime import gpu_devices
from edgedsv4.runtime.device import (
    available_devices,
    devices,
    engine_device,
    memory_budget,
    resolve_device,
)
from edgedsv4.runtime.gpu_devices import (
    RESERVE_BYTES,
    check_gpu,
    device_budget,
    device_memory_errors,
    free_device_bytes,
    gpu_of,
    gpus,
)

CUDA = torch.device("cuda:0")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


# ---- what a card is ----


@pytest.mark.parametrize(
    ("capability", "family", "shared"),
    [
        ((8, 9), "sm_89", 99 << 10),
        ((9, 0), "sm_90", 227 << 10),
        ((12, 0), "sm_120", 99 << 10),
        ((12, 1), "sm_121", 99 << 10),
        ((10, 3), "sm_103", 227 << 10),
    ],
)
def test_nvidia_card(
    machine: Machine, capability: tuple[int, int], family: str, shared: int
) -> None:
    machine.cuda(nvidia_card(*capability, shared_memory_per_block_optin=shared))
    (card,) = gpus()
    assert (card.name, card.kind, card.family) == ("cuda:0", "cuda", family)
    assert (card.shared_bytes, card.warp_size, card.multiprocessors) == (shared, 32, 132)
    assert (card.description, card.total_bytes, card.obstacle) == ("Card", 80 * GIB, None)


def test_shared_memory_is_known_where_torch_does_not_tell(machine: Machine) -> None:
    card = nvidia_card(12, 0)
    del card.shared_memory_per_block_optin
    machine.cuda(card)
    assert gpu_of(CUDA).shared_bytes == 99 << 10


@pytest.mark.parametrize("family", ["gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1151", "gfx1201"])
def test_amd_card(machine: Machine, family: str) -> None:
    machine.cuda(amd_card(f"{family}:sramecc+:xnack-"), hip="7.0")
    (card,) = gpus()
    assert (card.name, card.kind, card.family) == ("cuda:0", "rocm", family)
    assert (card.shared_bytes, card.warp_size, card.obstacle) == (64 << 10, 64, None)


def test_intel_card(machine: Machine) -> None:
    machine.xpu(intel_card())
    (card,) = gpus()
    assert (card.name, card.kind, card.family) == ("xpu:0", "xpu", "xpu")
    assert (card.shared_bytes, card.warp_size, card.multiprocessors) == (128 << 10, 16, 256)


def test_old_nvidia_card_has_an_obstacle(machine: Machine) -> None:
    machine.cuda(nvidia_card(7, 5))
    assert gpu_of(CUDA).obstacle == "its compute capability is 7.5, 8.0 is needed"


@pytest.mark.parametrize("family", ["gfx906", "gfx1010", "gfx1030"])
def test_old_amd_card_has_an_obstacle(machine: Machine, family: str) -> None:
    machine.cuda(amd_card(family), hip="7.0")
    assert gpu_of(CUDA).obstacle == f"there are no kernels for the architecture {family}"


def test_missing_triton_is_an_obstacle(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cuda(nvidia_card())
    machine.xpu(intel_card())
    monkeypatch.setattr(gpu_devices, "HAVE_TRITON", False)
    assert {card.obstacle for card in gpus()} == {
        "Triton is not installed; install the extra `gpu`"
    }


def test_refusal_names_card_and_reason(machine: Machine) -> None:
    machine.cuda(nvidia_card(), nvidia_card(7, 5))
    assert check_gpu(CUDA).family == "sm_90"
    with pytest.raises(BackendUnavailableError, match=r"cuda:1 \(Card\): .* 7.5, 8.0 is needed"):
        check_gpu(torch.device("cuda:1"))
    with pytest.raises(BackendUnavailableError, match="need a GPU, the device is cpu"):
        check_gpu(torch.device("cpu"))


# ---- names and the choice ----


@pytest.mark.parametrize(
    ("name", "expected"), [("cuda", "cuda:0"), ("cuda:1", "cuda:1"), ("auto", "cuda:0")]
)
def test_nvidia_names(machine: Machine, name: str, expected: str) -> None:
    machine.cuda(nvidia_card(), nvidia_card())
    assert str(resolve_device(name)) == expected


@pytest.mark.parametrize(
    ("name", "expected"),
    [("rocm", "cuda:0"), ("rocm:1", "cuda:1"), ("cuda:1", "cuda:1"), ("auto", "cuda:0")],
)
def test_amd_names(machine: Machine, name: str, expected: str) -> None:
    machine.cuda(amd_card(), amd_card(), hip="7.0")
    assert str(resolve_device(name)) == expected
    assert available_devices() == ("cpu", "cuda:0", "cuda:1")


@pytest.mark.parametrize("name", ["xpu", "xpu:0"])
def test_intel_names(machine: Machine, name: str) -> None:
    machine.xpu(intel_card())
    assert str(resolve_device(name)) == "xpu:0"


def test_auto_leaves_an_untried_vendor_alone(machine: Machine) -> None:
    machine.xpu(intel_card())
    assert resolve_device("auto") == torch.device("cpu")


def test_auto_takes_the_first_card_that_can(machine: Machine) -> None:
    machine.cuda(nvidia_card(7, 0), nvidia_card(12, 0))
    assert str(resolve_device("auto")) == "cuda:1"
    assert [card.name for card in devices() if card.is_default] == ["cuda:1"]


def test_auto_is_the_cpu_without_triton(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine.cuda(nvidia_card())
    monkeypatch.setattr(gpu_devices, "HAVE_TRITON", False)
    assert resolve_device("auto") == torch.device("cpu")
    assert str(resolve_device("cuda")) == "cuda:0"


@pytest.mark.parametrize("name", ["rocm", "rocm:0", "cuda:7", "xpu"])
def test_what_is_not_there_lists_what_is(machine: Machine, name: str) -> None:
    machine.cuda(nvidia_card())
    with pytest.raises(BackendUnavailableError) as caught:
        resolve_device(name)
    assert str(caught.value) == f"device {name!r} cannot be used here; there is: auto, cpu, cuda:0"


@pytest.mark.parametrize("name", ["cuda:x", "cuda:01", "tpu", "gpu"])
def test_what_no_device_is_called_is_told(machine: Machine, name: str) -> None:
    machine.cuda(nvidia_card())
    with pytest.raises(BackendUnavailableError, match="is not a device name; cannot be used here"):
        resolve_device(name)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EngineOptions(), "cuda:0"),
        (EngineOptions(backend="triton"), "cuda:0"),
        (EngineOptions(backend="native"), "cpu"),
        (EngineOptions(backend="reference"), "cpu"),
        (EngineOptions(dtype="f64"), "cpu"),
        (EngineOptions(device="cuda", backend="reference"), "cuda:0"),
    ],
)
def test_auto_of_an_engine_follows_what_it_is_to_run(
    machine: Machine, options: EngineOptions, expected: str
) -> None:
    machine.cuda(nvidia_card())
    assert str(engine_device(options)) == expected


def test_cards_are_described(machine: Machine) -> None:
    machine.cuda(amd_card(), amd_card("gfx906"), hip="7.0")
    _, first, second = devices()
    assert (first.name, first.kind, first.family) == ("cuda:0", "rocm", "gfx942")
    assert (first.is_default, first.obstacle) == (True, None)
    assert second.obstacle == "there are no kernels for the architecture gfx906"


# ---- memory ----


def test_free_memory_counts_what_torch_holds_unused(machine: Machine) -> None:
    machine.free, machine.reserved, machine.allocated = 10 * GIB, 5 * GIB, 2 * GIB
    assert free_device_bytes(CUDA) == 13 * GIB
    assert free_device_bytes(torch.device("xpu:0")) == 13 * GIB


@pytest.mark.parametrize(
    ("vram", "expected"),
    [(None, 10 * GIB - RESERVE_BYTES), (GIB, GIB), (99 * GIB, 10 * GIB - RESERVE_BYTES)],
)
def test_budget_is_never_more_than_what_is_free(
    machine: Machine, vram: int | None, expected: int
) -> None:
    machine.free = 10 * GIB
    assert device_budget(CUDA, vram) == expected
    assert memory_budget(CUDA, EngineOptions(vram_bytes=vram)) == expected


def test_budget_of_a_full_card_is_nothing(machine: Machine) -> None:
    machine.free = 1000
    assert device_budget(CUDA, None) == 0


def test_full_memory_is_a_capacity_error(machine: Machine) -> None:
    machine.free = 300 << 20
    message = "CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of ..."
    with (
        pytest.raises(CapacityError, match="a chunk: the memory of cuda:0 is full") as caught,
        device_memory_errors("a chunk", CUDA),
    ):
        raise torch.OutOfMemoryError(message)
    assert caught.value.needed_bytes == 5 * GIB // 2
    assert caught.value.available_bytes == 300 << 20
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert machine.released == 1


@pytest.mark.parametrize(
    "message",
    [
        "HIP out of memory. Tried to allocate 20.00 MiB.",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)",
    ],
)
def test_words_of_other_libraries_are_known(machine: Machine, message: str) -> None:
    with pytest.raises(CapacityError), device_memory_errors("a chunk", CUDA):
        raise RuntimeError(message)
    assert machine.released == 1


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("out of resource: shared memory, Required: 70000, Hardware limit: 65536"),
        RuntimeError("shapes cannot be multiplied"),
        MemoryError(),
        ValueError("out of memory"),
    ],
)
def test_other_errors_stay_what_they_are(machine: Machine, error: Exception) -> None:
    with pytest.raises(type(error)) as caught, device_memory_errors("a chunk", CUDA):
        raise error
    assert caught.value is error
    assert machine.released == 0


def test_on_the_cpu_nothing_is_turned(machine: Machine) -> None:
    with (
        pytest.raises(RuntimeError, match="out of memory") as caught,
        device_memory_errors("a chunk", torch.device("cpu")),
    ):
        raise RuntimeError("DefaultCPUAllocator: out of memory")
    assert not isinstance(caught.value, CapacityError)
    assert machine.released == 0


def test_failed_device_is_lost() -> None:
    message = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might ..."
    with pytest.raises(DeviceLostError) as caught, device_memory_errors("a chunk", CUDA):
        raise torch.AcceleratorError(message)
    expected = "a chunk: cuda:0 failed: CUDA error: an illegal memory access was encountered"
    assert str(caught.value) == expected


def test_memory_of_what_failed_is_dropped_before_it_is_released(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Machine(monkeypatch)
    kept: list[weakref.ref[torch.Tensor]] = []
    alive_at_release: list[bool] = []

    def work() -> None:
        tensor = torch.empty(8)
        kept.append(weakref.ref(tensor))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(
        torch.cuda, "empty_cache", lambda: alive_at_release.append(kept[0]() is not None)
    )
    gc.disable()
    try:
        with pytest.raises(CapacityError), device_memory_errors("a chunk", CUDA):
            work()
    finally:
        gc.enable()
    assert alive_at_release == [False]

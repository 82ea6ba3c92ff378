"""From names in options to torch's devices and types, with an error that says what there is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.formats.block_types import BlockType
from edgedsv4.kernels.native.library import HAVE_NATIVE
from edgedsv4.kernels.quant_matmul import QuantMatrix
from edgedsv4.model.native_network import instruction_set
from edgedsv4.runtime.gpu_devices import (
    GPU_NAME,
    device_budget,
    gpu_names,
    gpus,
    torch_name,
)
from edgedsv4.runtime.host import (
    available_ram_bytes,
    physical_cores,
    processor_name,
    total_ram_bytes,
)

if TYPE_CHECKING:
    from edgedsv4.config import Dtype, EngineOptions

Weights = TypeVar("Weights")

TORCH_DTYPES: Mapping[Dtype, torch.dtype] = {
    "f32": torch.float32,
    "f64": torch.float64,
    "bf16": torch.bfloat16,
}


@dataclass(frozen=True, slots=True)
class DeviceInfo:
    """A device that models can be computed on."""

    name: str
    """As `EngineOptions.device` takes it: `cpu`, `cuda:0`, `xpu:0`."""
    kind: str
    """`cpu`, `cuda` (NVIDIA), `rocm` (AMD) or `xpu` (Intel)."""
    description: str
    """What the device calls itself."""
    memory_bytes: int
    """Memory that it has in all, or that this process may use of it; some may be in use."""
    is_default: bool
    """Whether `auto` means this one."""
    instruction_set: str | None
    """CPU instructions that the C kernels use; None where they do not run."""
    threads: int | None
    """Threads that an engine takes at most unless told; None where it computes elsewhere."""
    family: str | None = None
    """Architecture of a GPU: `sm_90`, `gfx942`, `xpu`; None for a CPU."""
    obstacle: str | None = None
    """Why the Triton kernels cannot run on a GPU; None where they can, and for a CPU."""


def devices() -> tuple[DeviceInfo, ...]:
    """Everything that `EngineOptions.device` can name on this machine, besides `auto`."""
    default = str(resolve_device("auto"))
    return (_cpu_info(default == "cpu"), *_gpu_infos(default))


def _cpu_info(is_default: bool) -> DeviceInfo:
    return DeviceInfo(
        name="cpu",
        kind="cpu",
        description=processor_name(),
        memory_bytes=total_ram_bytes(),
        is_default=is_default,
        instruction_set=instruction_set() if HAVE_NATIVE else None,
        threads=physical_cores(),
    )


def _gpu_infos(default: str) -> Iterator[DeviceInfo]:
    for gpu in gpus():
        yield DeviceInfo(
            name=gpu.name,
            kind=gpu.kind,
            description=gpu.description,
            memory_bytes=gpu.total_bytes,
            is_default=gpu.name == default,
            instruction_set=None,
            threads=None,
            family=gpu.family,
            obstacle=gpu.obstacle,
        )


def available_devices() -> tuple[str, ...]:
    """Names that `resolve_device` takes on this machine, besides `auto`."""
    return "cpu", *gpu_names()


def resolve_device(name: str) -> torch.device:
    """The device to compute on.

    Args:
        name: `auto` (the first NVIDIA or AMD card on which the Triton kernels run, else the CPU),
            `cpu`, `cuda`, `rocm` or `xpu` (the first one), or one of those with a number: `cuda:1`.

    Raises:
        BackendUnavailableError: a device that this machine or this torch does not have.
    """
    if name == "auto":
        return next((gpu.device for gpu in gpus() if gpu.is_choice_of_auto), torch.device("cpu"))
    names = available_devices()
    wanted = torch_name(name)
    if wanted not in names:
        what = "" if GPU_NAME.fullmatch(name) else " is not a device name;"
        raise BackendUnavailableError(
            f"device {name!r}{what} cannot be used here; there is: auto, {', '.join(names)}"
        )
    return torch.device(wanted)


def engine_device(options: EngineOptions) -> torch.device:
    """The device of an engine: `auto` is a GPU only where what was asked for can run on one.

    Raises:
        BackendUnavailableError: as `resolve_device`.
    """
    is_for_gpus = options.backend in ("auto", "triton") and options.dtype == "f32"
    if options.device == "auto" and not is_for_gpus:
        return torch.device("cpu")
    return resolve_device(options.device)


def memory_budget(device: torch.device, options: EngineOptions) -> int:
    """Bytes for weights, sessions and working memory where the model computes.

    The option for that kind of memory if it is set, else what is free at this moment. On a GPU
    never more than is free there, less a reserve.
    """
    if device.type == "cpu":
        return available_ram_bytes() if options.ram_bytes is None else options.ram_bytes
    return device_budget(device, options.vram_bytes)


def unused_budget(
    device: torch.device, options: EngineOptions, *, has_card_plan: bool = False
) -> str | None:
    """What to tell a user whose memory budget bounds nothing on this device.

    Args:
        device: where the model is computed.
        options: as asked for.
        has_card_plan: whether experts that are not on a card take main memory.
    """
    if device.type == "cpu" and options.vram_bytes is not None:
        return "vram_bytes has no effect: everything is computed on the CPU, ram_bytes bounds that"
    if device.type != "cpu" and options.ram_bytes is not None and not has_card_plan:
        return f"ram_bytes has no effect: the model is computed on {device}, vram_bytes bounds that"
    return None


def unused_expert_options(device: torch.device, backend: str, options: EngineOptions) -> str | None:
    """What to tell a user whose options for experts beside a GPU say nothing there."""
    if backend == "triton":
        return None
    if options.expert_threads is not None:
        return "expert_threads has no effect: no GPU shares the work; threads bounds the CPU's"
    if options.cpu_experts != "auto" and device.type != "cpu":
        return f"cpu_experts has no effect: torch computes the model on {device}"
    return None


def place_weights(weights: Weights, device: torch.device) -> Weights:
    """Weight records with every tensor on `device`; the records themselves when it is the CPU."""
    if device.type == "cpu":
        return weights
    placed: Weights = _moved(weights, device)
    return placed


def resident_bytes(weights: object) -> int:
    """Bytes of the tensors in weight records that are not views of the mapped file."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _parameters(weights))


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, tuple):
        return tuple(_moved(part, device) for part in value)
    if is_dataclass(value) and not isinstance(value, (type, BlockType)):
        parts = {field.name: getattr(value, field.name) for field in fields(value)}
        return replace(value, **{name: _moved(part, device) for name, part in parts.items()})
    return value


def _parameters(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _parameters(part)
    elif is_dataclass(value) and not isinstance(value, QuantMatrix):
        for field in fields(value):
            yield from _parameters(getattr(value, field.name))

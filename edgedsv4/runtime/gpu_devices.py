"""GPUs as torch sees them: what they are called, what they have, and whether kernels run there.

NVIDIA and AMD cards are both `cuda:N` to torch, which is built for one of the two; `rocm:N` is
another name for an AMD card here. Intel cards are `xpu:N`. Nobody has run the kernels on an Intel
card, so one has to be named: `auto` does not take it.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from edgedsv4.errors import BackendUnavailableError, CapacityError, DeviceLostError
from edgedsv4.kernels._triton import HAVE_TRITON
from edgedsv4.kernels.gpu.targets import TARGETS

GpuKind = Literal["cuda", "rocm", "xpu"]

GPU_NAME = re.compile(r"(cuda|rocm|xpu)(?::(0|[1-9]\d*))?")
"""What users may call a card."""
OLDEST_CAPABILITY = (8, 0)
"""Of NVIDIA cards: the first with bfloat16 products."""
AMD_FAMILIES = re.compile(r"gfx(90a|94\d|95\d|11\d\d|12\d\d)")
"""Architectures with matrix instructions; on older ones compiled kernels write nothing."""
RESERVE_BYTES = 512 << 20
"""Left free of a card's memory: compiled kernels, libraries' work space, pieces of the allocator's
blocks, and what a desktop takes meanwhile."""
_XPU_SHARED_BYTES = 64 << 10

_OUT_OF_MEMORY = re.compile(
    r"out of memory|alloc_failed|out_of_(device|host)_memory|out_of_resources", re.IGNORECASE
)
_ASKED_FOR = re.compile(r"[Tt]ried to allocate ([\d.]+) ([KMGT]i?B|bytes)")
_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """What one card is and has."""

    device: torch.device
    """As torch names it."""
    kind: GpuKind
    description: str
    """What the card calls itself."""
    family: str
    """Name under which kernels keep their tile sizes: `sm_90`, `gfx942`, `xpu`."""
    shared_bytes: int
    """Shared memory (LDS) that one program of a kernel may use."""
    warp_size: int
    multiprocessors: int
    """Streaming multiprocessors, compute units or Xe cores."""
    total_bytes: int
    """Memory of the card, or of the machine where they share it."""
    obstacle: str | None
    """Why Triton kernels cannot run there; None where they can."""

    @property
    def name(self) -> str:
        """As `EngineOptions.device` takes it."""
        return str(self.device)

    @property
    def is_choice_of_auto(self) -> bool:
        """Whether `auto` may take it."""
        return self.obstacle is None and self.kind != "xpu"


def gpus() -> tuple[Gpu, ...]:
    """Every card that torch can use, in torch's order."""
    return tuple(gpu_of(torch.device(name)) for name in gpu_names())


def gpu_names() -> tuple[str, ...]:
    """Torch's names of the cards: `cuda:0`, `xpu:1`."""
    return (
        *(f"cuda:{index}" for index in range(torch.cuda.device_count())),
        *(f"xpu:{index}" for index in range(torch.xpu.device_count())),
    )


def torch_name(name: str) -> str:
    """Torch's name of what a user named: `cuda` and `xpu` are the first one, `rocm` is AMD's."""
    match = GPU_NAME.fullmatch(name)
    if match is None:
        return name
    kind, index = match[1], match[2] or "0"
    if kind == "rocm":
        # On a torch for NVIDIA cards there is no such device.
        kind = "cuda" if is_rocm() else "rocm"
    return f"{kind}:{index}"


def is_rocm() -> bool:
    """Whether this torch is built for AMD cards."""
    return torch.version.hip is not None


def gpu_of(device: torch.device) -> Gpu:
    """Look at one card."""
    if device.type == "xpu":
        return _xpu(device, torch.xpu.get_device_properties(device))
    found = torch.cuda.get_device_properties(device)
    return _rocm(device, found) if is_rocm() else _cuda(device, found)


def _cuda(device: torch.device, found: Any) -> Gpu:
    capability = (found.major, found.minor)
    family = f"sm_{found.major}{found.minor}"
    obstacle = None
    if capability < OLDEST_CAPABILITY:
        needed = ".".join(map(str, OLDEST_CAPABILITY))
        obstacle = f"its compute capability is {found.major}.{found.minor}, {needed} is needed"
    return _gpu(device, "cuda", found, family, obstacle)


def _rocm(device: torch.device, found: Any) -> Gpu:
    family = found.gcnArchName.partition(":")[0]
    obstacle = None
    if AMD_FAMILIES.fullmatch(family) is None:
        obstacle = f"there are no kernels for the architecture {family}"
    return _gpu(device, "rocm", found, family, obstacle)


def _gpu(device: torch.device, kind: GpuKind, found: Any, family: str, obstacle: str | None) -> Gpu:
    known = TARGETS.get(family)
    # Torch 2.11 to 2.13 have this one, and their type stubs do not.
    shared = getattr(found, "shared_memory_per_block_optin", 0)
    shared = max(shared, found.shared_memory_per_block, 0 if known is None else known.shared_bytes)
    return Gpu(
        device=device,
        kind=kind,
        description=found.name,
        family=family,
        shared_bytes=shared,
        warp_size=found.warp_size,
        multiprocessors=found.multi_processor_count,
        total_bytes=found.total_memory,
        obstacle=_without_triton() or obstacle,
    )


def _xpu(device: torch.device, found: Any) -> Gpu:
    return Gpu(
        device=device,
        kind="xpu",
        description=found.name,
        family="xpu",
        shared_bytes=getattr(found, "local_mem_size", _XPU_SHARED_BYTES),
        warp_size=min(found.sub_group_sizes, default=16),
        multiprocessors=found.max_compute_units,
        total_bytes=found.total_memory,
        obstacle=_without_triton(),
    )


def _without_triton() -> str | None:
    return None if HAVE_TRITON else "Triton is not installed; install the extra `gpu`"


def check_gpu(device: torch.device) -> Gpu:
    """The card that Triton kernels are to run on.

    Raises:
        BackendUnavailableError: they cannot, and why.
    """
    if device.type not in ("cuda", "xpu"):
        raise BackendUnavailableError(f"Triton kernels need a GPU, the device is {device}")
    found = gpu_of(device)
    if found.obstacle is not None:
        raise BackendUnavailableError(
            f"Triton kernels cannot run on {device} ({found.description}): {found.obstacle}"
        )
    return found


# ---- memory ----


def free_device_bytes(device: torch.device) -> int:
    """What this process can still allocate: free memory, and what torch holds without using it."""
    if device.type == "xpu":
        free = torch.xpu.mem_get_info(device)[0]
        unused = torch.xpu.memory_reserved(device) - torch.xpu.memory_allocated(device)
    else:
        free = torch.cuda.mem_get_info(device)[0]
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + unused


def device_budget(device: torch.device, vram_bytes: int | None) -> int:
    """Bytes that an engine may take of a card's memory.

    Args:
        device: a GPU.
        vram_bytes: at most this much; None sets no bound of its own.
    """
    room = max(0, free_device_bytes(device) - RESERVE_BYTES)
    return room if vram_bytes is None else min(vram_bytes, room)


def release_unused_memory(device: torch.device) -> None:
    """Give back to the system what torch holds without using it."""
    if device.type == "xpu":
        torch.xpu.empty_cache()
    elif device.type == "cuda":
        torch.cuda.empty_cache()


@contextmanager
def device_memory_errors(what: str, device: torch.device) -> Iterator[None]:
    """Turn what a GPU's libraries raise in the block into errors of this one.

    The variables of the functions that failed are dropped, and with them the memory they held, so
    that something smaller can be tried at once.

    Args:
        what: for the message, what was being done.
        device: where; on the CPU nothing is turned.

    Raises:
        CapacityError: the device's memory is full.
        DeviceLostError: the device failed; nothing more can be computed in this process.
    """
    try:
        yield
    except RuntimeError as error:
        if device.type == "cpu":
            raise
        if _is_memory_error(error):
            traceback.clear_frames(error.__traceback__)
            release_unused_memory(device)
            raise CapacityError(
                f"{what}: the memory of {device} is full",
                needed_bytes=_asked_for(error),
                available_bytes=free_device_bytes(device),
                is_on_device=True,
            ) from error.with_traceback(None)
        if isinstance(error, torch.AcceleratorError):
            raise DeviceLostError(f"{what}: {device} failed: {_first_line(error)}") from error
        raise


def _is_memory_error(error: RuntimeError) -> bool:
    """Torch has a class of its own for it; libraries below torch have only words."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return _OUT_OF_MEMORY.search(str(error)) is not None


def _asked_for(error: RuntimeError) -> int:
    """Bytes of the allocation that failed, as far as the message tells."""
    match = _ASKED_FOR.search(str(error))
    return 0 if match is None else round(float(match[1]) * _UNITS.get(match[2], 1))


def _first_line(error: RuntimeError) -> str:
    return str(error).partition("\n")[0]

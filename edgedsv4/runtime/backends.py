"""Which implementation computes a model: torch or the C kernels, and what a user should know of it.

The choice is made once, for the whole forward. `auto` takes the C kernels where they can run and
says why where they cannot; a named backend that cannot run is an error, never replaced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.model import Model
from edgedsv4.model.native_model import NativeModel
from edgedsv4.model.native_network import (
    instruction_set,
    model_obstacle,
    native_obstacle,
    types_without_int8,
)
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.device import TORCH_DTYPES, place_weights
from edgedsv4.runtime.expert_store import MappedExperts

if TYPE_CHECKING:
    import torch

    from edgedsv4.config import EngineOptions
    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights

OPERATIONS = (
    "compress",
    "expert_ffn",
    "grouped_output",
    "hadamard",
    "index_scores",
    "index_topk",
    "kv_quant",
    "mhc",
    "quant_matmul",
    "rms_norm",
    "rope",
    "router",
    "sparse_attention",
    "swiglu",
)
"""Operations of a forward."""


@dataclass(frozen=True, slots=True)
class BackendChoice:
    """What computes a forward."""

    name: Literal["reference", "native"]
    notes: tuple[str, ...]
    """Sentences for the user."""

    @property
    def instruction_set(self) -> str | None:
        """Name of the CPU instructions that the C kernels use; None without them."""
        return instruction_set() if self.name == "native" else None

    def kernels(self) -> dict[str, str]:
        """Which implementation each operation runs."""
        return dict.fromkeys(OPERATIONS, self.name)


def numerics_of(options: EngineOptions, device: torch.device) -> Numerics:
    """How a model is computed under these options."""
    return Numerics(profile=options.profile, dtype=TORCH_DTYPES[options.dtype], device=device)


def check_backend(options: EngineOptions, device: torch.device) -> None:
    """Refuse a named backend that could compute no model at all, before a file is looked at.

    Raises:
        BackendUnavailableError: with the reason.
    """
    if options.backend == "triton":
        raise _unavailable("triton", "there are no Triton kernels yet")
    if options.backend == "native":
        obstacle = native_obstacle(numerics_of(options, device))
        if obstacle is not None:
            raise _unavailable("native", obstacle)


def choose_backend(
    bound: BoundWeights, options: EngineOptions, device: torch.device
) -> BackendChoice:
    """Choose what computes a model.

    Args:
        bound: the model's weights.
        options: the backend asked for, profile and type.
        device: where it is computed.

    Raises:
        BackendUnavailableError: a named backend that cannot compute this model.
    """
    check_backend(options, device)
    if options.backend == "reference":
        return BackendChoice("reference", ())
    types = sorted({tensor.block_type.name for tensor in _matrices(bound)})
    obstacle = native_obstacle(numerics_of(options, device))
    obstacle = obstacle or model_obstacle(bound.config, types)
    if obstacle is None:
        return BackendChoice("native", _rounding_notes(types, options))
    if options.backend == "native":
        raise _unavailable("native", obstacle)
    return BackendChoice("reference", (f"computed by torch, which is slower: {obstacle}",))


def load_model(
    bound: BoundWeights,
    options: EngineOptions,
    device: torch.device,
    choice: BackendChoice,
    threads: int,
) -> Model:
    """Make the model that was chosen.

    Raises:
        FormatError: damaged parameters.
    """
    weights, experts = load_weights(bound)
    source, numerics = MappedExperts(experts, device), numerics_of(options, device)
    if choice.name == "native":
        is_pinned = options.pin_threads
        return NativeModel(
            bound.config, weights, source, numerics, threads=threads, is_pinned=is_pinned
        )
    return Model(bound.config, place_weights(weights, device), source, numerics)


def _matrices(bound: BoundWeights) -> Iterator[BoundTensor]:
    """Everything that is multiplied with; vectors and tables are copied at open."""
    yield from (tensor for tensor in bound.tensors.values() if _is_matrix(tensor))
    for experts in bound.experts:
        yield from (*experts.w1, *experts.w3, *experts.w2)


def _is_matrix(tensor: BoundTensor) -> bool:
    return len(tensor.shape) > 1 and tensor.block_type.name not in ("I32", "I64")


def _rounding_notes(types: list[str], options: EngineOptions) -> tuple[str, ...]:
    floats = types_without_int8(types)
    if options.profile == "exact" or not floats:
        return ()
    return (f"computed with float32 activations: weights of type {', '.join(floats)}",)


def _unavailable(name: str, reason: str) -> BackendUnavailableError:
    return BackendUnavailableError(
        f"backend {name!r} cannot run here: {reason}; available: auto, reference"
    )

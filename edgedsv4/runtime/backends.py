"""Which implementation computes a model: torch, the C kernels or Triton's, and what to know of it.

The choice is made once, for the whole forward. `auto` takes the C kernels on a CPU and the Triton
kernels on a GPU where they can run, and says why where they cannot; a named backend that cannot run
is an error, never replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeVar

import torch

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.kernels.gpu.planes import SUPPORTED
from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.model.gpu_network import NetworkLoader
from edgedsv4.model.host_experts import HostSetting
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
from edgedsv4.runtime.aged_frequency import AgedFrequency
from edgedsv4.runtime.device import TORCH_DTYPES, place_weights
from edgedsv4.runtime.device_weights import FALLBACK
from edgedsv4.runtime.expert_files import ExpertFiles
from edgedsv4.runtime.expert_store import MappedExperts
from edgedsv4.runtime.gpu_devices import gpu_of
from edgedsv4.runtime.host import physical_cores
from edgedsv4.runtime.hybrid import HybridWork, with_hybrid
from edgedsv4.runtime.ram_store import GUESSES, ExpertStore, StoreOptions
from edgedsv4.runtime.watched_store import WatchedStore

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions, ModelConfig
    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.model.weights import ModelWeights, RoutedExperts
    from edgedsv4.runtime.card_plan import CardPlan
    from edgedsv4.runtime.store_plan import StorePlan

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

    name: Literal["reference", "native", "triton"]
    notes: tuple[str, ...]
    """Sentences for the user."""
    card: CardPlan | None = None
    """Which experts live on a GPU that holds only a part of them; None elsewhere."""
    store: StorePlan | None = None
    """Sizes of the store that routed experts are read into; None where they are mapped."""

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
        obstacle = triton_obstacle(options, device)
        if obstacle is not None:
            raise _unavailable("triton", obstacle)
    if options.backend == "native":
        obstacle = native_obstacle(numerics_of(options, device))
        if obstacle is not None:
            raise _unavailable("native", obstacle)


def triton_obstacle(options: EngineOptions, device: torch.device) -> str | None:
    """Why the Triton kernels cannot compute on a device under these options; None if they can."""
    if device.type == "cpu":
        return "the Triton kernels need a GPU; choose one with device (--device cuda)"
    if options.dtype != "f32":
        return f"the Triton kernels compute with dtype f32, not {options.dtype}"
    return gpu_of(device).obstacle


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
    if device.type != "cpu":
        return _choose_on_gpu(bound, options, device)
    types = sorted({tensor.block_type.name for tensor in _matrices(bound)})
    obstacle = native_obstacle(numerics_of(options, device))
    obstacle = obstacle or model_obstacle(bound.config, types)
    if obstacle is None:
        return BackendChoice("native", _rounding_notes(types, options))
    if options.backend == "native":
        raise _unavailable("native", obstacle)
    return BackendChoice("reference", (f"computed by torch, which is slower: {obstacle}",))


def _choose_on_gpu(
    bound: BoundWeights, options: EngineOptions, device: torch.device
) -> BackendChoice:
    obstacle = triton_obstacle(options, device)
    if obstacle is None:
        return BackendChoice("triton", _fallback_notes(bound))
    return BackendChoice("reference", (f"computed by torch, which is slower: {obstacle}",))


def _fallback_notes(bound: BoundWeights) -> tuple[str, ...]:
    """Types of matrices that are decoded when they are copied to a GPU."""
    types = {tensor.block_type.name for tensor in _matrices(bound)}
    decoded = sorted(types - SUPPORTED - {"FP4_E2M1"})
    if not decoded:
        return ()
    return (f"held as {FALLBACK} on the GPU: weights of type {', '.join(decoded)}",)


def load_model(
    bound: BoundWeights,
    options: EngineOptions,
    device: torch.device,
    choice: BackendChoice,
    threads: int,
    *,
    on_progress: Callable[[int, int], None] | None = None,
) -> Model:
    """Make the model that was chosen.

    Args:
        bound: its weights.
        options: profile, type and threads.
        device: where it is computed.
        choice: what computes it.
        threads: of the C kernels.
        on_progress: told (layers copied, layers in all) where weights are copied to a GPU.

    Raises:
        FormatError: damaged parameters.
        CapacityError: the device's memory is full.
    """
    weights, experts = load_weights(bound)
    numerics = numerics_of(options, device)
    if choice.name == "triton":
        return _load_on_gpu(bound, options, device, choice, (weights, experts), on_progress)
    source: MappedExperts | ExpertStore = MappedExperts(experts, device)
    if choice.store is not None:
        source = open_store(bound.config, weights, experts, options, choice.store, ExpertStore)
    if choice.name == "native":
        is_pinned = options.pin_threads
        return NativeModel(
            bound.config, weights, source, numerics, threads=threads, is_pinned=is_pinned
        )
    return Model(bound.config, place_weights(weights, device), source, numerics)


def _load_on_gpu(
    bound: BoundWeights,
    options: EngineOptions,
    device: torch.device,
    choice: BackendChoice,
    opened: tuple[ModelWeights, RoutedExperts],
    on_progress: Callable[[int, int], None] | None,
) -> GpuModel:
    """The model on a card, with whoever serves the experts that do not live there."""
    (weights, experts), card, config = opened, choice.card, bound.config
    mapped = MappedExperts(experts, torch.device("cpu"))
    placement = None if card is None else card.experts.placement
    loader = NetworkLoader(config, device, FALLBACK, experts.stacks, placement)
    network = loader.load(weights, mapped, on_progress, has_draft=options.draft > 0)
    source: MappedExperts | WatchedStore = mapped
    with ExitStack() as stack:
        if card is not None:
            if choice.store is not None:
                plan = replace(choice.store, is_elsewhere=_on_card(network, card))
                source = open_store(config, weights, experts, options, plan, WatchedStore)
                stack.callback(source.close)
            setting = HostSetting(
                threads=options.expert_threads or physical_cores(),
                has_int8=options.profile == "default",
                is_pinned=options.pin_threads,
                is_locked=device.type == "cuda",
            )
            work = HybridWork(
                mode=card.mode,
                setting=setting,
                device=device,
                routers=[layer.moe for layer in weights.layers],
                counts=card.counts,
            )
            network = with_hybrid(network, config, source, work)
        numerics, family = numerics_of(options, device), gpu_of(device).family
        model = GpuModel(config, weights, source, numerics, network=network, family=family)
        stack.pop_all()
    return model


def _on_card(network: DeviceNetwork, card: CardPlan) -> Callable[[int, int], bool]:
    """Whether a (layer, expert) is computed on the card, so that nobody asks for it elsewhere."""
    layers = network.placed_layers()

    def is_there(layer: int, expert: int) -> bool:
        return card.mode != "on" and layer < len(layers) and int(layers[layer].places[expert]) >= 0

    return is_there


_Store = TypeVar("_Store", bound=ExpertStore)


def open_store(
    config: ModelConfig,
    weights: ModelWeights,
    experts: RoutedExperts,
    options: EngineOptions,
    plan: StorePlan,
    kind: type[_Store],
) -> _Store:
    """Make the store of a model's experts; whoever closes the model closes it.

    Raises:
        CapacityError: its memory is refused.
        BackendUnavailableError, StorageError: files cannot be read as asked.
    """
    tables = {
        layer: part.moe.expert_table
        for layer, part in enumerate(weights.layers)
        if part.moe.expert_table is not None
    }
    chosen = StoreOptions(
        slots=plan.slots,
        staging=plan.staging,
        policy=partial(AgedFrequency, experts.num_layers, config.num_experts, plan.prior),
        layers=config.num_layers,
        tables=tables,
        depth=options.io_depth,
        prefetch=options.prefetch,
        pairs=plan.pairs,
        # More than a token uses are wrong for the most part.
        guesses=min(GUESSES, config.experts_per_token),
        verification=plan.verification,
        is_elsewhere=plan.is_elsewhere,
    )
    files = ExpertFiles(experts, options.io)
    try:
        return kind(experts, files, chosen)
    except BaseException:
        files.close()
        raise


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

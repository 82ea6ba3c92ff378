"""Experts of which only a part lives on the card: alone, and in tiny models."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.kernels.gpu.byte_vector import ByteVector, Order, empty_bytes, to_bytes
from edgedsv4.kernels.gpu.expert_matmul import expert_scratch
from edgedsv4.kernels.gpu.host_calls import HostCalls, host_calls
from edgedsv4.kernels.native.library import library
from edgedsv4.model.expert_stager import ExpertStager
from edgedsv4.model.gpu_banks import ExpertPlacement, PlacedExperts, PlacedLayer
from edgedsv4.model.gpu_buffers import CardExperts
from edgedsv4.model.gpu_hybrid import (
    CallingHost,
    HybridExperts,
    HybridParts,
    StreamHost,
)
from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.model.gpu_network import NetworkLoader
from edgedsv4.model.gpu_token_experts import rounded_input
from edgedsv4.model.host_experts import HostExperts, HostSetting, StepMemory, step_words
from edgedsv4.model.kv_cache import Numerics

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.model.model import Model
    from edgedsv4.model.moe import ExpertSource

PARTS = ("w1", "w3", "w2")


class Traveller:
    """A source whose experts stay only until the next are fetched, and then are overwritten."""

    is_resident = False

    def __init__(self, source: ExpertSource) -> None:
        self._source = source
        self._lent: list[Any] = []
        self.fetched: list[tuple[int, tuple[int, ...]]] = []

    def check_unchanged(self) -> None:
        """There is no file."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[Any]:
        for matrix in self._lent:
            matrix.data.view(torch.uint8).fill_(0xFF)
        copies = [
            replace(expert, **{name: _copied(getattr(expert, name)) for name in PARTS})
            for expert in self._source.fetch(layer, expert_ids)
        ]
        self._lent = [getattr(expert, name) for expert in copies for name in PARTS]
        self.fetched.append((layer, tuple(expert_ids)))
        return copies


def _copied(matrix: Any) -> Any:
    return replace(matrix, data=matrix.data.clone())


def calls() -> HostCalls:
    """Those of the runtime, or calls that are made at once where there is none."""
    found = host_calls(torch.device(DEVICE))
    if found is not None:
        return found
    _, ffi = library()

    def launch(_stream: int, function: int, data: int) -> int:
        ffi.cast("void (*)(void *)", function)(ffi.cast("void *", data))
        return 0

    return HostCalls(launch, "at once")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a hybrid is made."""

    mode: CpuExperts = "auto"
    on_stream: bool = True
    prefers_cpu: Callable[[int], bool] = lambda tokens: tokens < 3
    has_int8: bool = False
    family: str = ""
    """Whose kernels the card runs."""


def hybrid_of(
    config: ModelConfig,
    source: ExpertSource,
    layers: Sequence[PlacedLayer],
    limits: Sequence[float],
    setting: Setting,
) -> HybridExperts:
    """Who computes and who copies, on the device under test."""
    device = torch.device(DEVICE)
    host: HostExperts | None = None
    token_host: StreamHost | CallingHost | None = None
    if setting.mode != "off":
        how = HostSetting(threads=2, has_int8=setting.has_int8, is_locked=DEVICE != "cpu")
        places = [layer.places if setting.mode == "auto" else None for layer in layers]
        host = HostExperts(config, limits, source, places, how)
        stream: Any = None if DEVICE == "cpu" else torch.cuda.Stream()
        token_host = StreamHost(host, calls(), stream) if setting.on_stream else CallingHost(host)
    return HybridExperts(
        config,
        HybridParts(
            mode=setting.mode,
            stager=ExpertStager(source, config.num_experts, device, threads=2),
            host=host,
            token_host=token_host,
            prefers_cpu=setting.prefers_cpu,
        ),
    )


class Experts:
    """The routed experts of a model alone: what a step and a chunk ask of them."""

    def __init__(
        self,
        config: ModelConfig,
        source: ExpertSource,
        resident: Sequence[Sequence[int]],
        *,
        staged: int = 3,
        limit: float = 1.5,
        setting: Setting | None = None,
    ) -> None:
        self.config, self.limit = config, limit
        setting = setting or Setting()
        self._family, self._rounds = setting.family, setting.has_int8
        device = torch.device(DEVICE)
        placement = ExpertPlacement(tuple(tuple(ids) for ids in resident), staged)
        made = PlacedExperts(config, source, placement, device, "F32", lambda _layer: None)
        self.layers = [made.fill(layer) for layer in range(len(resident))]
        limits = [limit] * len(resident)
        self.hybrid = hybrid_of(config, source, self.layers, limits, setting)
        plan = SimpleNamespace(swiglu_limit=limit)
        self._records: list[Any] = [SimpleNamespace(plan=plan, placed=p) for p in self.layers]
        self.buffers: Any = self._buffers(device)

    def _buffers(self, device: torch.device) -> SimpleNamespace:
        hidden, k = self.config.hidden_size, self.config.experts_per_token
        memory = StepMemory(hidden, k, torch.zeros(step_words(hidden, k)[2], device=device))
        inner = torch.full((k * self.config.expert_width,), torch.nan, device=device)
        o, host_out = (torch.full((1, hidden), torch.nan, device=device) for _ in range(2))

        @cache
        def rounded(columns: int, order: Order) -> ByteVector:
            return empty_bytes(columns, order, device)

        return SimpleNamespace(
            for_host=memory,
            x=memory.x,
            expert_ids=memory.ids,
            expert_weights=memory.weights,
            card=CardExperts(k, device),
            inner=inner,
            o=o,
            host_out=host_out,
            rounded=rounded,
        )

    def token(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[D] of a token with x [D], ids and weights [k]."""
        buffers = self.buffers
        buffers.x.copy_(x[None])
        buffers.expert_ids.copy_(ids[None])
        buffers.expert_weights.copy_(weights[None])
        self.hybrid.begin_token()
        record = self._records[layer]
        rounded = self._rounded(layer)
        parts = self.hybrid.token(record, self.layers[layer], buffers, rounded, self._family)
        total = parts[0] if parts[1] is None else parts[0] + parts[1]
        found = total[0].cpu().clone()
        self.hybrid.check()
        return found

    def _rounded(self, layer: int) -> ByteVector | None:
        """x as bytes, as a step would have it."""
        if not (self._rounds and self.hybrid.has_tokens_on_card):
            return None
        bank = self.layers[layer].bank.experts
        rounded = rounded_input(bank, self.buffers, self._family)
        if rounded is not None:
            to_bytes(rounded, self.buffers.x)
        return rounded

    def chunk(self, x: Tensor, ids: Tensor, weights: Tensor, *, precise: bool) -> list[Tensor]:
        """[T, D] of each layer, all with the same inputs."""
        config, device = self.config, torch.device(DEVICE)
        sizes = (config.experts_per_token, config.num_experts, config.hidden_size)
        scratch = expert_scratch(
            len(x), *sizes, config.expert_width, device=device, precise=precise
        )
        chosen = (x.to(device), ids.to(device), weights.to(device))
        results = []
        self.hybrid.begin_chunk(self._records, len(x))
        for record, placed in zip(self._records, self.layers, strict=True):
            out = torch.full(x.shape, torch.nan, device=device)
            self.hybrid.chunk(out, chosen, record, placed, scratch, precise=precise)
            results.append(out.cpu())
        self.hybrid.end_chunk()
        return results


def hybrid_model_of(
    model: Model, resident: Sequence[Sequence[int]], setting: Setting, *, staged: int = 3
) -> GpuModel:
    """The weights of a CPU model, some of the experts on the device under test."""
    device = torch.device(DEVICE)
    config, profile = model.config, model.numerics.profile
    numerics = Numerics(profile=profile, dtype=torch.float32, device=device)
    placement = ExpertPlacement(tuple(tuple(ids) for ids in resident), staged)
    loader = NetworkLoader(config, device, "F32", placement=placement)
    network = loader.load(model.weights, model.experts)
    limits = [plan.swiglu_limit for plan in model.plans]
    setting = replace(setting, has_int8=profile == "default")
    layers = network.placed_layers()
    limits += limits[-1:] * (len(layers) - len(limits))
    hybrid = hybrid_of(config, model.experts, layers, limits, setting)
    network = replace(network, hybrid=hybrid)
    family = setting.family
    return GpuModel(config, model.weights, model.experts, numerics, network=network, family=family)

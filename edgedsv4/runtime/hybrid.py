"""Puts together who computes and who copies where a card holds only a part of the experts."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from edgedsv4.kernels.gpu.host_calls import host_calls
from edgedsv4.model.expert_stager import ExpertStager
from edgedsv4.model.gpu_hybrid import (
    CallingHost,
    HybridExperts,
    HybridParts,
    StreamHost,
)
from edgedsv4.model.host_experts import HostExperts, HostSetting
from edgedsv4.model.layer_plan import draft_plan, layer_plans
from edgedsv4.model.moe import ExpertStream
from edgedsv4.model.native_network import instruction_set
from edgedsv4.runtime.expert_rates import few_tokens, measure_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.kernels.gpu.host_calls import HostCalls
    from edgedsv4.model.gpu_banks import PlacedLayer
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.model.moe import ExpertSource


def with_hybrid(
    network: DeviceNetwork,
    config: ModelConfig,
    source: ExpertSource,
    *,
    mode: CpuExperts,
    setting: HostSetting,
    device: torch.device,
) -> DeviceNetwork:
    """A network of placed layers with somebody who computes their experts.

    Args:
        network: its layers are placed.
        config: shape of the model.
        source: of the experts, in host memory or a stream of them.
        mode: what the CPU computes.
        setting: threads and precision.
        device: the card.

    Raises:
        BackendUnavailableError: the CPU has to compute, and the C kernels cannot.
    """
    layers = network.placed_layers()
    stager = ExpertStager(source, config.num_experts, device, setting.threads)
    host: HostExperts | None = None
    token_host: StreamHost | CallingHost | None = None
    prefers_cpu: Callable[[int], bool] = _never
    if mode != "off":
        host = _host(config, source, layers, mode, setting)
        token_host = _token_host(host, host_calls(device), device)
    if mode == "on":
        # Not by measured figures: the same chunk must have the same bits whenever it comes.
        prefers_cpu = partial(few_tokens, config, instruction_set(), has_int8=setting.has_int8)
    elif host is not None:
        rates = measure_rates(host, config, device, setting.threads)
        (expert,) = source.fetch(0, (0,))
        stored = sum(matrix.data.nbytes for matrix in (expert.w1, expert.w3, expert.w2))
        prefers_cpu = cache(partial(rates.prefers_cpu, config, stored))
        if isinstance(source, ExpertStream):
            source.end_forward(0)
    parts = HybridParts(
        mode=mode, stager=stager, host=host, token_host=token_host, prefers_cpu=prefers_cpu
    )
    return replace(network, hybrid=HybridExperts(config, parts))


def _never(_tokens: int) -> bool:
    return False


def _host(
    config: ModelConfig,
    source: ExpertSource,
    layers: Sequence[PlacedLayer],
    mode: CpuExperts,
    setting: HostSetting,
) -> HostExperts:
    plans = [*layer_plans(config), draft_plan(config)]
    limits = [plan.swiglu_limit for plan in plans[: len(layers)]]
    places = [layer.places if mode == "auto" else None for layer in layers]
    return HostExperts(config, limits, source, places, setting)


def _token_host(
    host: HostExperts, calls: HostCalls | None, device: torch.device
) -> StreamHost | CallingHost:
    """By the stream where its runtime can call, and the experts need no Python between layers."""
    if calls is None or not host.is_free_running:
        return CallingHost(host)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return StreamHost(host, calls, stream)

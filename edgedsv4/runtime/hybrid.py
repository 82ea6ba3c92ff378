"""Puts together who computes and who copies where a card holds only a part of the experts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgedsv4.kernels.gpu.host_calls import host_calls
from edgedsv4.model.expert_stager import ExpertStager
from edgedsv4.model.gpu_hybrid import (
    CallingHost,
    HybridExperts,
    HybridParts,
    StreamHost,
)
from edgedsv4.model.gpu_residents import Residents
from edgedsv4.model.host_experts import HostExperts, HostSetting
from edgedsv4.model.layer_plan import draft_plan, layer_plans
from edgedsv4.model.moe import ExpertStream
from edgedsv4.model.native_network import instruction_set
from edgedsv4.runtime.expert_rates import few_tokens, measure_rates

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import numpy.typing as npt

    from edgedsv4.config import CpuExperts, ModelConfig
    from edgedsv4.kernels.gpu.host_calls import HostCalls
    from edgedsv4.model.gpu_banks import PlacedLayer
    from edgedsv4.model.gpu_network import DeviceNetwork
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import MoeWeights


KNOWN_TOKENS = 500
"""Tokens that a frequency file counts for, beside those that are decoded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridWork:
    """How the work is shared out."""

    mode: CpuExperts
    """What the CPU computes."""
    setting: HostSetting
    """Threads and precision."""
    device: torch.device
    """The card."""
    routers: Sequence[MoeWeights] = ()
    """Of all layers, in host memory, to guess what the next layer will use."""
    counts: Sequence[Sequence[int]] | None = None
    """[L][E], how often each expert was chosen in a corpus, where that is known."""


def with_hybrid(
    network: DeviceNetwork, config: ModelConfig, source: ExpertSource, work: HybridWork
) -> DeviceNetwork:
    """A network of placed layers with somebody who computes their experts.

    Args:
        network: its layers are placed.
        config: shape of the model.
        source: of the experts, in host memory or a stream of them.
        work: how it is shared out.

    Raises:
        BackendUnavailableError: the CPU has to compute, and the C kernels cannot.
    """
    mode, setting, device = work.mode, work.setting, work.device
    layers = network.placed_layers()
    stager = ExpertStager(source, config.num_experts, device, setting.threads)
    host: HostExperts | None = None
    token_host: StreamHost | CallingHost | None = None
    prefers_cpu: Callable[[int], bool] = _never
    if mode != "off":
        host = _host(config, source, layers, work)
        token_host = _token_host(host, host_calls(device), device)
    if mode == "on":
        # Not by measured figures: the same chunk must have the same bits whenever it comes.
        prefers_cpu = partial(few_tokens, config, instruction_set(), has_int8=setting.has_int8)
    elif host is not None:
        rates = measure_rates(host, config, device, setting.threads)
        (expert,) = source.fetch(0, (0,))
        stored = sum(matrix.data.nbytes for matrix in (expert.w1, expert.w3, expert.w2))
        prefers_cpu = cache(partial(rates.prefers_cpu, config, stored))
    residents = None
    if mode == "auto" and host is not None:
        # A draft block's experts stay: its tokens are evaluated as chunks.
        counted = layers[: config.num_layers]
        residents = Residents(counted, stager.replace, host.take_over, _known(work.counts, config))
        residents.prepare()
    if isinstance(source, ExpertStream):
        source.end_forward(0)  # the thread that opens a model may never ask again
    parts = HybridParts(
        mode=mode,
        stager=stager,
        host=host,
        token_host=token_host,
        prefers_cpu=prefers_cpu,
        residents=residents,
    )
    return replace(network, hybrid=HybridExperts(config, parts))


def _known(
    counts: Sequence[Sequence[int]] | None, config: ModelConfig
) -> npt.NDArray[np.float64] | None:
    """What a corpus says, as if `KNOWN_TOKENS` tokens had been decoded, [L, E]."""
    if counts is None:
        return None
    known = np.asarray(counts[: config.num_layers], dtype=np.float64)
    total = np.maximum(known.sum(axis=1, keepdims=True), 1.0)
    known *= KNOWN_TOKENS * config.experts_per_token / total
    return known


def _never(_tokens: int) -> bool:
    return False


def _host(
    config: ModelConfig, source: ExpertSource, layers: Sequence[PlacedLayer], work: HybridWork
) -> HostExperts:
    plans = [*layer_plans(config), draft_plan(config)]
    limits = [plan.swiglu_limit for plan in plans[: len(layers)]]
    places = [layer.places if work.mode == "auto" else None for layer in layers]
    return HostExperts(config, limits, source, places, work.setting, work.routers)


def _token_host(
    host: HostExperts, calls: HostCalls | None, device: torch.device
) -> StreamHost | CallingHost:
    """By the stream where its runtime can call, and the experts need no Python between layers."""
    if calls is None or not host.is_free_running:
        return CallingHost(host)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    return StreamHost(host, calls, stream)

"""One decoder layer: hyper-connection, attention, hyper-connection, experts."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.kernels.mhc import hyper_mix, read_streams, write_streams
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.model.attention import attention
from edgedsv4.model.moe import ExpertSource, moe

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import KvCache
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.step import Step
    from edgedsv4.model.weights import HyperWeights, LayerWeights


def decoder_layer(
    streams: Tensor,
    weights: LayerWeights,
    plan: LayerPlan,
    cache: KvCache,
    experts: ExpertSource,
    step: Step,
) -> Tensor:
    """Carry the residual streams through one layer and update its state.

    Args:
        streams: [T, hc, D].
        weights: of this layer.
        plan: of this layer.
        cache: state of the timeline.
        experts: source of the routed experts.
        step: the chunk.

    Returns:
        [T, hc, D].
    """
    streams = _sublayer(
        streams,
        weights.hc_attn,
        weights.attn_norm,
        lambda x: attention(x, weights.attention, plan, cache, step),
        step,
    )
    return _sublayer(
        streams,
        weights.hc_ffn,
        weights.ffn_norm,
        lambda x: moe(x, weights.moe, plan, experts, step),
        step,
    )


def _sublayer(
    streams: Tensor,
    hyper: HyperWeights,
    norm: Tensor,
    body: Callable[[Tensor], Tensor],
    step: Step,
) -> Tensor:
    mix = hyper_mix(
        streams, hyper.fn, hyper.base, hyper.scale, step.hyper_constants, backend=step.backend
    )
    x = read_streams(streams, mix.pre)
    x = rms_norm(x, norm, step.config.rms_norm_eps, backend=step.backend)
    return write_streams(streams, body(x), mix)

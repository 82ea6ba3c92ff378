"""What the kernels of one layer are told about a timeline: its tensors, described once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.kernels.gpu.prepare import AttentionState, CompressorState

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.gpu_network import DeviceCompressor, DeviceLayer
    from edgedsv4.model.kv_cache import CompressorCache, KvCache
    from edgedsv4.model.row_store import Parts


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer of a timeline."""

    attention: AttentionState
    compressed: Parts | None
    """Compressed rows that the layer attends to."""
    keys: Parts | None
    """Index keys, on layers with an indexer."""
    is_rounded: bool
    """Index queries are rounded as the keys are."""


def layer_state(config: ModelConfig, layer: DeviceLayer, cache: KvCache) -> LayerState:
    """Describe the state of a layer."""
    plan = layer.plan
    own = cache.layers[plan.layer]
    is_default = cache.numerics.profile == "default"
    source = None if plan.kv_source is None else cache.layers[plan.kv_source].compressor
    attention = AttentionState(
        q_norm=layer.q_norm,
        kv_norm=layer.kv_norm,
        window=own.window.parts,
        compressor=_compressor(layer.compressor, own.compressor, has_hadamard=False),
        indexer=_compressor(layer.indexer, own.indexer, has_hadamard=is_default),
        ratio=plan.ratio,
        rope_dim=config.rope_dim,
        eps=config.rms_norm_eps,
    )
    return LayerState(
        attention=attention,
        compressed=None if source is None else source.rows.parts,
        keys=None if own.indexer is None else own.indexer.rows.parts,
        is_rounded=is_default,
    )


def _compressor(
    weights: DeviceCompressor | None, cache: CompressorCache | None, *, has_hadamard: bool
) -> CompressorState | None:
    if weights is None or cache is None:
        return None
    return CompressorState(
        ape=weights.ape,
        norm=weights.norm,
        ring=cache.raw.parts[0],
        rows=cache.rows.parts,
        has_hadamard=has_hadamard,
    )

"""A timeline's state as the C kernels see it: the same tensors as `KvCache`, described once.

Rows that a chunk adds to the rings wait in the working memory of its forward and enter them at
`commit_staged`; compressed rows are written past the end of the timeline, where nothing reads.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from edgedsv4.kernels.native.library import library, pointer
from edgedsv4.model.kv_cache import CompressorCache, KvCache, LayerCache

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.model.kv_cache import Numerics
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.native_network import NativeLayers
    from edgedsv4.model.row_store import Parts
    from edgedsv4.model.weights import CompressorWeights

_FLOATS, _FP8, _FP4 = 0, 1, 2
"""Formats of `dk_rows`."""


class NativeKvCache(KvCache):
    """State of one timeline that the C kernels fill.

    Args:
        config: shape of the model.
        layers: whose state it is; the records must outlive the cache.
        capacity: tokens it holds.
        numerics: how rows are stored.
    """

    def __init__(
        self, config: ModelConfig, layers: NativeLayers, *, capacity: int, numerics: Numerics
    ) -> None:
        super().__init__(config, layers.plans, capacity=capacity, numerics=numerics)
        lib, ffi = library()
        self._config = config
        self.native_layers = layers
        """Whose state this is; position biases and norms are pointed at."""
        self.states = ffi.new("dk_layer_state[]", layers.count)
        for index, plan in enumerate(layers.plans):
            self._fill_state(self.states[index], plan, layers)
        for index, plan in enumerate(layers.plans):
            self.states[index].compressed = self._compressed(plan, layers)
        self.staged_bytes: int = lib.dk_stage(self.states, layers.count)
        self._ring_slots = [(ring, ring.slots) for _, ring in self._rings()]

    def commit_staged(self, step: Any, count: int) -> None:
        """Make the `count` tokens of a `dk_step` part of the timeline."""
        lib, _ = library()
        end = self._begin_writing() + count
        lib.dk_commit(self.states, len(self.states), step)
        for ring, slots in self._ring_slots:
            ring.oldest = max(ring.oldest, end - slots)
        self.length = end

    def _fill_state(self, state: Any, plan: LayerPlan, layers: NativeLayers) -> None:
        layer: LayerCache = self.layers[plan.layer]
        attention = layers.weights[layers.plans.index(plan)].attention
        is_default = self.numerics.profile == "default"
        rope = self._config.rope_dim
        state.slots = layer.window.slots
        row_format = _FP8 if is_default else _FLOATS
        _fill_rows(state.ring, layer.window.parts, row_format, self._config.head_dim, rope)
        if layer.compressor is not None and attention.compressor is not None:
            self._fill_compressor(
                state.compressor, layer.compressor, attention.compressor, plan, row_format
            )
        if layer.indexer is not None and attention.indexer is not None:
            key_format = _FP4 if is_default else _FLOATS
            weights = attention.indexer.compressor
            self._fill_compressor(state.indexer, layer.indexer, weights, plan, key_format)
            state.indexer.has_hadamard = is_default

    def _fill_compressor(
        self,
        record: Any,
        cache: CompressorCache,
        weights: CompressorWeights,
        plan: LayerPlan,
        row_format: int,
    ) -> None:
        width = weights.norm.shape[0]
        _fill_rows(record.rows, cache.rows.parts, row_format, width, self._config.rope_dim)
        record.ring = pointer(cache.raw.parts[0])
        record.slots = cache.raw.slots
        record.ape = pointer(weights.ape)
        record.norm = pointer(weights.norm)
        record.width = width
        record.ratio = plan.ratio
        record.series = 2 if plan.has_overlap else 1

    def _compressed(self, plan: LayerPlan, layers: NativeLayers) -> Any:
        """Address of the compressed rows that a layer attends to."""
        _, ffi = library()
        if plan.kv_source is None:
            return ffi.NULL
        sources = [other.layer for other in layers.plans]
        return ffi.addressof(self.states[sources.index(plan.kv_source)].compressor, "rows")


def _fill_rows(record: Any, parts: Parts, row_format: int, width: int, rope: int) -> None:
    """Describe the memory of encoded rows in a `dk_rows`."""
    _, ffi = library()
    data = parts[0]
    record.data = ffi.cast("uint8_t *", data.data_ptr())
    record.data_stride = data.stride(0) * data.element_size()
    record.format = row_format
    record.width = width
    record.rope = rope
    if len(parts) > 1:
        record.scales = ffi.cast("uint8_t *", parts[1].data_ptr())
        record.scale_stride = parts[1].stride(0)

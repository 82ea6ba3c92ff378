"""Attention of one layer: low-rank queries over window rows and compressed rows together.

x -> qr = norm(wq_a x) -> q = wq_b qr, each head normalised without weight, rotated; kv = norm(wkv
x), rotated, rounded as the cache stores it. A query sees the last W rows, itself included, and the
compressed rows it may see (all of them, or those the indexer selects). The output is rotated back,
since values carry the rotation of keys, and goes through the grouped low-rank projection. Source:
DeepSeek-V4 reference code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.grouped_output import grouped_output
from edgedsv4.kernels.quant_matmul import quant_matmul
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.kernels.rope import apply_rope
from edgedsv4.kernels.sparse_attention import sparse_attention
from edgedsv4.model.compressor import compress
from edgedsv4.model.indexer import select_rows

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import KvCache, LayerCache
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.row_store import GrowingRows
    from edgedsv4.model.step import Step
    from edgedsv4.model.weights import AttentionWeights

ATTENTION_WORKSPACE_BYTES = 64 << 20
"""Bound of the rows gathered for one tile of queries (a single query may take more)."""


def attention(
    x: Tensor, weights: AttentionWeights, plan: LayerPlan, cache: KvCache, step: Step
) -> Tensor:
    """Attend and update the layer's state.

    Args:
        x: [T, D], normalised input of the sublayer.
        weights: of this layer.
        plan: of this layer.
        cache: state of the timeline.
        step: the chunk.

    Returns:
        [T, D].
    """
    config, backend = step.config, step.backend
    layer = cache.layers[plan.layer]
    table = step.query_table(plan.rope)
    qr = quant_matmul(x, weights.wq_a, backend=backend)
    qr = rms_norm(qr, weights.q_norm, config.rms_norm_eps, backend=backend)
    q = quant_matmul(qr, weights.wq_b, backend=backend)
    q = q.view(step.count, config.num_heads, config.head_dim)
    q = apply_rope(rms_norm(q, None, config.rms_norm_eps, backend=backend), table, backend=backend)

    window, first = _window_rows(x, weights, plan, layer, step)
    selected = _update_compressed(x, qr, weights, plan, layer, step)
    compressed = None
    if plan.kv_source is not None:
        source = cache.layers[plan.kv_source].compressor
        compressed = None if source is None else source.rows
    keys = _Keys(window, first, compressed, selected)
    outputs = _attend(q, keys, weights.sink, plan, step)

    outputs = apply_rope(outputs, table, inverse=True, backend=backend)
    grouped = grouped_output(outputs, weights.wo_a, config.output_groups, backend=backend)
    return quant_matmul(grouped, weights.wo_b, backend=backend)


class _Keys:
    """Rows that the queries of one chunk can attend to."""

    def __init__(
        self, window: Tensor, first: int, compressed: GrowingRows | None, selected: Tensor | None
    ) -> None:
        self.window = window  # [S, d], positions first .. first + S - 1
        self.first = first
        self.compressed = compressed
        self.selected = selected  # [T, k], or None for all visible rows


def _window_rows(
    x: Tensor, weights: AttentionWeights, plan: LayerPlan, layer: LayerCache, step: Step
) -> tuple[Tensor, int]:
    """Window rows of the chunk and of the tokens before it, and the position of the first."""
    kv = quant_matmul(x, weights.wkv, backend=step.backend)
    kv = rms_norm(kv, weights.kv_norm, step.config.rms_norm_eps, backend=step.backend)
    kv = apply_rope(kv, step.query_table(plan.rope), backend=step.backend)
    first = layer.first_needed(layer.window, step.start)
    kept = layer.window.read(first, step.start)
    return torch.cat((kept, layer.window.stage(kv))), first


def _update_compressed(
    x: Tensor,
    qr: Tensor,
    weights: AttentionWeights,
    plan: LayerPlan,
    layer: LayerCache,
    step: Step,
) -> Tensor | None:
    """Add finished rows and index keys; the selection of an indexed layer."""
    if weights.compressor is not None and layer.compressor is not None:
        compress(x, weights.compressor, plan, layer.compressor, step)
    if weights.indexer is None or layer.indexer is None:
        return None
    return select_rows(x, qr, weights.indexer, plan, layer.indexer, step)


def _attend(q: Tensor, keys: _Keys, sink: Tensor, plan: LayerPlan, step: Step) -> Tensor:
    """Attention over tiles of queries that keep the gathered rows within the workspace."""
    config = step.config
    rows_per_query = min(config.window, step.stop) + _compressed_count(keys, plan, step)
    per_query = rows_per_query * (config.head_dim + 2 * config.num_heads) * 8
    tile = max(1, ATTENTION_WORKSPACE_BYTES // per_query)
    outputs = []
    for first in range(0, step.count, tile):
        step.hooks.check_stop()
        part = slice(first, min(first + tile, step.count))
        rows, ids = _rows_of_tile(keys, plan, step, part)
        outputs.append(sparse_attention(q[part], rows, ids, sink, backend=step.backend))
    return torch.cat(outputs)


def _compressed_count(keys: _Keys, plan: LayerPlan, step: Step) -> int:
    if keys.compressed is None:
        return 0
    if keys.selected is not None:
        return keys.selected.shape[1]
    return plan.visible_rows(step.stop)


def _rows_of_tile(keys: _Keys, plan: LayerPlan, step: Step, part: slice) -> tuple[Tensor, Tensor]:
    """Rows [N, d] of a tile of queries, and which of them each query attends to [T, K]."""
    positions = step.positions[part]
    low = max(keys.first, int(positions[0]) - step.config.window + 1)
    window = keys.window[low - keys.first : int(positions[-1]) + 1 - keys.first]
    span = torch.arange(min(step.config.window, step.stop), device=positions.device)
    ids = positions[:, None] - span.flip(0) - low  # [T, W], oldest first
    ids = ids.masked_fill(ids < 0, -1)
    if keys.compressed is None:
        return window, ids
    visible = (positions + 1) // plan.ratio
    if keys.selected is None:
        count = int(visible[-1])
        rows = keys.compressed.read(0, count)
        entries = torch.arange(count, device=positions.device).expand(positions.shape[0], -1)
        entries = entries.masked_fill(entries >= visible[:, None], -1)
    else:
        wanted, places = torch.unique(keys.selected[part], return_inverse=True)
        absent = int((wanted < 0).sum())  # 0 or 1: unique sorts, so -1 comes first
        rows = keys.compressed.gather(wanted[absent:])
        entries = places - absent
    offset = window.shape[0]
    entries = torch.where(entries < 0, entries, entries + offset)
    return torch.cat((window, rows)), torch.cat((ids, entries), dim=-1)

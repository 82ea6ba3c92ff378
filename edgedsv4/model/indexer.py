"""The lightning indexer: which compressed rows each query attends to.

While a query sees no more rows than it may select, it takes them all and nothing is scored; the
index keys are produced all the same, since later queries need them. Scoring goes over tiles of
queries and keys and carries the best rows along, so its memory does not grow with the context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.index_scores import index_scores
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.kv_quant import dequantize_index_keys, quantize_index_keys
from edgedsv4.kernels.quant_matmul import quant_matmul
from edgedsv4.kernels.rope import apply_rope
from edgedsv4.model.compressor import compress

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import CompressorCache
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.row_store import GrowingRows
    from edgedsv4.model.step import Step
    from edgedsv4.model.weights import IndexerWeights

KEY_TILE = 2048
"""Index keys scored at once."""
SCORE_WORKSPACE_BYTES = 64 << 20
"""Bound of the per-head scores of one tile."""


def select_rows(
    x: Tensor,
    qr: Tensor,
    weights: IndexerWeights,
    plan: LayerPlan,
    cache: CompressorCache,
    step: Step,
) -> Tensor | None:
    """Update the index keys and select the rows of every query.

    Args:
        x: [T, D], normalised input of the sublayer.
        qr: [T, Rq], normalised low-rank query.
        weights: of this layer's indexer.
        plan: of the layer.
        cache: state of the indexer.
        step: the chunk.

    Returns:
        [T, k] int64 in ascending order, then -1 where a query sees fewer rows; None when every
        query takes all it sees.
    """
    compress(x, weights.compressor, plan, cache, step, transform=step.is_quantized)
    if plan.visible_rows(step.stop) <= step.config.index_topk:
        return None
    queries = _queries(qr, weights, plan, step)
    head_weights = quant_matmul(x, weights.weights_proj, backend=step.backend)
    head_weights = head_weights * (step.config.index_dim * step.config.index_heads) ** -0.5
    step.watch(head_weights)
    visible = (step.positions + 1) // plan.ratio
    return _best_rows(queries, head_weights, visible, cache.rows, plan, step)


def _queries(qr: Tensor, weights: IndexerWeights, plan: LayerPlan, step: Step) -> Tensor:
    """[T, heads, dim], rotated; rounded like the keys where the profile rounds them."""
    config = step.config
    q = quant_matmul(qr, weights.wq_b, backend=step.backend)
    q = q.view(step.count, config.index_heads, config.index_dim)
    q = apply_rope(q, step.query_table(plan.rope), backend=step.backend)
    step.watch(q)
    if not step.is_quantized:
        return q
    flat = hadamard(q, backend=step.backend).flatten(0, 1)
    return dequantize_index_keys(*quantize_index_keys(flat), q.dtype).view_as(q)


def _best_rows(
    queries: Tensor,
    head_weights: Tensor,
    visible: Tensor,
    keys: GrowingRows,
    plan: LayerPlan,
    step: Step,
) -> Tensor:
    per_query = queries.shape[1] * KEY_TILE * 8
    tile = max(1, SCORE_WORKSPACE_BYTES // per_query)
    selected = []
    scored = []
    for first in range(0, step.count, tile):
        part = slice(first, first + tile)
        ids, scores = _scan_keys(
            queries[part],
            head_weights[part],
            visible[part],
            keys,
            plan.visible_rows(step.stop),
            step,
        )
        selected.append(ids)
        scored.append(scores)
    ids = torch.cat(selected)
    if step.hooks.on_topk is not None:
        ids = step.hooks.on_topk(plan.layer, torch.cat(scored), ids)
    return ascending(ids)


def ascending(ids: Tensor) -> Tensor:
    """The same rows in the order of the timeline, -1 last.

    Attention adds rows in the order they are listed in, and a query that takes all rows lists them
    by age: without this a query's rounding would depend on what else is in its chunk.
    """
    last = torch.iinfo(ids.dtype).max
    ordered = torch.where(ids < 0, last, ids).sort(dim=-1).values
    return torch.where(ordered == last, -1, ordered)


def _scan_keys(
    queries: Tensor,
    head_weights: Tensor,
    visible: Tensor,
    keys: GrowingRows,
    count: int,
    step: Step,
) -> tuple[Tensor, Tensor]:
    """Best rows of a tile of queries; all masked scores too when a hook asks for them."""
    device = queries.device
    best_ids = torch.empty((queries.shape[0], 0), dtype=torch.int64, device=device)
    best = head_weights.new_empty((queries.shape[0], 0))
    watched = []
    for first in range(0, count, KEY_TILE):
        step.hooks.check_stop()
        stop = min(first + KEY_TILE, count)
        scores = index_scores(queries, keys.read(first, stop), head_weights, backend=step.backend)
        rows = torch.arange(first, stop, device=device)
        # Rows kept so far come first: their ids are lower, so ties keep going to the lower row.
        candidates = torch.cat((best_ids, rows.expand(queries.shape[0], -1)), dim=-1)
        best_ids, best = index_topk(
            torch.cat((best.to(scores.dtype), scores), dim=-1),
            candidates,
            visible,
            step.config.index_topk,
            backend=step.backend,
        )
        if step.hooks.on_topk is not None:
            watched.append(scores.masked_fill(rows >= visible[:, None], -torch.inf))
    return best_ids, torch.cat(watched, dim=-1) if watched else best[:, :0]

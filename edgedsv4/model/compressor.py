"""The compressor: every m tokens become one row, from the projections of the tokens themselves.

A token's raw projections (values, and gates with the position bias) are kept until their window is
pooled. A chunk first reads the raw rows that unfinished windows left behind, then stages its own;
rows of windows that end inside the chunk are visible to the chunk's own queries, so compression
comes before attention.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.precision import accumulator
from edgedsv4.kernels.quant_matmul import quant_matmul
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.kernels.rope import apply_rope

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import CompressorCache
    from edgedsv4.model.layer_plan import LayerPlan
    from edgedsv4.model.step import Step
    from edgedsv4.model.weights import CompressorWeights


def compress(
    x: Tensor,
    weights: CompressorWeights,
    plan: LayerPlan,
    cache: CompressorCache,
    step: Step,
    *,
    transform: bool = False,
) -> None:
    """Add the rows of all windows that end in this chunk to `cache`.

    Args:
        x: [T, D], normalised input of the sublayer.
        weights: of this layer's (or its indexer's) compressor.
        plan: of the layer.
        cache: state of that compressor.
        step: the chunk.
        transform: apply the Hadamard transform to the finished rows (index keys about to be
            rounded).
    """
    raw = _raw_projections(x, weights, plan, step)
    first = plan.first_raw_position(step.start)
    kept = cache.raw.read(first, step.start)
    raw = torch.cat((kept, cache.raw.stage(raw)))  # positions first .. stop - 1
    finished = range(plan.visible_rows(step.start), plan.visible_rows(step.stop))
    if not finished:
        return
    windows = raw[: finished.stop * plan.ratio - first].view(-1, plan.ratio, raw.shape[-1])
    has_previous = plan.has_overlap and finished.start > 0
    values, gates = windows.chunk(2, dim=-1)
    pooled = pool_windows(
        values, gates, has_overlap=plan.has_overlap, previous=has_previous, backend=step.backend
    )
    rows = rms_norm(
        pooled.to(step.dtype), weights.norm, step.config.rms_norm_eps, backend=step.backend
    )
    positions = torch.arange(finished.start, finished.stop, device=x.device) * plan.ratio
    rows = apply_rope(rows, step.table(plan.rope, positions), backend=step.backend)
    step.watch(rows)
    if transform:
        rows = hadamard(rows, backend=step.backend)
    cache.rows.write(finished.start, rows)


def _raw_projections(x: Tensor, weights: CompressorWeights, plan: LayerPlan, step: Step) -> Tensor:
    """[T, 2 * s * c]: values, then gates with the bias of the token's place in its window."""
    wide = x.to(accumulator(x.dtype))
    values = quant_matmul(wide, weights.wkv, backend=step.backend)
    gates = quant_matmul(wide, weights.wgate, backend=step.backend)
    bias = weights.ape.to(wide.dtype)[step.positions % plan.ratio]
    return torch.cat((values, gates + bias), dim=-1)

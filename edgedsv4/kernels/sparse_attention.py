"""Attention of all heads over listed shared key/value rows, with a sink per head.

s_i = scale * (q . row_i), M = max(s, sink), Z = sum exp(s_i - M) + exp(sink - M), o = sum exp(s_i -
M) row_i / Z: one softmax over window and compressed rows together, keys and values being the same
rows. The sink is a raw logit, not scaled, and adds no value. Source: DeepSeek-V4 reference code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def sparse_attention(
    q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """Attend.

    Args:
        q: [T, H, d], any float dtype.
        rows: [N, d], key/value rows shared by all heads.
        ids: [T, K] int64, rows each query attends to; -1 is no row. A row listed twice counts
            twice.
        sink: [H], a logit per head.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, H, d], dtype of `q`; a query without rows gives 0.

    Raises:
        ShapeError: if the shapes disagree.
    """
    resolve_backend(backend, operation="sparse_attention")
    count, heads, dim = q.shape
    if rows.shape[-1] != dim or ids.shape[0] != count or sink.shape != (heads,):
        raise ShapeError(
            f"sparse_attention: q {list(q.shape)}, rows {list(rows.shape)}, ids {list(ids.shape)},"
            f" sink {list(sink.shape)}"
        )
    if rows.shape[0] == 0 or ids.shape[1] == 0:
        return torch.zeros_like(q)
    return sparse_attention_reference(q, rows, ids, sink)


def sparse_attention_reference(q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor) -> Tensor:
    """The formula of the module docstring, by gathering each query's rows."""
    wide = accumulator(q.dtype)
    absent = (ids < 0)[:, None, :]
    keys = rows.to(wide)[ids.clamp(min=0)]  # [T, K, d]
    scores = torch.matmul(q.to(wide), keys.transpose(1, 2)) * q.shape[-1] ** -0.5  # [T, H, K]
    scores = scores.masked_fill(absent, -torch.inf)
    sink = sink.to(wide)[None, :, None]
    top = torch.maximum(scores.amax(dim=-1, keepdim=True), sink)
    weights = torch.exp(scores - top)
    total = weights.sum(dim=-1, keepdim=True) + torch.exp(sink - top)
    # NaN or infinity in a row that is not attended must not leak in through a weight of zero.
    keys = keys.masked_fill(absent.transpose(1, 2), 0.0)
    return (torch.matmul(weights, keys) / total).to(q.dtype)

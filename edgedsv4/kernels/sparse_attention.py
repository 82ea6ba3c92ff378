"""Attention of all heads over listed shared key/value rows, with a sink per head.

s_i = scale * (q . row_i), M = max(s, sink), Z = sum exp(s_i - M) + exp(sink - M), o = sum exp(s_i -
M) row_i / Z: one softmax over window and compressed rows together, keys and values being the same
rows. The sink is a raw logit, not scaled, and adds no value. Source: DeepSeek-V4 reference code.

The native model calls `dk_attend` with window rings and compressed rows as they are stored; here it
gets float32 rows and a list of ids.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend

_LARGEST_NATIVE_DIM = 16384


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
    available = available_on(q, rows, sink)
    if q.shape[-1] > _LARGEST_NATIVE_DIM:
        available = ("reference",)
    chosen = resolve_backend(backend, available, operation="sparse_attention")
    count, heads, dim = q.shape
    if rows.shape[-1] != dim or ids.shape[0] != count or sink.shape != (heads,):
        raise ShapeError(
            f"sparse_attention: q {list(q.shape)}, rows {list(rows.shape)}, ids {list(ids.shape)},"
            f" sink {list(sink.shape)}"
        )
    if rows.shape[0] == 0 or ids.shape[1] == 0:
        return torch.zeros_like(q)
    if chosen == "native":
        return _sparse_attention_native(q, rows, ids, sink)
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


def _sparse_attention_native(q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor) -> Tensor:
    lib, ffi = library()
    run, (count, heads, dim) = run_here(), q.shape
    # Absent rows end the list there, so they go last; the others keep their order.
    order = (ids < 0).to(torch.int8).argsort(dim=-1, stable=True)
    selected = ids.gather(-1, order).to(torch.int32).contiguous()
    q, rows, sink, out = q.contiguous(), rows.contiguous(), sink.contiguous(), q.new_empty(q.shape)
    stored = ffi.new("dk_rows *")
    stored.data, stored.data_stride, stored.width = pointer(rows, "uint8_t *"), 4 * dim, dim
    keys = ffi.new("dk_attention *")
    keys.compressed, keys.selected, keys.sink = stored, pointer(selected), pointer(sink)
    keys.top, keys.ratio, keys.slots = ids.shape[1], 1, 1
    run.check(lib.dk_attend(run.cdata, pointer(out), pointer(q), keys, 0, count, heads, dim))
    return out

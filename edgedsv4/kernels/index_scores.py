"""Scores of the lightning indexer: S[t, w] = sum_h weights[t, h] * relu(q[t, h] . keys[w]).

The relu comes before the head weights, and the sum is float32. Source: DeepSeek-V4 reference code.

The native model calls `dk_index_select`, which scores keys as they are stored and selects at once;
here it gets float32 keys and returns the scores.
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

_LARGEST_NATIVE_DIM = 1024


def index_scores(q: Tensor, keys: Tensor, weights: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Score every index key against every query.

    Args:
        q: rotated queries, [T, heads, dim], any float dtype.
        keys: index keys, [W, dim].
        weights: head weights, scale factors applied, [T, heads]; signs are free.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, W], accumulator dtype. Causality is not applied here; `index_topk` masks what a token
        may not see.

    Raises:
        ShapeError: if T, heads or dims disagree.
    """
    available = available_on(q, keys, weights)
    if q.shape[-1] > _LARGEST_NATIVE_DIM:
        available = ("reference",)
    chosen = resolve_backend(backend, available, operation="index_scores")
    if q.shape[:2] != weights.shape or q.shape[-1] != keys.shape[-1]:
        raise ShapeError(
            f"index_scores: q {list(q.shape)}, keys {list(keys.shape)},"
            f" weights {list(weights.shape)}"
        )
    if chosen == "native" and q.numel() > 0 and keys.shape[0] > 0:
        return _index_scores_native(q.contiguous(), keys.contiguous(), weights.contiguous())
    return index_scores_reference(q, keys, weights)


def index_scores_reference(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    """The formula of the module docstring."""
    wide = accumulator(q.dtype)
    dots = torch.relu(q.to(wide) @ keys.to(wide).T)
    return torch.matmul(weights.to(wide)[:, None, :], dots).squeeze(1)


def _index_scores_native(q: Tensor, keys: Tensor, weights: Tensor) -> Tensor:
    lib, ffi = library()
    run, (tokens, heads, dim), count = run_here(), q.shape, keys.shape[0]
    stored = ffi.new("dk_rows *")
    stored.data, stored.data_stride, stored.width = pointer(keys, "uint8_t *"), 4 * dim, dim
    nbytes = lib.dk_index_scratch_bytes(count, heads, dim, run.cdata.threads)
    scratch = torch.empty(nbytes, dtype=torch.uint8)
    scores = q.new_empty(tokens, count)
    none = torch.empty(0, dtype=torch.int32)
    # With these every token sees all keys: (start + t + 1) // ratio == count.
    ratio, start = tokens, count * tokens - 1
    status = lib.dk_index_select(
        run.cdata,
        pointer(none),
        pointer(scores),
        pointer(q),
        pointer(weights),
        stored,
        start,
        tokens,
        heads,
        dim,
        ratio,
        0,
        ffi.cast("void *", scratch.data_ptr()),
    )
    run.check(status)
    return scores

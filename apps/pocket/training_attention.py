"""Attention in its training form: whole sequences, no gathering, plain products and one softmax.

A sequence is cut into chunks of W tokens (W the window). A query sees the rows of its own chunk and
of the one before, masked to the last W, and all compressed rows of its layer, masked to those that
are finished and, in a sparse phase, selected by the indexer. Masked products cost more arithmetic
than gathered rows, but have a deterministic backward pass.

A document mask keeps packed documents apart: a query sees only rows of its own document. Positions
run through, because RoPE is relative and compressed rows must stay on their grid of 4 and 128
tokens. A compressed row belongs to the document of its last token and pools no other's tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pocket.losses import HIDDEN, index_divergence

PADDED = -2
"""Document of queries behind the end of a sequence; no row has it but their own."""
NOWHERE = -1
"""Document of the rows before the first chunk; nobody has it."""


@dataclass(frozen=True)
class WindowRows:
    """Key/value rows that each chunk of queries can see raw."""

    keys: Tensor
    """[B, C, 2 W, d]: the chunk before, then the chunk itself."""
    documents: Tensor
    """[B, C, 2 W] int32."""
    first: int = 0
    """Position of the first query."""


@dataclass(frozen=True)
class CompressedRows:
    """Compressed rows of a layer, for all queries."""

    rows: Tensor
    """[B, n, d]."""
    documents: Tensor
    """[B, n] int32, document of each row's last token."""
    ratio: int
    """Tokens per row."""


@dataclass(frozen=True)
class IndexFeatures:
    """What the indexer of a layer scores with; all of it depends on detached inputs only."""

    queries: Tensor
    """[B, C, W, heads, index_dim]."""
    keys: Tensor
    """[B, n, index_dim]."""
    weights: Tensor
    """[B, C, W, heads] float32, scale factors applied."""
    topk: int
    """Rows that a query selects."""
    is_sparse: bool
    """Attend to the selected rows only; else to all, and the indexer learns from all."""


@dataclass(frozen=True)
class Attended:
    """Result of the attention of one layer."""

    outputs: Tensor
    """[B, C, W, H, d], dtype of the queries, still rotated."""
    divergence: Tensor
    """Scalar, sum of the indexer's KL divergence over queries; 0 without an indexer."""
    rows: Tensor
    """Scalar, how many queries that sum is over."""


def window_rows(kv: Tensor, documents: Tensor, window: int) -> WindowRows:
    """Lay out raw rows by chunk.

    Args:
        kv: [B, S, d], S a multiple of `window`.
        documents: [B, S] int32.
        window: W.
    """
    batch, length, dim = kv.shape
    before = torch.cat((kv.new_zeros(batch, window, dim), kv[:, : length - window]), dim=1)
    nowhere = documents.new_full((batch, window), NOWHERE)
    documents_before = torch.cat((nowhere, documents[:, : length - window]), dim=1)
    chunks = (batch, length // window, window)
    return WindowRows(
        torch.cat((before.view(*chunks, dim), kv.view(*chunks, dim)), dim=2),
        torch.cat((documents_before.view(chunks), documents.view(chunks)), dim=2),
    )


def attend(
    q: Tensor,
    documents: Tensor,
    window: WindowRows,
    sink: Tensor,
    compressed: CompressedRows | None,
    index: IndexFeatures | None,
) -> Attended:
    """Attention of consecutive chunks of queries.

    Args:
        q: [B, C, W, H, d], rotated.
        documents: [B, C, W] int32.
        window: rows of these chunks.
        sink: [H].
        compressed: None in a layer without.
        index: None in a layer without an indexer.
    """
    scores, top = _window_scores(q, documents, window, sink)
    if compressed is None or compressed.rows.shape[1] == 0:
        weights = torch.exp(scores - top[..., None])
        total = weights.sum(dim=-1) + torch.exp(sink.float() - top)
        outputs = _weighted_rows(weights, window.keys, q.dtype) / total[..., None]
        zero = total.new_zeros(())
        return Attended(outputs.to(q.dtype), zero, zero)
    visible = _visible(documents, compressed, window.first)  # [B, C, W, n]
    index_scores = None if index is None else score_rows(index)
    if index is not None and index.is_sparse and index_scores is not None:
        visible = select(index_scores.detach(), visible, index.topk)
    far = _compressed_scores(q, compressed.rows).masked_fill(~visible[..., None, :], -torch.inf)
    top = torch.maximum(top, far.detach().amax(dim=-1))
    near_weights = torch.exp(scores - top[..., None])
    far_weights = torch.exp(far - top[..., None])
    total = near_weights.sum(dim=-1) + far_weights.sum(dim=-1) + torch.exp(sink.float() - top)
    outputs = _weighted_rows(near_weights, window.keys, q.dtype)
    outputs = outputs + _weighted_compressed(far_weights, compressed.rows, q.dtype)
    outputs = (outputs / total[..., None]).to(q.dtype)
    if index_scores is None:
        zero = total.new_zeros(())
        return Attended(outputs, zero, zero)
    mass = (far_weights.detach() / total.detach()[..., None]).sum(dim=-2)
    divergence, count = index_divergence(mass, index_scores, visible)
    return Attended(outputs, divergence, count)


def score_rows(index: IndexFeatures) -> Tensor:
    """S[t, w] = sum_h weights[t, h] * relu(q[t, h] . keys[w]) of every query: [B, C, W, n]."""
    batch, chunks, window, heads, dim = index.queries.shape
    queries = index.queries.reshape(batch, chunks * window * heads, dim)
    dots = torch.matmul(queries, index.keys.transpose(1, 2))
    dots = torch.relu(dots.view(batch, chunks, window, heads, -1).float())
    scores: Tensor = (dots * index.weights[..., None]).sum(dim=-2)
    return scores


def select(scores: Tensor, visible: Tensor, k: int) -> Tensor:
    """Mark the k best visible rows of each query, ties to the lower row as `index_topk` does.

    Args:
        scores: [..., n].
        visible: [..., n] bool.
        k: rows to keep.

    Returns:
        [..., n] bool; all of `visible` where it has at most k rows.
    """
    if scores.shape[-1] <= k:
        return visible
    masked = scores.masked_fill(~visible, HIDDEN)
    last = torch.topk(masked, k, dim=-1, sorted=False).values.amin(dim=-1, keepdim=True)
    above = masked > last
    level = masked == last
    room = k - above.sum(dim=-1, keepdim=True)
    chosen: Tensor = above | (level & (level.cumsum(dim=-1, dtype=torch.int32) <= room))
    return torch.logical_and(chosen, visible)


def _window_scores(
    q: Tensor, documents: Tensor, window: WindowRows, sink: Tensor
) -> tuple[Tensor, Tensor]:
    """Masked scores of raw rows [B, C, W, H, 2 W] float32, and the largest logit [B, C, W, H]."""
    batch, chunks, size, heads, dim = q.shape
    scores = torch.matmul(
        q.reshape(batch * chunks, size * heads, dim), window.keys.flatten(0, 1).transpose(1, 2)
    )
    scores = scores.view(batch, chunks, size, heads, 2 * size).float() * dim**-0.5
    query = torch.arange(size, device=q.device)[:, None]
    key = torch.arange(2 * size, device=q.device)[None, :]
    recent = (key > query) & (key <= query + size)  # 0 <= query - (key - W) < W
    same = documents[..., :, None] == window.documents[..., None, :]
    scores = scores.masked_fill(~(recent & same)[..., None, :], -torch.inf)
    return scores, torch.maximum(scores.detach().amax(dim=-1), sink.detach().float())


def _visible(documents: Tensor, compressed: CompressedRows, first: int) -> Tensor:
    """[B, C, W, n]: rows finished at or before the query, of its own document."""
    _, chunks, size = documents.shape
    positions = torch.arange(first, first + chunks * size, device=documents.device)
    finished = (positions.view(chunks, size) + 1) // compressed.ratio
    rows = torch.arange(compressed.rows.shape[1], device=documents.device)
    same = documents[..., None] == compressed.documents[:, None, None, :]
    is_real = documents[..., None] != PADDED
    visible: Tensor = (rows < finished[..., None]) & same & is_real
    return visible


def _compressed_scores(q: Tensor, rows: Tensor) -> Tensor:
    batch, chunks, size, heads, dim = q.shape
    products = torch.matmul(q.reshape(batch, -1, dim), rows.transpose(1, 2))
    scores: Tensor = products.view(batch, chunks, size, heads, -1).float() * dim**-0.5
    return scores


def _weighted_rows(weights: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    batch, chunks, size, heads, count = weights.shape
    flat = weights.to(dtype).reshape(batch * chunks, size * heads, count)
    return torch.matmul(flat, keys.flatten(0, 1)).view(batch, chunks, size, heads, -1).float()


def _weighted_compressed(weights: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    batch, chunks, size, heads, count = weights.shape
    flat = weights.to(dtype).reshape(batch, chunks * size * heads, count)
    return torch.matmul(flat, rows).view(batch, chunks, size, heads, -1).float()


def query_block(index: IndexFeatures | None, chunks: slice) -> IndexFeatures | None:
    """The features of some chunks of queries; the keys stay."""
    if index is None:
        return None
    return replace(index, queries=index.queries[:, chunks], weights=index.weights[:, chunks])

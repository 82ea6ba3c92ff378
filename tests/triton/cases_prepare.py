"""Launches of the kernels that make rows, at the sizes of V4-Flash, for ahead-of-time compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.finish_queries import IndexQueries, Rotation, finish_queries
from edgedsv4.kernels.gpu.nvidia import overlaps
from edgedsv4.kernels.gpu.prepare import (
    AttentionState,
    CompressorState,
    InputProducts,
    RowPositions,
    prepare,
)
from edgedsv4.kernels.gpu.prepare_chunk import StagedRows, prepare_chunk
from edgedsv4.kernels.gpu.rings import commit_rings, read_rings

RANK, DIM, ROPE, INDEX_DIM = 1024, 512, 64, 128
RINGS = {0: 0, 4: 136, 128: 256}
"""Slots of the raw ring, by ratio."""


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor without memory."""
    return torch.empty(shape, dtype=dtype, device="meta")


def stored(rows: int, data: int, scales: int, exact: int) -> tuple[Tensor, ...]:
    """Memory of coded rows, or of float32 rows of width `exact`."""
    if exact:
        return (meta(rows, exact),)
    return meta(rows, data, dtype=torch.uint8), meta(rows, scales, dtype=torch.uint8)


def kv_rows(rows: int, exact: bool) -> tuple[Tensor, ...]:
    """Key/value rows."""
    return stored(rows, DIM + ROPE, 8, DIM * exact)


def _compressor(
    width: int, ratio: int, rows: tuple[Tensor, ...], *, spread: bool
) -> CompressorState:
    row = width * (2 if ratio == 4 else 1)
    return CompressorState(
        ape=meta(ratio, row),
        norm=meta(width),
        ring=meta(RINGS[ratio], 2 * row),
        rows=rows,
        has_hadamard=spread,
    )


def attention_state(ratio: int, exact: bool) -> AttentionState:
    """The state of one layer of V4-Flash with a context of 4,096."""
    compressor = indexer = None
    if ratio:
        compressor = _compressor(DIM, ratio, kv_rows(4096 // ratio, exact), spread=False)
    if ratio == 4:
        keys = stored(1024, INDEX_DIM // 2, 4, INDEX_DIM * exact)
        indexer = _compressor(INDEX_DIM, ratio, keys, spread=not exact)
    return AttentionState(
        q_norm=meta(RANK),
        kv_norm=meta(DIM),
        window=kv_rows(256, exact),
        compressor=compressor,
        indexer=indexer,
        ratio=ratio,
        rope_dim=ROPE,
        eps=1e-6,
    )


def input_products(tokens: int, ratio: int) -> InputProducts:
    """Products of the input as views of the buffers of two launches."""
    first = meta(tokens, RANK + DIM)
    series = 2 if ratio == 4 else 1
    widths = [series * DIM] * 2 + [series * INDEX_DIM] * 2
    c_values, c_gates, i_values, i_gates = meta(tokens, sum(widths)).split(widths, dim=1)
    return InputProducts(
        qr=first[:, :RANK],
        kv=first[:, RANK:],
        compressor=(c_values, c_gates) if ratio else None,
        indexer=(i_values, i_gates) if ratio == 4 else None,
    )


def row_positions(tokens: int, ratio: int) -> RowPositions:
    """Tables of a chunk."""
    windows = tokens // ratio + 1 if ratio else 1
    tables = (meta(count, ROPE // 2) for count in (tokens, tokens, windows, windows))
    cos, sin, window_cos, window_sin = tables
    return RowPositions(
        position=meta(1, dtype=torch.int32),
        cos=cos,
        sin=sin,
        window_cos=window_cos,
        window_sin=window_sin,
        bad=meta(1, dtype=torch.int32),
    )


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Every launch that the forward makes."""
    for ratio in (0, 4, 128):
        for exact in (False, True):
            name = f"ratio {ratio}{' exact' if exact else ''}"
            state = attention_state(ratio, exact)
            yield (
                f"prepare {name}",
                partial(
                    prepare,
                    meta(1, RANK),
                    input_products(1, ratio),
                    state,
                    row_positions(1, ratio),
                    overlap=overlaps(family),
                ),
            )
    yield from _chunk_cases()
    yield from _query_cases(family)


def staged_rows(state: AttentionState, tokens: int) -> StagedRows:
    """Rows of a chunk before they are in their rings."""
    parts = (state.compressor, state.indexer)
    raw = [part and meta(min(tokens, part.ring.shape[0]), part.ring.shape[1]) for part in parts]
    window = tuple(meta(tokens, *part.shape[1:], dtype=part.dtype) for part in state.window)
    return StagedRows(window=window, compressor=raw[0], indexer=raw[1])


def _chunk_cases() -> Iterator[tuple[str, Callable[[], None]]]:
    tokens = 512
    for ratio in (0, 4, 128):
        for exact in (False, True):
            name = f"ratio {ratio}{' exact' if exact else ''}"
            state = attention_state(ratio, exact)
            staged = staged_rows(state, tokens)
            rings = [*zip(state.window, staged.window, strict=True)]
            for part, raw in (
                (state.compressor, staged.compressor),
                (state.indexer, staged.indexer),
            ):
                if part is not None and raw is not None:
                    rings.append((part.ring, raw))
            kept = [(meta(127, *ring.shape[1:], dtype=ring.dtype), ring) for ring in state.window]
            positions = row_positions(tokens, ratio)
            products = input_products(tokens, ratio)
            qr = meta(tokens, RANK)
            yield (
                f"prepare_chunk {name}",
                partial(prepare_chunk, qr, staged, products, state, positions),
            )
            position = positions.position
            yield f"commit_rings {name}", partial(commit_rings, rings, position, tokens)
            yield f"read_rings {name}", partial(read_rings, kept, position)


def _query_cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    rotation_width, heads = ROPE // 2, 64
    for tokens in (1, 512):
        rotation = Rotation(cos=meta(tokens, rotation_width), sin=meta(tokens, rotation_width))
        q = meta(tokens, heads, DIM)
        raw = meta(tokens, heads, INDEX_DIM)
        bad = meta(1, dtype=torch.int32)
        for dtype in (torch.float32, torch.bfloat16) if tokens > 1 else (torch.float32,):
            out = meta(*q.shape, dtype=dtype)
            name = f"finish_queries {tokens} {dtype}"
            finish = partial(finish_queries, overlap=tokens == 1 and overlaps(family))
            yield name, partial(finish, out, q, rotation, 1e-6)
            for is_rounded in (True, False):
                index = IndexQueries(
                    out=meta(*raw.shape, dtype=dtype), raw=raw, is_rounded=is_rounded, bad=bad
                )
                kind = "rounded" if is_rounded else "exact"
                yield (
                    f"{name} indexed {kind}",
                    partial(finish, out, q, rotation, 1e-6, index),
                )

"""Checks of the kernels that make, keep, choose and read cached rows on a GPU.

A layer of ratio 4 takes a chunk and then the token that finishes a window, so the compressed row of
the token comes from rows of both. Rows are compared as the numbers that are read from them: where
they are coded, the last bits of a norm move a value by a code step now and then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.gpu.attention import decode_attention, decode_partials
from edgedsv4.kernels.gpu.chunk_attention import chunk_attention
from edgedsv4.kernels.gpu.finish_queries import IndexQueries, Rotation, finish_queries
from edgedsv4.kernels.gpu.index_scores import score_keys
from edgedsv4.kernels.gpu.index_select import select_rows, select_scratch_ints
from edgedsv4.kernels.gpu.prepare import (
    AttentionState,
    CompressorState,
    InputProducts,
    RowPositions,
    prepare,
)
from edgedsv4.kernels.gpu.prepare_chunk import StagedRows, prepare_chunk
from edgedsv4.kernels.gpu.rings import commit_rings, read_rings
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.index_scores import index_scores_reference
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import RopeTable, apply_rope_reference, rope_frequencies, rope_table
from edgedsv4.kernels.sparse_attention import sparse_attention_reference
from edgedsv4.runtime.selftest.check import LIMIT, Check, Outputs, draw
from edgedsv4.runtime.selftest.gpu_products import BF16_LIMIT, unset

Rows = tuple[Tensor, ...]

CODED_LIMIT = 0.02
"""Error of coded rows of which a few values are a code step apart."""
_EPS = 1e-6
_RATIO, _SLOTS, _RAW_SLOTS = 4, 12, 11
_RANK, _DIM, _ROPE, _INDEX_DIM = 24, 80, 16, 32
_TOKENS = 8
"""Of which the last is evaluated alone."""
_HEADS, _WINDOW, _LENGTH, _COMPRESSED = 5, 9, 41, 10


def row_checks(device: torch.device, family: str) -> Iterator[Check]:
    """Every kernel with float32 rows, as the exact profile has them, and with coded ones."""
    for coded, label in ((False, "float32"), (True, "coded")):
        limit = CODED_LIMIT if coded else LIMIT
        make, made = partial(_rows, device, coded), partial(_rows_right, coded)
        yield _check(f"rows of a chunk and a token, {label}", make, made, limit)
        queries, right = partial(_queries, device, coded), partial(_queries_right, coded)
        yield _check(f"queries, {label}", queries, right, limit)
        scores = partial(_scores, device, coded)
        yield _check(f"index scores, {label} keys", scores, partial(_scored, coded))
    yield _check("index selection", partial(_select, device), _selected, 0)
    for coded, label in ((False, "float32"), (True, "coded")):
        limit = BF16_LIMIT if coded else LIMIT
        for count in (1, 5):
            what = "a token" if count == 1 else "a chunk"
            attend = partial(_attend, device, family, coded, count)
            right = partial(_attended, coded, count)
            yield _check(f"attention of {what}, {label} rows", attend, right, limit)


def _check(
    name: str, compute: Callable[[], Outputs], expected: Callable[[], Outputs], limit: float = LIMIT
) -> Check:
    return Check(name, lambda _backend: compute(), expected, limit, ("triton",))


def _table(positions: Tensor, rope_dim: int = _ROPE) -> RopeTable:
    return rope_table(positions, rope_frequencies(rope_dim, 100.0, None), torch.float32)


def _kv(rows: Tensor, coded: bool) -> Rows:
    return quantize_kv_rows(rows, _ROPE, backend="reference") if coded else (rows,)


def _keys(rows: Tensor, coded: bool) -> Rows:
    return quantize_index_keys(rows, backend="reference") if coded else (rows,)


def _read_kv(rows: Rows) -> Tensor:
    """Stored rows as numbers, on the CPU."""
    data, scales = rows[0].cpu(), rows[-1].cpu()
    return data if len(rows) == 1 else dequantize_kv_rows(data, scales, _ROPE, torch.float32)


def _read_keys(rows: Rows) -> Tensor:
    data, scales = rows[0].cpu(), rows[-1].cpu()
    return data if len(rows) == 1 else dequantize_index_keys(data, scales, torch.float32)


def _on(device: torch.device, rows: Rows) -> Rows:
    return tuple(part.to(device) for part in rows)


def _unset_rows(like: Rows, count: int, device: torch.device) -> Rows:
    """Rows that no one has stored: NaN, or bytes that decode to it."""
    return tuple(
        torch.full(
            (count, *part.shape[1:]),
            torch.nan if part.is_floating_point() else 255,
            dtype=part.dtype,
            device=device,
        )
        for part in like
    )


# ---- rows of a layer: 7 tokens at once, the 8th alone ----


def _norms() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Weights of the norms: low-rank query, rows, compressed rows, index keys."""
    widths = (_RANK, _DIM, _DIM, _INDEX_DIM)
    first, *others = (1 + draw(400 + i, width) / 4 for i, width in enumerate(widths))
    return first, others[0], others[1], others[2]


def _layer_products() -> tuple[Tensor, ...]:
    """Of 8 tokens: low-rank query, row, values and gates, index values and gates."""
    widths = (_RANK, _DIM, 2 * _DIM, 2 * _DIM, 2 * _INDEX_DIM, 2 * _INDEX_DIM)
    return tuple(draw(410 + i, _TOKENS, width) for i, width in enumerate(widths))


def _biases() -> tuple[Tensor, Tensor]:
    return draw(420, _RATIO, 2 * _DIM), draw(421, _RATIO, 2 * _INDEX_DIM)


def _layer(device: torch.device, coded: bool) -> AttentionState:
    """A layer before its first token."""
    q_norm, kv_norm, norm, index_norm = (part.to(device) for part in _norms())
    like = _kv(torch.zeros(1, _DIM), coded)
    key = _keys(torch.zeros(1, _INDEX_DIM), coded)
    compressor, indexer = (
        CompressorState(
            ape=bias.to(device),
            norm=weight,
            ring=unset(device, _RAW_SLOTS, 2 * bias.shape[1]),
            rows=_unset_rows(rows, _TOKENS // _RATIO, device),
            has_hadamard=coded and is_index,
        )
        for bias, weight, rows, is_index in zip(
            _biases(), (norm, index_norm), (like, key), (False, True), strict=True
        )
    )
    return AttentionState(
        q_norm=q_norm,
        kv_norm=kv_norm,
        window=_unset_rows(like, _SLOTS, device),
        compressor=compressor,
        indexer=indexer,
        ratio=_RATIO,
        rope_dim=_ROPE,
        eps=_EPS,
    )


def _positions(device: torch.device, start: int, stop: int) -> RowPositions:
    own = _table(torch.arange(start, stop))
    windows = _table(torch.arange(start // _RATIO, stop // _RATIO + 1) * _RATIO)
    return RowPositions(
        position=torch.tensor([start], dtype=torch.int32, device=device),
        cos=own.cos.to(device),
        sin=own.sin.to(device),
        window_cos=windows.cos.to(device),
        window_sin=windows.sin.to(device),
        bad=torch.zeros(1, dtype=torch.int32, device=device),
    )


def _given(device: torch.device, start: int, stop: int) -> InputProducts:
    parts = (part[start:stop].to(device) for part in _layer_products())
    qr, kv, values, gates, index_values, index_gates = parts
    return InputProducts(
        qr=qr, kv=kv, compressor=(values, gates), indexer=(index_values, index_gates)
    )


def _rows(device: torch.device, coded: bool) -> list[Tensor]:
    state, last = _layer(device, coded), _TOKENS - 1
    if state.compressor is None or state.indexer is None:
        raise RuntimeError("a layer of ratio 4 has both")
    qr = unset(device, _TOKENS, _RANK)
    staged = StagedRows(
        window=_unset_rows(state.window, last, device),
        compressor=unset(device, last, state.compressor.ring.shape[1]),
        indexer=unset(device, last, state.indexer.ring.shape[1]),
    )
    place = _positions(device, 0, last)
    prepare_chunk(qr[:last], staged, _given(device, 0, last), state, place)
    rings = list(zip(state.window, staged.window, strict=True))
    for part, rows in ((state.compressor, staged.compressor), (state.indexer, staged.indexer)):
        if rows is not None:
            rings.append((part.ring, rows))
    commit_rings(rings, place.position, last)
    place = _positions(device, last, _TOKENS)
    prepare(qr[last:], _given(device, last, _TOKENS), state, place)
    window = _unset_rows(state.window, _TOKENS, device)
    end = torch.tensor([_TOKENS], dtype=torch.int32, device=device)
    read_rings(list(zip(window, state.window, strict=True)), end)
    keys = _read_keys(state.indexer.rows)
    return [qr, _read_kv(window), _read_kv(state.compressor.rows), keys, place.bad]


def _rows_right(coded: bool) -> list[Tensor]:
    wide = [part.double() for part in _layer_products()]
    q_norm, kv_norm, *norms = (part.double() for part in _norms())
    rows = rms_norm_reference(wide[1], kv_norm, _EPS)
    rows = apply_rope_reference(rows, _table(torch.arange(_TOKENS)))
    results = [rms_norm_reference(wide[0], q_norm, _EPS), _read_kv(_kv(rows.float(), coded))]
    for place, (bias, norm) in enumerate(zip(_biases(), norms, strict=True)):
        values, gates = wide[2 + 2 * place], wide[3 + 2 * place]
        gates = gates + bias.double().repeat(_TOKENS // _RATIO, 1)
        windows = (part.view(_TOKENS // _RATIO, _RATIO, -1) for part in (values, gates))
        pooled = pool_windows(*windows, has_overlap=True, previous=False)
        made = rms_norm_reference(pooled, norm, _EPS)
        made = apply_rope_reference(made, _table(torch.arange(0, _TOKENS, _RATIO)))
        if place == 0:
            results.append(_read_kv(_kv(made.float(), coded)))
        else:
            made = hadamard_reference(made) if coded else made
            results.append(_read_keys(_keys(made.float(), coded)))
    return [*results, torch.zeros(1, dtype=torch.int32)]


# ---- queries of 3 tokens ----


def _query_inputs() -> tuple[Tensor, Tensor, RopeTable]:
    return draw(430, 3, _HEADS, _DIM), draw(431, 3, 4, 64), _table(torch.arange(70, 73))


def _queries(device: torch.device, coded: bool) -> list[Tensor]:
    raw, index_raw, table = _query_inputs()
    out = unset(device, *raw.shape)
    index = IndexQueries(
        out=unset(device, *index_raw.shape),
        raw=index_raw.to(device),
        is_rounded=coded,
        bad=torch.zeros(1, dtype=torch.int32, device=device),
    )
    rotation = Rotation(cos=table.cos.to(device), sin=table.sin.to(device))
    finish_queries(out, raw.to(device), rotation, _EPS, index)
    return [out, index.out, index.bad]


def _queries_right(coded: bool) -> list[Tensor]:
    raw, index_raw, table = _query_inputs()
    queries = apply_rope_reference(rms_norm_reference(raw.double(), None, _EPS), table)
    index = apply_rope_reference(index_raw.double(), table)
    if coded:
        flat = hadamard_reference(index).flatten(0, 1).float()
        index = _read_keys(_keys(flat, coded)).view(index_raw.shape)
    return [queries, index, torch.zeros(1, dtype=torch.int32)]


# ---- index scores of one token and of 3, and what is selected ----


def _score_inputs(tokens: int, coded: bool) -> tuple[Tensor, Tensor, Rows]:
    """Queries, rounded like keys where those are, head weights, keys of 40 rows."""
    queries = draw(440 + tokens, tokens * 4, 64)
    if coded:
        queries = _read_keys(_keys(queries, coded))
    return queries.view(tokens, 4, 64), draw(442, tokens, 4), _keys(draw(443, 40, 64), coded)


def _scores(device: torch.device, coded: bool) -> list[Tensor]:
    results = []
    for tokens in (1, 3):
        queries, weights, keys = _score_inputs(tokens, coded)
        scores = unset(device, tokens, 40)
        # Every token sees all 40 rows.
        position = torch.tensor([4 * 40 - 1], dtype=torch.int32, device=device)
        given = (queries.to(device), weights.to(device), _on(device, keys), position)
        score_keys(scores, *given, ratio=_RATIO, topk=0)
        results.append(scores)
    return results


def _scored(coded: bool) -> list[Tensor]:
    results = []
    for tokens in (1, 3):
        queries, weights, keys = _score_inputs(tokens, coded)
        wide = (queries.double(), _read_keys(keys).double(), weights.double())
        results.append(index_scores_reference(*wide))
    return results


def _select_inputs() -> Tensor:
    """The last row has ties everywhere."""
    return torch.cat((draw(450, 2, 700), draw(451, 1, 700).round()))


def _select(device: torch.device) -> list[Tensor]:
    scores, top = _select_inputs().to(device), 24
    selected = torch.full((3, top), -7, dtype=torch.int32, device=device)
    size = select_scratch_ints(3, 700, top)
    scratch = torch.zeros(size, dtype=torch.int32, device=device)
    bad = torch.zeros(1, dtype=torch.int32, device=device)
    position = torch.tensor([4 * 700], dtype=torch.int32, device=device)
    select_rows(selected, scores, position, scratch, bad, ratio=_RATIO)
    return [selected, bad]


def _selected() -> list[Tensor]:
    scores = _select_inputs()
    best, _ = index_topk(scores, torch.arange(700), torch.tensor([700] * 3), 24)
    return [best.sort(dim=1).values, torch.zeros(1, dtype=torch.int32)]


# ---- attention: a window of 9 rows, and selected ones of 10 compressed rows ----


def _attention_inputs(coded: bool, count: int) -> tuple[Tensor, Rows, Rows, Tensor, Tensor]:
    """Queries of the last tokens, rows, compressed rows, selected ones, sinks."""
    q = draw(460, count, _HEADS, _DIM)
    q = q.to(torch.bfloat16).float() if coded else q
    sequence, compressed = draw(461, _LENGTH, _DIM), draw(462, _COMPRESSED, _DIM)
    # The first token sees 9 compressed rows at least.
    selected = torch.tensor([[0, 3, 8, -1]] * count, dtype=torch.int32)
    return q, _kv(sequence, coded), _kv(compressed, coded), selected, draw(463, _HEADS)


def _attend(device: torch.device, family: str, coded: bool, count: int) -> list[Tensor]:
    q, sequence, compressed, selected, sink = _attention_inputs(coded, count)
    start = _LENGTH - count
    table = _table(torch.arange(start, _LENGTH))
    shared: dict[str, Any] = {
        "window": _WINDOW,
        "compressed": _on(device, compressed),
        "ratio": _RATIO,
        "sink": sink.to(device),
        "cos": table.cos.to(device),
        "sin": table.sin.to(device),
        "family": family,
    }
    position = torch.tensor([start], dtype=torch.int32, device=device)
    results: list[Tensor] = []
    place: dict[str, Any]
    for rows in (None, selected.to(device)):
        out = unset(device, count, _HEADS * _DIM)
        if count > 1:
            first = start - _WINDOW + 1
            window = _on(device, tuple(part[first:].contiguous() for part in sequence))
            near = q.to(device, torch.bfloat16 if coded else torch.float32)
            place = {"first": first, "position": position, "selected": rows}
            chunk_attention(out, near, window, **place, **shared)
        else:
            ring = _on(device, tuple(_ring(part) for part in sequence))
            partials = decode_partials(3, _HEADS, _DIM, device)
            place = {"selected": rows, "partials": partials}
            decode_attention(out, q.to(device), ring, position, **place, **shared)
        results.append(out)
    return results


def _ring(rows: Tensor) -> Tensor:
    ring = torch.zeros(_WINDOW + 2, rows.shape[1], dtype=rows.dtype)
    kept = torch.arange(_LENGTH - len(ring), _LENGTH)
    ring[kept % len(ring)] = rows[kept]
    return ring


def _attended(coded: bool, count: int) -> list[Tensor]:
    q, sequence, compressed, selected, sink = _attention_inputs(coded, count)
    rows = torch.cat((_read_kv(sequence), _read_kv(compressed))).double()
    positions = torch.arange(_LENGTH - count, _LENGTH)
    window = positions[:, None] - torch.arange(_WINDOW).flip(0)
    visible = torch.arange(_COMPRESSED).expand(count, -1)
    visible = visible.masked_fill(visible >= (positions[:, None] + 1) // _RATIO, -1)
    results = []
    for entries in (visible, selected.long()):
        ids = torch.cat((window, torch.where(entries < 0, -1, entries + _LENGTH)), dim=1)
        out = sparse_attention_reference(q.double(), rows, ids, sink.double())
        results.append(apply_rope_reference(out, _table(positions), inverse=True).flatten(1))
    return results

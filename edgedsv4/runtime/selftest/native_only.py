"""Checks of C kernels that no public function calls, since they work on a timeline's own rows.

What the references say of the same values is put together here from their separate steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.index_scores import index_scores_reference
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    fp8_scale_bytes,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.native.library import library, matrix_of, pointer, run_here
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import apply_rope_reference, rope_frequencies, rope_table
from edgedsv4.kernels.router import router_scores, routing_weights
from edgedsv4.kernels.sparse_attention import sparse_attention_reference
from edgedsv4.runtime.selftest.check import Check, Outputs, draw
from edgedsv4.runtime.selftest.matrices import random_matrix

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation

_EPS = 1e-6
_RATIO = 4


def native_checks() -> Iterator[Check]:
    """One check per kernel."""
    for name, compute, expected in (
        ("attention over stored rows", _attend, _attended),
        ("compressor", _compress, _compressed),
        ("index selection", _select, _selected),
        ("embedding", _embed, _embedded),
        ("router: given experts", _weigh, _weighed),
    ):
        yield Check(name, _without_backend(compute), expected, backends=("native",))


def _without_backend(compute: Callable[[], Outputs]) -> Callable[[Implementation], Outputs]:
    return lambda _backend: compute()


class _Rows:
    """Memory for rows at rest and its `dk_rows` record: float32, FP8 with `rope` dims, or FP4."""

    def __init__(self, count: int, width: int, kind: int, rope: int = 0) -> None:
        _, ffi = library()
        data_bytes = {0: 4 * width, 1: width + rope, 2: width // 2}[kind]
        scale_bytes = {0: 0, 1: fp8_scale_bytes(width - rope), 2: -(-width // 32)}[kind]
        # All bits set is NaN in every format: a row that was never stored shows.
        self.data = torch.full((count, data_bytes), 255, dtype=torch.uint8)
        self.scales = torch.full((count, scale_bytes), 255, dtype=torch.uint8)
        self.record: Any = ffi.new("dk_rows *")
        self.record.data, self.record.data_stride = pointer(self.data), data_bytes
        self.record.scales = pointer(self.scales) if scale_bytes else ffi.NULL
        self.record.scale_stride, self.record.format = scale_bytes, kind
        self.record.width, self.record.rope = width, rope

    def store(self, first: int, rows: Tensor) -> None:
        lib, _ = library()
        run, rows = run_here(), rows.contiguous()
        run.check(lib.dk_rows_store(run.cdata, self.record, first, pointer(rows), len(rows)))


# ---- attention: 3 heads of 80 dims, 7 tokens from position 50 on, a ring of 40 slots ----

_START, _TOKENS, _WINDOW, _SLOTS, _TOP = 50, 7, 30, 40, 5
_HEADS, _DIM, _ROPE = 3, 80, 16


def _attention_inputs() -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Queries, sinks, the timeline's rows, its compressed rows and which of them are selected."""
    stop = _START + _TOKENS
    visible = (torch.arange(_START, stop) + 1) // _RATIO
    orders = [torch.randperm(int(n), generator=torch.Generator().manual_seed(7)) for n in visible]
    selected = torch.stack([order[: _TOP - 1].sort().values for order in orders])
    return (
        2 * draw(50, _TOKENS, _HEADS, _DIM),
        draw(51, _HEADS),
        draw(52, stop, _DIM),
        draw(53, stop // _RATIO, _DIM),
        pad(selected, (0, 1), value=-1),
    )


def _attend() -> list[Tensor]:
    lib, ffi = library()
    q, sink, rows, compressed_rows, selected = _attention_inputs()
    ring, staged, compressed = (
        _Rows(count, _DIM, 1, _ROPE) for count in (_SLOTS, _TOKENS, len(compressed_rows))
    )
    before = _Rows(_START, _DIM, 1, _ROPE)
    before.store(0, rows[:_START])
    lib.dk_ring_commit(ring.record, _SLOTS, before.record, 0, _START)
    staged.store(0, rows[_START:])
    compressed.store(0, compressed_rows)
    ids, out = selected.int(), torch.empty(_TOKENS, _HEADS, _DIM)
    keys = ffi.new("dk_attention *")
    keys.ring, keys.slots, keys.staged, keys.window = ring.record, _SLOTS, staged.record, _WINDOW
    keys.compressed, keys.ratio, keys.sink = compressed.record, _RATIO, pointer(sink)
    keys.selected, keys.top = pointer(ids), _TOP
    run, place = run_here(), (_START, _TOKENS, _HEADS, _DIM)
    run.check(lib.dk_attend(run.cdata, pointer(out), pointer(q), keys, *place))
    return [out]


def _attended() -> list[Tensor]:
    q, sink, rows, compressed_rows, selected = _attention_inputs()
    stored = [
        dequantize_kv_rows(
            *quantize_kv_rows(values, _ROPE, backend="reference"),
            _ROPE,
            torch.float64,
            backend="reference",
        )
        for values in (rows, compressed_rows)
    ]
    window = torch.arange(_START, _START + _TOKENS)[:, None] - torch.arange(_WINDOW)
    ids = torch.cat((window, torch.where(selected < 0, -1, selected + len(rows))), dim=1)
    return [sparse_attention_reference(q.double(), torch.cat(stored), ids, sink.double())]


# ---- compressor: windows of 4 tokens that overlap, 21 dims of which 6 are rotated ----

_WIDTH, _STOP = 21, 43


def _raw() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values and gates side by side, position bias, norm, frequencies."""
    return (
        draw(60, _STOP, 4 * _WIDTH),
        draw(61, _RATIO, 2 * _WIDTH),
        1 + draw(62, _WIDTH) / 8,
        rope_frequencies(6, 10_000.0, None),
    )


def _compress() -> list[Tensor]:
    lib, ffi = library()
    raw, bias, norm, frequencies = _raw()
    rows = _Rows(_STOP // _RATIO, _WIDTH, 0)
    ring = _Rows(2 * _RATIO, raw.shape[1], 0)
    run = run_here()
    for start, stop in ((0, 14), (14, _STOP)):
        staged = _Rows(stop - start, raw.shape[1], 0)
        staged.store(0, raw[start:stop])
        state = ffi.new("dk_compressor *")
        state.rows, state.slots = rows.record[0], 2 * _RATIO
        state.ring = ffi.cast("float *", ring.record.data)
        state.staged = ffi.cast("float *", staged.record.data)
        state.ape, state.norm = pointer(bias), pointer(norm)
        state.width, state.ratio, state.series = _WIDTH, _RATIO, 2
        arguments = (start, stop - start, pointer(frequencies), len(frequencies), _EPS)
        run.check(lib.dk_compress(run.cdata, state, *arguments))
        lib.dk_ring_commit(ring.record, 2 * _RATIO, staged.record, start, stop - start)
    return [rows.data.view(torch.float32)]


def _compressed() -> list[Tensor]:
    raw, bias, norm, frequencies = _raw()
    count = _STOP // _RATIO
    windows = raw.double()[: count * _RATIO].view(count, _RATIO, -1)
    values, gates = windows.chunk(2, dim=-1)
    pooled = pool_windows(
        values, gates + bias, has_overlap=True, previous=False, backend="reference"
    )
    table = rope_table(torch.arange(count) * _RATIO, frequencies, torch.float64)
    return [apply_rope_reference(rms_norm_reference(pooled, norm.double(), _EPS), table)]


# ---- indexer: the 9 best of up to 50 FP4 keys, for 7 tokens ----

_INDEX_STOP, _INDEX_TOKENS, _INDEX_HEADS, _INDEX_DIM, _INDEX_TOP = 203, 7, 5, 64, 9


def _index_inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, head weights and keys, not yet rounded."""
    q = draw(70, _INDEX_TOKENS * _INDEX_HEADS, _INDEX_DIM)
    keys = draw(72, _INDEX_STOP // _RATIO, _INDEX_DIM)
    return hadamard_reference(q), draw(71, _INDEX_TOKENS, _INDEX_HEADS), keys


def _select() -> list[Tensor]:
    lib, ffi = library()
    q, weights, keys = _index_inputs()
    count, start = len(keys), _INDEX_STOP - _INDEX_TOKENS
    stored, run = _Rows(count, _INDEX_DIM, 2), run_here()
    stored.store(0, keys)
    run.check(lib.dk_round_fp4(run.cdata, pointer(q), len(q), _INDEX_DIM))
    ids = torch.empty(_INDEX_TOKENS, _INDEX_TOP, dtype=torch.int32)
    scores = torch.empty(_INDEX_TOKENS, count)
    nbytes = lib.dk_index_scratch_bytes(count, _INDEX_HEADS, _INDEX_DIM, run.cdata.threads)
    scratch = torch.empty(nbytes, dtype=torch.uint8)
    arrays = [pointer(array) for array in (ids, scores, q, weights)]
    sizes = (start, _INDEX_TOKENS, _INDEX_HEADS, _INDEX_DIM, _RATIO, _INDEX_TOP)
    memory = ffi.cast("void *", scratch.data_ptr())
    run.check(lib.dk_index_select(run.cdata, *arrays, stored.record, *sizes, memory))
    return [ids, scores[_visible(count)]]


def _selected() -> list[Tensor]:
    q, weights, keys = _index_inputs()
    q, keys = (
        dequantize_index_keys(
            *quantize_index_keys(values, backend="reference"), torch.float64, backend="reference"
        )
        for values in (q, keys)
    )
    shaped = q.view(_INDEX_TOKENS, _INDEX_HEADS, _INDEX_DIM)
    scores = index_scores_reference(shaped, keys, weights.double())
    visible = _visible(len(keys))
    ids, _ = index_topk(scores, torch.arange(len(keys)), visible.sum(dim=1), _INDEX_TOP)
    return [ids.sort(dim=1).values, scores[visible]]


def _visible(count: int) -> Tensor:
    """Which of the keys each token may see."""
    positions = torch.arange(_INDEX_STOP - _INDEX_TOKENS, _INDEX_STOP)
    return torch.arange(count) < ((positions + 1) // _RATIO)[:, None]


# ---- embedding: 4 of 11 tokens ----

_TOKEN_IDS = (10, 0, 3, 3)


def _embed() -> list[Tensor]:
    lib, _ = library()
    matrix = random_matrix(BLOCK_TYPES["Q8_0"], 11, 96, 80)
    ids, rows, run = torch.tensor(_TOKEN_IDS), torch.empty(4, 96), run_here()
    run.check(lib.dk_embed(run.cdata, pointer(rows), matrix_of(matrix), pointer(ids), len(ids)))
    return [rows]


def _embedded() -> list[Tensor]:
    matrix = random_matrix(BLOCK_TYPES["Q8_0"], 11, 96, 80)
    return [dequantize(matrix)[list(_TOKEN_IDS)]]


# ---- weights of experts that somebody else chose: 3 of 13 for 5 tokens ----


def _weigh() -> list[Tensor]:
    lib, _ = library()
    logits, ids, weights, run = (
        draw(81, 5, 13),
        _given_experts().int(),
        torch.empty(5, 3),
        run_here(),
    )
    arrays = [pointer(array) for array in (weights, logits, ids)]
    run.check(lib.dk_route_weights(run.cdata, *arrays, 5, 13, 3, 1.5))
    return [weights]


def _weighed() -> list[Tensor]:
    scores = router_scores(draw(81, 5, 13).double(), backend="reference")
    return [routing_weights(scores, _given_experts(), 1.5, backend="reference")]


def _given_experts() -> Tensor:
    return torch.arange(5)[:, None] + torch.tensor([0, 3, 8])

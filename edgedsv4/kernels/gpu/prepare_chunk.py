"""The rows of a chunk of T tokens, and the way of staged rows into their rings.

`prepare_chunk` makes what `edgedsv4.kernels.gpu.prepare` makes, for T tokens in one launch, and
leaves the rings as they are: window rows and raw rows are staged, so that a chunk that fails has
changed nothing that counts. Compressed rows of all windows that end in the chunk are written, since
its own queries see them. A window's raw rows come from the ring before the chunk's first token and
from the products after it. One program makes one row;
`edgedsv4.kernels.gpu.rings` copies staged rows into their rings.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch
from edgedsv4.kernels.gpu.make_rows import (
    finish_row,
    keep_raw,
    load_factors,
    pool_slots,
    store_kv_row,
    store_qr_row,
)
from edgedsv4.kernels.gpu.prepare import (
    AttentionState,
    InputProducts,
    RowPositions,
    kernel_arguments,
    kernel_constants,
)
from edgedsv4.kernels.gpu.rows import Rows, codes_of, number_pairs

NUM_WARPS = {0: 4, 4: 4, 128: 8}
"""By ratio."""
POOL_ROWS = {0: 1, 4: 4, 128: 8}
"""Slots of a window that one tile holds, by ratio."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedRows:
    """Rows of a chunk that are not in their rings yet, as those store them."""

    window: Rows
    """[T, ...]."""
    compressor: Tensor | None = None
    """[n, 2 * s * c] float32, the last n tokens' raw rows, n = min(T, slots) or less."""
    indexer: Tensor | None = None
    """[n, 2 * s * c] float32, the same n."""


def prepare_chunk(
    qr: Tensor,
    staged: StagedRows,
    products: InputProducts,
    state: AttentionState,
    positions: RowPositions,
) -> None:
    """Make the rows of T tokens.

    Args:
        qr: [T, Rq] float32, result.
        staged: result, rows to come into the rings.
        products: of the tokens.
        state: of the layer; its compressed rows and index keys are written, its rings are read.
        positions: of the tokens; there must be a row of `window_cos` for each window that ends in
            the chunk, and what is beyond them is ignored.

    Raises:
        ShapeError: if shapes disagree.
    """
    arguments = {**kernel_arguments(products, state, positions), **kernel_constants(state, qr)}
    raw = [part for part in (staged.compressor, staged.indexer) if part is not None]
    tokens, windows = qr.shape[0], positions.window_cos.shape[0] if state.ratio else 0
    kept = raw[0].shape[0] if raw else 0
    compressors = (state.compressor is not None) + (state.indexer is not None)
    if len(raw) != compressors or any(part.shape[0] != kept for part in raw) or kept > tokens:
        raise ShapeError(f"prepare: {[list(part.shape) for part in raw]} staged of {tokens} tokens")
    if state.ratio and windows < tokens // state.ratio:
        raise ShapeError(f"prepare: tables of {windows} windows for {tokens} tokens")
    if staged.window[0].shape[0] != tokens:
        raise ShapeError(f"prepare: {staged.window[0].shape[0]} staged rows of {tokens} tokens")
    launch(
        _prepare_chunk_kernel,
        (compressors * (windows + kept) + 2 * tokens,),
        qr,
        codes_of(staged.window, "fp8"),
        staged.window[-1],
        c_staged_ptr=raw[0] if raw else qr,
        i_staged_ptr=raw[-1] if raw else qr,
        tokens=tokens,
        windows=windows,
        kept=kept,
        **_strides(products),
        **arguments,
        BJ=POOL_ROWS[state.ratio],
        num_warps=NUM_WARPS[state.ratio],
    )


def _strides(products: InputProducts) -> dict[str, int]:
    strides = {"stride_qr": products.qr.stride(0), "stride_kv": products.kv.stride(0)}
    for prefix, pair in (("c", products.compressor), ("i", products.indexer)):
        values, gates = pair or (products.kv, products.kv)
        if values.stride() != gates.stride() or values.stride(1) != 1:
            raise ShapeError(f"prepare: strides {values.stride()} and {gates.stride()}")
        strides[f"stride_{prefix}"] = values.stride(0)
    return strides


@triton.jit
def _pool_window(
    values_ptr,
    gates_ptr,
    ape_ptr,
    ring_ptr,
    window,
    start,
    stride,
    WIDTH: tl.constexpr,
    SERIES: tl.constexpr,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
):
    """Pooled row [BC] of one window, 0 past WIDTH.

    Later slots come first: in the first window of two series the others have no finite gate.
    """
    ROW: tl.constexpr = SERIES * WIDTH
    o_c = tl.arange(0, BC)
    m_c = (o_c < WIDTH)[None, :]
    top = tl.full((BC,), float("-inf"), tl.float32)
    total = tl.zeros((BC,), tl.float32)
    row = tl.zeros((BC,), tl.float32)
    for first in range(0, SERIES * RATIO, BJ):
        o_j = SERIES * RATIO - BJ - first + tl.arange(0, BJ)
        position = (window + 1 - SERIES) * RATIO + o_j
        m_old = ((position >= 0) & (position < start))[:, None] & m_c  # [BJ, BC]
        m_new = (position >= start)[:, None] & m_c
        column = tl.where(o_j >= (SERIES - 1) * RATIO, (SERIES - 1) * WIDTH, 0)
        column = column[:, None] + o_c[None, :]
        o_old = (position % SLOTS)[:, None] * (2 * ROW) + column
        o_new = (position - start).to(tl.int64)[:, None] * stride + column
        values = tl.load(ring_ptr + o_old, mask=m_old, other=0.0)
        values += tl.load(values_ptr + o_new, mask=m_new, other=0.0)
        gates = tl.load(gates_ptr + o_new, mask=m_new, other=0.0)
        gates += tl.load(ape_ptr + (o_j % RATIO)[:, None] * ROW + column, mask=m_new, other=0.0)
        gates += tl.load(ring_ptr + ROW + o_old, mask=m_old, other=0.0)
        gates = tl.where((position >= 0)[:, None], gates, float("-inf"))
        top, total, row = pool_slots(top, total, row, values, gates)
    return row / total


@triton.jit
def _finish_window(
    values_ptr,
    gates_ptr,
    ape_ptr,
    ring_ptr,
    norm_ptr,
    cos_ptr,
    sin_ptr,
    codes_ptr,
    scales_ptr,
    bad_ptr,
    i_window,
    start,
    tokens,
    stride,
    eps,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SERIES: tl.constexpr,
    RATIO: tl.constexpr,
    SLOTS: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
    BJ: tl.constexpr,
    BC: tl.constexpr,
    GP: tl.constexpr,
):
    """Row of the chunk's window `i_window`, if it ends in the chunk."""
    window = start // RATIO + i_window
    if (window + 1) * RATIO <= start + tokens:
        row = _pool_window(
            values_ptr,
            gates_ptr,
            ape_ptr,
            ring_ptr,
            window,
            start,
            stride,
            WIDTH,
            SERIES,
            RATIO,
            SLOTS,
            BJ,
            BC,
        )
        i_pair = number_pairs(BC // (2 * GP), GP)
        cos_ptr += i_window * (ROPE // 2)
        sin_ptr += i_window * (ROPE // 2)
        factors = load_factors(norm_ptr, cos_ptr, sin_ptr, i_pair, WIDTH, ROPE)
        a, b = tl.split(tl.reshape(row, (BC // (2 * GP), GP, 2)))
        finish_row(
            a,
            b,
            factors,
            window.to(tl.int64),
            codes_ptr,
            scales_ptr,
            bad_ptr,
            eps,
            WIDTH,
            ROPE,
            SCALE_BYTES,
            FORMAT,
            LOG_HADAMARD,
            BC // (2 * GP),
            GP,
        )


@triton.jit(do_not_specialize=["tokens", "windows", "kept"])
def _prepare_chunk_kernel(
    qr_ptr,
    window_codes_ptr,
    window_scales_ptr,
    c_staged_ptr,
    i_staged_ptr,
    raw_qr_ptr,
    q_norm_ptr,
    raw_kv_ptr,
    kv_norm_ptr,
    c_values_ptr,
    c_gates_ptr,
    c_ape_ptr,
    c_norm_ptr,
    c_ring_ptr,
    c_codes_ptr,
    c_scales_ptr,
    i_values_ptr,
    i_gates_ptr,
    i_ape_ptr,
    i_norm_ptr,
    i_ring_ptr,
    i_codes_ptr,
    i_scales_ptr,
    position_ptr,
    cos_ptr,
    sin_ptr,
    window_cos_ptr,
    window_sin_ptr,
    bad_ptr,
    tokens,
    windows,
    kept,
    stride_qr,
    stride_kv,
    stride_c,
    stride_i,
    eps,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    RATIO: tl.constexpr,
    SERIES: tl.constexpr,
    RAW_SLOTS: tl.constexpr,
    HAS_COMPRESSOR: tl.constexpr,
    HAS_INDEXER: tl.constexpr,
    I_WIDTH: tl.constexpr,
    I_SCALE_BYTES: tl.constexpr,
    I_FORMAT: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
    BQ: tl.constexpr,
    BC: tl.constexpr,
    BI: tl.constexpr,
    GP: tl.constexpr,
    I_GP: tl.constexpr,
    BJ: tl.constexpr,
):  # house-rule: long function, because each of its many arguments stands on a line
    """Programs in order: windows, index windows, qr, kv, raw rows, raw rows of the indexer."""
    i_part = tl.program_id(0)
    start = tl.load(position_ptr)
    if HAS_COMPRESSOR:
        if i_part < windows:
            _finish_window(
                c_values_ptr,
                c_gates_ptr,
                c_ape_ptr,
                c_ring_ptr,
                c_norm_ptr,
                window_cos_ptr,
                window_sin_ptr,
                c_codes_ptr,
                c_scales_ptr,
                bad_ptr,
                i_part,
                start,
                tokens,
                stride_c,
                eps,
                WIDTH,
                ROPE,
                SERIES,
                RATIO,
                RAW_SLOTS,
                SCALE_BYTES,
                FORMAT,
                0,
                BJ,
                BC,
                GP,
            )
        i_part -= windows
    if HAS_INDEXER:
        if (i_part >= 0) & (i_part < windows):
            _finish_window(
                i_values_ptr,
                i_gates_ptr,
                i_ape_ptr,
                i_ring_ptr,
                i_norm_ptr,
                window_cos_ptr,
                window_sin_ptr,
                i_codes_ptr,
                i_scales_ptr,
                bad_ptr,
                i_part,
                start,
                tokens,
                stride_i,
                eps,
                I_WIDTH,
                ROPE,
                SERIES,
                RATIO,
                RAW_SLOTS,
                I_SCALE_BYTES,
                I_FORMAT,
                LOG_HADAMARD,
                BJ,
                BI,
                I_GP,
            )
        i_part -= windows
    row = i_part.to(tl.int64)
    if (i_part >= 0) & (i_part < tokens):
        store_qr_row(qr_ptr + row * RANK, raw_qr_ptr + row * stride_qr, q_norm_ptr, eps, RANK, BQ)
    row -= tokens
    if (row >= 0) & (row < tokens):
        store_kv_row(
            raw_kv_ptr + row * stride_kv,
            row,
            kv_norm_ptr,
            cos_ptr + row * (ROPE // 2),
            sin_ptr + row * (ROPE // 2),
            window_codes_ptr,
            window_scales_ptr,
            bad_ptr,
            eps,
            WIDTH,
            ROPE,
            SCALE_BYTES,
            FORMAT,
            BC,
            GP,
        )
    row -= tokens
    if HAS_COMPRESSOR:
        if (row >= 0) & (row < kept):
            _stage_raw(
                c_staged_ptr,
                c_values_ptr,
                c_gates_ptr,
                c_ape_ptr,
                row,
                tokens - kept,
                start,
                stride_c,
                RATIO,
                SERIES * WIDTH,
                SERIES * BC,
            )
        row -= kept
    if HAS_INDEXER and row >= 0:
        _stage_raw(
            i_staged_ptr,
            i_values_ptr,
            i_gates_ptr,
            i_ape_ptr,
            row,
            tokens - kept,
            start,
            stride_i,
            RATIO,
            SERIES * I_WIDTH,
            SERIES * BI,
        )


@triton.jit
def _stage_raw(
    staged_ptr,
    values_ptr,
    gates_ptr,
    ape_ptr,
    row,
    first,
    start,
    stride,
    RATIO: tl.constexpr,
    WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Staged raw row `row` (int64), that of token first + row of the chunk."""
    token = first + row
    keep_raw(
        values_ptr + token * stride,
        gates_ptr + token * stride,
        ape_ptr + (start + token) % RATIO * WIDTH,
        staged_ptr + row * (2 * WIDTH),
        WIDTH,
        SIZE,
    )

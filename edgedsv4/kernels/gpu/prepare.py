"""The rows of one decoded token, in one launch: everything between the input's products and wq_b.

qr = norm(wq_a x) -> the buffer that wq_b reads; kv = norm(wkv x), rotated, encoded -> slot p mod
slots of the window ring. A compressor's raw row (values | gates + ape[p mod m]) -> its ring, and
when (p + 1) mod m = 0 the window is pooled (`edgedsv4.kernels.compress`), normalised, rotated at
the window's first position, for index keys Hadamard transformed, and encoded -> row (p + 1) / m -
1. The same for the indexer's compressor. Definitions: `edgedsv4.model.compressor`,
`edgedsv4.model.attention`.

One program makes qr, one kv, one each compressor. The position is read on the device, so the launch
can be part of a graph.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.make_rows import (
    finish_row,
    keep_raw,
    load_factors,
    pool_slots,
    store_kv_row,
    store_qr_row,
)
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.gpu.rows import Rows, codes_of, group_pairs, number_pairs, row_format

NUM_WARPS = {0: 4, 4: 4, 128: 8}
"""By ratio; with 128 a window is half a megabyte, read by one program."""
POOL_ROWS = {0: 1, 4: 8, 128: 16}
"""Slots of a window that one tile holds, by ratio; with 4 it is the whole window."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CompressorState:
    """What one compressor keeps and what it is made of: c wide, s series, m tokens per row."""

    ape: Tensor
    """[m, s * c] float32."""
    norm: Tensor
    """[c] float32."""
    ring: Tensor
    """[slots, 2 * s * c] float32: values, then gates with the bias."""
    rows: Rows
    """Finished rows."""
    has_hadamard: bool = False
    """Rows are transformed before they are stored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionState:
    """What the attention of one layer keeps and what its rows are made with."""

    q_norm: Tensor
    """[Rq] float32."""
    kv_norm: Tensor
    """[d] float32."""
    window: Rows
    """Ring of the last rows, slot = position mod slots."""
    compressor: CompressorState | None
    indexer: CompressorState | None
    ratio: int
    """m, or 0 without compression."""
    rope_dim: int
    eps: float
    """Of the norms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InputProducts:
    """Products of the sublayer's input, float32, rows of any stride (views of one buffer)."""

    qr: Tensor
    """[T, Rq]."""
    kv: Tensor
    """[T, d]."""
    compressor: tuple[Tensor, Tensor] | None = None
    """Values and gates, [T, s * c] each."""
    indexer: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPositions:
    """Where the tokens are, on the device; the layer's rotation."""

    position: Tensor
    """[1] int32, absolute position of the first token."""
    cos: Tensor
    """[T, r / 2] float32, as `sin`."""
    sin: Tensor
    window_cos: Tensor
    """[windows, r / 2] float32, at the first position of each window that may end here, beginning
    with the one that the first token is in; anything where the ratio is 0."""
    window_sin: Tensor
    bad: Tensor
    """[1] int32, set to 1 when a row that is stored is not finite; the caller clears it."""


def prepare(
    qr: Tensor,
    products: InputProducts,
    state: AttentionState,
    positions: RowPositions,
    *,
    overlap: bool = False,
) -> None:
    """Make the rows of one token.

    Args:
        qr: [1, Rq] float32, result.
        products: of the token.
        state: of the layer; its rings and rows are written.
        positions: of the token.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if shapes disagree.
    """
    arguments = {**kernel_arguments(products, state, positions), **kernel_constants(state, qr)}
    programs = 2 + (state.compressor is not None) + (state.indexer is not None)
    launch(
        _prepare_kernel,
        (programs,),
        qr,
        codes_of(state.window, "fp8"),
        state.window[-1],
        **arguments,
        WINDOW_SLOTS=state.window[0].shape[0],
        BJ=POOL_ROWS[state.ratio],
        num_warps=NUM_WARPS[state.ratio],
        **overlap_options(overlap=overlap),
    )


def kernel_arguments(
    products: InputProducts, state: AttentionState, positions: RowPositions
) -> dict[str, Any]:
    """Tensors that the kernels of one token and of a chunk take alike.

    A compressor that does not exist is stood for by tensors that are not touched.
    """
    nothing = products.kv
    arguments: dict[str, Any] = {
        "raw_qr_ptr": products.qr,
        "q_norm_ptr": state.q_norm,
        "raw_kv_ptr": products.kv,
        "kv_norm_ptr": state.kv_norm,
        "position_ptr": positions.position,
        "cos_ptr": positions.cos,
        "sin_ptr": positions.sin,
        "window_cos_ptr": positions.window_cos,
        "window_sin_ptr": positions.window_sin,
        "bad_ptr": positions.bad,
        "eps": state.eps,
    }
    for prefix, part, product, coded in (
        ("c", state.compressor, products.compressor, "fp8"),
        ("i", state.indexer, products.indexer, "fp4"),
    ):
        if (part is None) != (product is None):
            raise ShapeError("prepare: a compressor has no products, or products no compressor")
        values, gates = product or (nothing, nothing)
        arguments |= {
            f"{prefix}_values_ptr": values,
            f"{prefix}_gates_ptr": gates,
            f"{prefix}_ape_ptr": nothing if part is None else part.ape,
            f"{prefix}_norm_ptr": nothing if part is None else part.norm,
            f"{prefix}_ring_ptr": nothing if part is None else part.ring,
            f"{prefix}_codes_ptr": nothing if part is None else codes_of(part.rows, coded),
            f"{prefix}_scales_ptr": nothing if part is None else part.rows[-1],
        }
    return arguments


def kernel_constants(state: AttentionState, qr: Tensor) -> dict[str, Any]:
    """Sizes that the kernels of one token and of a chunk take alike."""
    dim, rank = state.kv_norm.shape[0], state.q_norm.shape[0]
    if qr.shape[-1] != rank or (state.compressor is None) != (state.ratio == 0):
        raise ShapeError(f"prepare: qr is {list(qr.shape)}, ratio {state.ratio}")
    constants: dict[str, Any] = {
        "RANK": rank,
        "BQ": power_of_two(rank),
        "WIDTH": dim,
        "BC": power_of_two(dim),
        "ROPE": state.rope_dim,
        "RATIO": max(state.ratio, 1),
        "FORMAT": row_format(state.window, "fp8"),
        "SCALE_BYTES": state.window[-1].shape[1],
        "HAS_COMPRESSOR": state.compressor is not None,
        "HAS_INDEXER": state.indexer is not None,
        "SERIES": 1,
        "RAW_SLOTS": 1,
        "I_WIDTH": 2,
        "I_SCALE_BYTES": 1,
        "I_FORMAT": "f32",
        "LOG_HADAMARD": 0,
    }
    if state.compressor is not None:
        constants["SERIES"] = state.compressor.ape.shape[1] // dim
        constants["RAW_SLOTS"] = state.compressor.ring.shape[0]
    if state.indexer is not None:
        constants |= _index_constants(state.indexer, constants)
    constants["BI"] = power_of_two(constants["I_WIDTH"])
    constants["GP"] = group_pairs(constants["FORMAT"], constants["BC"])
    constants["I_GP"] = group_pairs(constants["I_FORMAT"], constants["BI"])
    return constants


def _index_constants(part: CompressorState, shared: dict[str, Any]) -> dict[str, Any]:
    width = part.norm.shape[0]
    if part.ring.shape != (shared["RAW_SLOTS"], 2 * shared["SERIES"] * width):
        raise ShapeError(f"prepare: raw ring of the indexer is {list(part.ring.shape)}")
    if part.has_hadamard and width & (width - 1):
        raise ShapeError(f"prepare: Hadamard transform of {width} dims")
    return {
        "I_WIDTH": width,
        "I_SCALE_BYTES": part.rows[-1].shape[1],
        "I_FORMAT": row_format(part.rows, "fp4"),
        "LOG_HADAMARD": width.bit_length() - 1 if part.has_hadamard else 0,
    }


@triton.jit
def _add_token(
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
    position,
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
    """One token of a compressor: its raw row, and the window's row where the window ends.

    The token's own row is pooled from the products, since another thread may have written the ring.
    """
    ROW: tl.constexpr = SERIES * WIDTH
    ape_ptr += position % RATIO * ROW
    kept_ptr = ring_ptr + (position % SLOTS).to(tl.int64) * (2 * ROW)
    keep_raw(values_ptr, gates_ptr, ape_ptr, kept_ptr, ROW, SERIES * BC)
    if (position + 1) % RATIO == 0:
        i_pair = number_pairs(BC // (2 * GP), GP)
        factors = load_factors(norm_ptr, cos_ptr, sin_ptr, i_pair, WIDTH, ROPE)
        o_c = tl.arange(0, BC)
        m_c = o_c < WIDTH
        o_last = (SERIES - 1) * WIDTH + o_c
        row = tl.load(values_ptr + o_last, mask=m_c, other=0.0)
        top = tl.load(gates_ptr + o_last, mask=m_c, other=0.0)
        top += tl.load(ape_ptr + o_last, mask=m_c, other=0.0)
        total = tl.full((BC,), 1.0, tl.float32)
        for first in range(0, SERIES * RATIO, BJ):
            o_j = first + tl.arange(0, BJ)
            before = position + 1 - SERIES * RATIO + o_j
            m_j = (before >= 0) & (before < position)
            column = tl.where(o_j >= (SERIES - 1) * RATIO, (SERIES - 1) * WIDTH, 0)
            o_tile = (before % SLOTS)[:, None] * (2 * ROW) + column[:, None] + o_c[None, :]
            m_tile = m_j[:, None] & m_c[None, :]  # [BJ, BC]
            values = tl.load(ring_ptr + o_tile, mask=m_tile, other=0.0)
            gates = tl.load(ring_ptr + ROW + o_tile, mask=m_tile, other=0.0)
            gates = tl.where(m_j[:, None], gates, float("-inf"))
            top, total, row = pool_slots(top, total, row, values, gates)
        a, b = tl.split(tl.reshape(row / total, (BC // (2 * GP), GP, 2)))
        finish_row(
            a,
            b,
            factors,
            ((position + 1) // RATIO - 1).to(tl.int64),
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


@triton.jit
def _prepare_kernel(
    qr_ptr,
    window_codes_ptr,
    window_scales_ptr,
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
    eps,
    RANK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    WINDOW_SLOTS: tl.constexpr,
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
    OVERLAP: tl.constexpr,
):  # house-rule: long function, because each of its many arguments stands on a line
    """Program 0 makes the compressed row, the next the index key, then the kv row and qr."""
    i_part = tl.program_id(0)
    await_inputs(OVERLAP)
    position = tl.load(position_ptr)
    if HAS_COMPRESSOR:
        if i_part == 0:
            _add_token(
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
                position,
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
        i_part -= 1
    if HAS_INDEXER:
        if i_part == 0:
            _add_token(
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
                position,
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
        i_part -= 1
    if i_part == 0:
        store_kv_row(
            raw_kv_ptr,
            (position % WINDOW_SLOTS).to(tl.int64),
            kv_norm_ptr,
            cos_ptr,
            sin_ptr,
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
    if i_part == 1:
        store_qr_row(qr_ptr, raw_qr_ptr, q_norm_ptr, eps, RANK, BQ)

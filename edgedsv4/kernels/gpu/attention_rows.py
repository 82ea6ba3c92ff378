"""Key/value rows as the cache stores them, read by the attention kernels.

A row of d values is d - r e4m3 codes, then r little-endian bfloat16 (parts: bytes [N, d + r] and
E8M0 scales of groups of 64 [N, fp8_scale_bytes(d - r)]); or plain bfloat16 or float32 [N, d], the
latter for the exact profile. Every row serves as key and as value, so that a tile is decoded once
for both products. A decoded value is exact in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import (
    INTERPRETED,
    dot_acc,
    e4m3_to_f32,
    e8m0_to_f32,
    to_bf16,
)
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.kv_quant import FP8_GROUP, fp8_scale_bytes

Parts = tuple[Tensor, ...]

LOG2_E = 1.4426950408889634
GROUP = tl.constexpr(FP8_GROUP)

NATIVE_E4M3 = ("sm_89", "sm_90", "sm_100", "sm_103", "sm_120", "sm_121")
"""Target families with an instruction that converts e4m3 codes."""


def row_format(rows: Parts) -> str:
    """Format of stored rows: "fp8", "bf16" or "f32"."""
    if len(rows) == 2:
        return "fp8"
    return "f32" if rows[0].dtype == torch.float32 else "bf16"


def tile_of(table: Mapping[str, tuple[int, ...]], family: str) -> tuple[int, ...]:
    """Entry of the longest key that `family` starts with; "" fits every family."""
    return table[max((key for key in table if family.startswith(key)), key=len)]


def check_rows(rows: Parts, dim: int, rope_dim: int, form: str, what: str) -> None:
    """Raise `ShapeError` unless `rows` hold rows of `dim` values in format `form`."""
    if dim % 4 or rope_dim % 4 or not 0 < rope_dim < dim:
        raise ShapeError(
            f"attention: head dim {dim} and rope dim {rope_dim} must be multiples of 4"
        )
    types = {"fp8": torch.uint8, "bf16": torch.bfloat16, "f32": torch.float32}
    widths = [dim]
    if form == "fp8":
        widths = [dim + rope_dim, fp8_scale_bytes(dim - rope_dim)]
    wanted = [((rows[0].shape[0], width), types[form], True) for width in widths]
    if [(part.shape, part.dtype, part.is_contiguous()) for part in rows] != wanted:
        found = [(list(part.shape), part.dtype) for part in rows]
        raise ShapeError(
            f"attention: {what} rows are {found}, expected {form} rows of {dim} values"
        )


def widen_rows(out: Tensor, rows: Parts, rope_dim: int, *, family: str = "") -> None:
    """Decode the first rows of `rows` into `out`; one launch.

    Args:
        out: [N, d] bf16, written.
        rows: at least N rows as stored, in FP8.
        rope_dim: r.
        family: target family ("sm_90", "gfx942", ...).

    Raises:
        ShapeError: if the rows are not FP8 rows of d values.
    """
    count, dim = out.shape
    check_rows(rows, dim, rope_dim, "fp8", "stored")
    check_rows((out,), dim, rope_dim, "bf16", "widened")
    if rows[0].shape[0] < count:
        raise ShapeError(f"widen_rows: {rows[0].shape[0]} rows, expected {count}")
    launch(
        _widen_kernel,
        (cdiv(count, 16),),
        out,
        rows[0],
        rows[1],
        count,
        D=dim,
        R=rope_dim,
        BK=16,
        BD=power_of_two(dim),
        NATIVE=family in NATIVE_E4M3,
        num_warps=4,
    )


@triton.jit(do_not_specialize=["count"])
def _widen_kernel(
    out_ptr,  # [count, D]
    data_ptr,
    scale_ptr,
    count,
    D: tl.constexpr,
    R: tl.constexpr,
    BK: tl.constexpr,
    BD: tl.constexpr,
    NATIVE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BK + tl.arange(0, BK)
    valid = row < count
    b_rows = load_whole_tile(data_ptr, scale_ptr, row, valid, 0, D, R, BD, "fp8", NATIVE)
    i_col = tl.arange(0, BD)
    at = out_ptr + (row * D)[:, None] + i_col[None, :]
    tl.store(at, b_rows, mask=valid[:, None] & (i_col < D)[None, :])


@triton.jit
def load_tile(
    data_ptr,
    scale_ptr,
    row,
    valid,
    D: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Even and odd columns of rows `row` (int64 [BK]), each [BK, BH]; float32 of format "f32".

    Rows that are not valid and columns from D on are 0 (and not read). A pair of columns is loaded
    as one number of 16 bits or more: given 8-bit loads, the compiler would lay out the operands of
    the products for 8-bit values, which costs far more traffic in shared memory, and halves that
    stay apart need no shuffling before the rotation of pairs.
    """
    if FORMAT == "fp8":
        return _load_fp8_tile(data_ptr, scale_ptr, row, valid, 0, D, R, BH, NATIVE)
    elif FORMAT == "f32":
        return _load_pairs(data_ptr + row * D, valid, D, BH)
    else:
        i_pair = tl.arange(0, BH)
        inside = valid[:, None] & (i_pair < D // 2)[None, :]  # [BK, BH]
        at = data_ptr.to(tl.pointer_type(tl.uint32)) + (row * (D // 2))[:, None]
        b_word = tl.load(at + i_pair[None, :], mask=inside, other=0)
        return _low_bf16(b_word), _low_bf16(b_word >> 16)


@triton.jit
def load_whole_tile(
    data_ptr,
    scale_ptr,
    row,
    valid,
    col,
    D: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Columns col .. col + BC - 1 in order, [BK, BC], else as `load_tile`; col % BC == 0.

    BC is a multiple of 64, or all columns.
    """
    if FORMAT == "fp8":
        halves = _load_fp8_tile(data_ptr, scale_ptr, row, valid, col, D, R, BC // 2, NATIVE)
        return tl.reshape(tl.join(halves[0], halves[1]), (row.shape[0], BC))
    else:
        i_col = col + tl.arange(0, BC)
        inside = valid[:, None] & (i_col < D)[None, :]  # [BK, BC]
        return tl.load(data_ptr + (row * D)[:, None] + i_col[None, :], mask=inside, other=0.0)


@triton.jit
def _low_bf16(word):
    return (word & 0xFFFF).to(tl.uint16).to(tl.bfloat16, bitcast=True)


@triton.jit
def _load_fp8_tile(
    data_ptr,
    scale_ptr,
    row,
    valid,
    col,
    D: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Codes and bfloat16 tail in one tile [BK, groups, pairs]: a scale is read once per group."""
    NOPE: tl.constexpr = D - R
    G: tl.constexpr = (2 * BH + GROUP - 1) // GROUP
    C: tl.constexpr = BH // G
    SCALES: tl.constexpr = (NOPE + 8 * GROUP - 1) // (8 * GROUP) * 8
    BK: tl.constexpr = row.shape[0]
    i_pair = tl.arange(0, G)[:, None] * C + tl.arange(0, C)[None, :]
    i_pair = (col // 2 + i_pair)[None, :, :]  # [1, G, C]
    i_group = col // GROUP + tl.arange(0, G)
    is_tail = (i_pair >= NOPE // 2) & (i_pair < D // 2)
    present = valid[:, None, None]

    code_ptr = data_ptr.to(tl.pointer_type(tl.uint16)) + (row * ((D + R) // 2))[:, None, None]
    b_code = tl.load(code_ptr + i_pair, mask=present & (i_pair < NOPE // 2), other=0)  # [BK, G, C]
    tail_ptr = data_ptr.to(tl.pointer_type(tl.uint32)) + (row * ((D + R) // 4))[:, None, None]
    tail_ptr += NOPE // 4 + (i_pair - NOPE // 2)
    b_tail = tl.load(tail_ptr, mask=present & is_tail, other=0)  # [BK, G, C]
    word_ptr = scale_ptr.to(tl.pointer_type(tl.uint32)) + (row * (SCALES // 4))[:, None]
    has_scale = valid[:, None] & (i_group * GROUP < NOPE)[None, :]
    b_word = tl.load(word_ptr + (i_group // 4)[None, :], mask=has_scale, other=0x7F7F7F7F)
    b_factor = e8m0_to_f32((b_word >> ((i_group % 4) * 8)[None, :]) & 0xFF)[:, :, None]

    b_even = _e4m3(b_code & 0xFF, NATIVE) * b_factor
    b_odd = _e4m3(b_code >> 8, NATIVE) * b_factor
    b_even = tl.where(is_tail, (b_tail << 16).to(tl.float32, bitcast=True), b_even)
    b_odd = tl.where(is_tail, (b_tail & 0xFFFF0000).to(tl.float32, bitcast=True), b_odd)
    return tl.reshape(to_bf16(b_even), (BK, BH)), tl.reshape(to_bf16(b_odd), (BK, BH))


@triton.jit
def _e4m3(code, NATIVE: tl.constexpr):
    """Code in the low 8 bits -> float32."""
    if NATIVE and not INTERPRETED:
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        return e4m3_to_f32(code)


@triton.jit
def load_query(q_ptr, i_head, inside, D: tl.constexpr, BH: tl.constexpr):
    """Even and odd columns of heads `i_head` of a query [H, D], each bfloat16 [HB, BH].

    Heads that are not `inside` are 0.
    """
    b_even, b_odd = _load_pairs(q_ptr + i_head * D, inside, D, BH)
    return to_bf16(b_even.to(tl.float32)), to_bf16(b_odd.to(tl.float32))


@triton.jit
def _load_pairs(row_ptr, valid, D: tl.constexpr, BH: tl.constexpr):
    """Even and odd elements of rows `row_ptr` [N], each [N, BH], by wide loads; 0 if not valid."""
    i_col = tl.arange(0, 2 * BH)
    mask = valid[:, None] & (i_col < D)[None, :]
    b_row = tl.load(row_ptr[:, None] + i_col[None, :], mask=mask, other=0.0)
    return tl.split(tl.reshape(b_row, (row_ptr.shape[0], BH, 2)))


@triton.jit
def sliced_scores(
    q_ptr,
    data_ptr,
    scale_ptr,
    i_head,
    inside,
    row,
    valid,
    D: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Products of heads [H, D] and rows, [HB, BK], BC columns at a time, both read from memory.

    For targets whose registers do not hold a block of whole queries, and in float32.
    """
    b_s = tl.zeros((i_head.shape[0], row.shape[0]), tl.float32)
    for col in range(0, D, BC):
        i_col = col + tl.arange(0, BC)
        b_q = tl.load(
            q_ptr + i_head[:, None] * D + i_col[None, :],
            mask=inside[:, None] & (i_col < D)[None, :],
            other=0.0,
        ).to(tl.float32)  # [HB, BC]
        b_k = load_whole_tile(data_ptr, scale_ptr, row, valid, col, D, R, BC, FORMAT, NATIVE)
        if FORMAT == "f32":
            b_s = tl.dot(b_q, tl.trans(b_k), b_s, input_precision="ieee")
        else:
            b_s = dot_acc(to_bf16(b_q), tl.trans(b_k), b_s)
    return b_s


@triton.jit
def weigh_rows(b_acc, b_p, b_rows, PRECISE: tl.constexpr):
    """b_acc + b_p . b_rows; the weights are rounded to bfloat16 unless PRECISE."""
    if PRECISE:
        return tl.dot(b_p, b_rows, b_acc, input_precision="ieee")
    else:
        return dot_acc(to_bf16(b_p), b_rows, b_acc)


@triton.jit
def softmax_step(b_s, valid, b_m):
    """One step of the running softmax in base 2: weights [HB, BK], new maxima, decay of the old.

    A maximum of -inf means no row so far. NaN scores give NaN weights.
    """
    b_s = tl.where(valid[None, :], b_s, float("-inf"))
    b_new = tl.maximum(b_m, tl.max(b_s, axis=1))
    b_base = tl.where(b_new == float("-inf"), 0.0, b_new)
    return tl.exp2(b_s - b_base[:, None]), b_new, tl.exp2(b_m - b_base)


@triton.jit
def rotate_back(b_even, b_odd, cos_ptr, sin_ptr, i_pair, D: tl.constexpr, R: tl.constexpr):
    """Inverse rotation of column pairs `i_pair` [BC] of two [HB, BC]; cos and sin [R / 2]."""
    i_angle = i_pair - (D - R) // 2
    rotated = (i_angle >= 0) & (i_angle < R // 2)
    cos = tl.load(cos_ptr + i_angle, mask=rotated, other=1.0)[None, :]
    sin = tl.load(sin_ptr + i_angle, mask=rotated, other=0.0)[None, :]
    return b_even * cos + b_odd * sin, b_odd * cos - b_even * sin

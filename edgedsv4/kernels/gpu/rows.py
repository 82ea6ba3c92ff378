"""Rows at rest inside kernels: encode a row as FP8, FP4 or float32, and decode rows.

The bytes are those of `edgedsv4.kernels.kv_quant` for the same floats: a row is rounded to
bfloat16, the scale of a group is 2^ceil(log2(max(amax, floor) / code_max)), found from the exponent
and mantissa bits of amax alone, and codes are rounded to nearest even by integer arithmetic. A
group with a NaN or an infinity has the scale 1; a NaN stays one.

Kernels hold a row as pairs: a = elements 0, 2, 4, ..., b = elements 1, 3, 5, ... Rotation works on
pairs, an FP4 byte is one pair, and a group of 64 (32) elements is 32 (16) pairs. A format is "fp8",
"fp4" or "f32".
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import bf16_to_f32, e2m1_to_f32, e4m3_to_f32, f32_to_e4m3

if TYPE_CHECKING:
    from torch import Tensor

Rows = tuple["Tensor", ...]
"""Stored rows: (codes uint8, scales uint8), or (float32,)."""


NAN_BITS = tl.constexpr(0xFFFF0000)


def row_format(rows: Rows, coded: str) -> str:
    """Format of stored rows.

    Args:
        rows: of one store.
        coded: "fp8" or "fp4", what they are when they are bytes.

    Raises:
        ShapeError: if they are neither two tensors of bytes nor one of float32.
    """
    kinds = tuple(part.dtype for part in rows)
    if kinds == (torch.float32,):
        return "f32"
    if kinds != (torch.uint8, torch.uint8):
        raise ShapeError(f"rows: expected (uint8, uint8) or (float32,), found {kinds}")
    return coded


def codes_of(rows: Rows, coded: str) -> Tensor:
    """What `store_row` takes as codes: those of an FP8 store are words of two bytes."""
    return rows[0].view(torch.int16) if row_format(rows, coded) == "fp8" else rows[0]


def group_pairs(row_format: str, block: int) -> int:
    """Pairs of a group of a format, for a row padded to `block` elements, a power of two."""
    return min(16 if row_format == "fp4" else 32, block // 2)


@triton.jit
def number_pairs(G: tl.constexpr, GP: tl.constexpr):
    """Number of each pair of a row [G, GP]."""
    return tl.arange(0, G)[:, None] * GP + tl.arange(0, GP)[None, :]


@triton.jit
def round_bits(x):
    """float32 -> bits of the nearest bfloat16 as a float32; a NaN becomes 0xffff0000."""
    u = x.to(tl.uint32, bitcast=True)
    rounded = (u + 0x7FFF + ((u >> 16) & 1)) & 0xFFFF0000
    return tl.where((u & 0x7FFFFFFF) > 0x7F800000, NAN_BITS, rounded)


@triton.jit
def fp8_scale(top):
    """Bits (int32) of a group's largest magnitude -> scale byte: 448 is 1.75 * 2^8."""
    u = tl.maximum(top, 0x38D1B717)  # 1e-4
    byte = (u >> 23) - 8 + ((u & 0x7FFFFF) > 0x600000).to(tl.int32)
    return tl.where(top >= 0x7F800000, 127, byte)


@triton.jit
def fp4_scale(top):
    """Bits (int32) of a group's largest magnitude -> scale byte: 6 is 1.5 * 2^2."""
    u = tl.maximum(top, 0x01C00000)  # 6 * 2^-126
    byte = (u >> 23) - 2 + ((u & 0x7FFFFF) > 0x400000).to(tl.int32)
    return tl.where(top >= 0x7F800000, 127, byte)


@triton.jit
def power_of_two(byte):
    """Scale byte (int32) of 1..254 -> 2^(byte - 127)."""
    return (byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def f32_to_e2m1(x):
    """float32 -> uint8 e2m1 code, nearest even, saturating at 6 (finite x)."""
    sign = (x.to(tl.uint32, bitcast=True) >> 28) & 8
    magnitude = tl.minimum(tl.abs(x), 6.0)
    u = magnitude.to(tl.uint32, bitcast=True)
    coarse = ((u + 0x1FFFFF + ((u >> 22) & 1)) >> 22) - 252
    fine = (magnitude * 2.0 + 12582912.0).to(tl.uint32, bitcast=True) & 3
    return (tl.where(u < 0x3F800000, fine, coarse) | sign).to(tl.uint8)


@triton.jit
def largest_bits(u_a, u_b):
    """Bits of the largest magnitude of each group of pairs [M, GP] -> int32 [M]."""
    magnitude = tl.maximum((u_a & 0x7FFFFFFF).to(tl.int32), (u_b & 0x7FFFFFFF).to(tl.int32))
    return tl.max(magnitude, axis=1)


@triton.jit
def encode_fp8(a, b):
    """Groups of pairs [M, GP] float32 -> e4m3 codes of a and of b, uint8, and scale bytes [M]."""
    u_a, u_b = round_bits(a), round_bits(b)
    byte = fp8_scale(largest_bits(u_a, u_b))
    inverse = power_of_two(254 - byte)[:, None]
    a = u_a.to(tl.float32, bitcast=True) * inverse
    b = u_b.to(tl.float32, bitcast=True) * inverse
    code_a = tl.where(u_a == NAN_BITS, 0xFF, f32_to_e4m3(a).to(tl.int32))
    code_b = tl.where(u_b == NAN_BITS, 0xFF, f32_to_e4m3(b).to(tl.int32))
    return code_a.to(tl.uint8), code_b.to(tl.uint8), byte.to(tl.uint8)


@triton.jit
def encode_fp4(a, b):
    """Groups of pairs [M, GP] float32 -> e2m1 codes of a and of b, uint8, and scale bytes [M]."""
    u_a, u_b = round_bits(a), round_bits(b)
    byte = fp4_scale(largest_bits(u_a, u_b))
    inverse = power_of_two(254 - byte)[:, None]
    a = u_a.to(tl.float32, bitcast=True) * inverse
    b = u_b.to(tl.float32, bitcast=True) * inverse
    return f32_to_e2m1(a), f32_to_e2m1(b), byte.to(tl.uint8)


@triton.jit
def store_fp8_row(
    codes_ptr,
    scales_ptr,
    row,
    a,
    b,
    i_pair,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    G: tl.constexpr,
):
    """Encode pairs as row `row` (int64): codes, the tail in bfloat16, scales.

    `codes_ptr` points at int16, since a pair of codes and a bfloat16 are two bytes.
    """
    NOPE: tl.constexpr = WIDTH - ROPE
    GROUPS: tl.constexpr = (NOPE + 63) // 64
    codes_ptr += row * (NOPE // 2 + ROPE)
    scales_ptr += row * SCALE_BYTES
    m_nope = i_pair < NOPE // 2
    m_tail = (i_pair >= NOPE // 2) & (i_pair < WIDTH // 2)
    code_a, code_b, byte = encode_fp8(tl.where(m_nope, a, 0.0), tl.where(m_nope, b, 0.0))
    code = code_a.to(tl.uint16) | (code_b.to(tl.uint16) << 8)
    tl.store(codes_ptr + i_pair, code.to(tl.int16, bitcast=True), mask=m_nope)
    for first in tl.static_range(0, SCALE_BYTES, 8):
        o_scale = first + tl.arange(0, 8)
        tl.store(scales_ptr + o_scale, tl.zeros_like(o_scale).to(tl.uint8), mask=o_scale >= GROUPS)
    i_group = tl.arange(0, G)
    tl.store(scales_ptr + i_group, byte, mask=i_group < GROUPS)
    tail = tl.join(round_bits(a), round_bits(b)) >> 16  # [G, GP, 2]
    o_tail = (2 * i_pair - NOPE // 2)[:, :, None] + tl.arange(0, 2)[None, None, :]
    m_tail = m_tail[:, :, None] & (o_tail >= 0)
    tl.store(codes_ptr + o_tail, tail.to(tl.uint16).to(tl.int16, bitcast=True), mask=m_tail)


@triton.jit
def store_fp4_row(
    codes_ptr,
    scales_ptr,
    row,
    a,
    b,
    i_pair,
    WIDTH: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    G: tl.constexpr,
):
    """Encode pairs as row `row` (int64)."""
    code_a, code_b, byte = encode_fp4(a, b)
    pair = code_a | (code_b << 4)
    tl.store(codes_ptr + row * (WIDTH // 2) + i_pair, pair, mask=i_pair < WIDTH // 2)
    i_group = tl.arange(0, G)
    tl.store(scales_ptr + row * SCALE_BYTES + i_group, byte, mask=i_group < SCALE_BYTES)


@triton.jit
def store_row(
    codes_ptr,
    scales_ptr,
    row,
    a,
    b,
    i_pair,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    G: tl.constexpr,
):
    """Store pairs a, b [G, GP], zero past WIDTH, as row `row` (int64) of a store.

    `i_pair` [G, GP] numbers the pairs (`number_pairs`), groups of the format as rows.
    `codes_ptr` is the pointer that `codes_of` makes; a float32 store has its values there.
    """
    if FORMAT == "fp8":
        store_fp8_row(codes_ptr, scales_ptr, row, a, b, i_pair, WIDTH, ROPE, SCALE_BYTES, G)
    elif FORMAT == "fp4":
        store_fp4_row(codes_ptr, scales_ptr, row, a, b, i_pair, WIDTH, SCALE_BYTES, G)
    else:
        m_pair = i_pair < WIDTH // 2
        tl.store(codes_ptr + row * WIDTH + 2 * i_pair, a, mask=m_pair)
        tl.store(codes_ptr + row * WIDTH + 2 * i_pair + 1, b, mask=m_pair)


@triton.jit
def round_fp4(a, b):
    """Pairs [M, GP] after a trip through FP4 storage, float32."""
    code_a, code_b, byte = encode_fp4(a, b)
    scale = power_of_two(byte.to(tl.int32))[:, None]
    nan = (round_bits(a) == NAN_BITS) | (round_bits(b) == NAN_BITS)
    return (
        tl.where(nan, float("nan"), e2m1_to_f32(code_a) * scale),
        tl.where(nan, float("nan"), e2m1_to_f32(code_b) * scale),
    )


@triton.jit
def load_fp8_rows(
    codes_ptr,
    scales_ptr,
    rows,
    m_rows,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BD: tl.constexpr,
):
    """Rows (int64 [N], masked ones are 0) of an FP8 store -> float32 [N, BD], 0 past WIDTH."""
    NOPE: tl.constexpr = WIDTH - ROPE
    o_d = tl.arange(0, BD)[None, :]  # [1, BD]
    m_nope = m_rows[:, None] & (o_d < NOPE)  # [N, BD]
    m_tail = m_rows[:, None] & (o_d >= NOPE) & (o_d < WIDTH)
    b_codes = codes_ptr + rows[:, None] * (NOPE + 2 * ROPE)
    code = tl.load(b_codes + o_d, mask=m_nope, other=0)
    byte = tl.load(scales_ptr + rows[:, None] * SCALE_BYTES + o_d // 64, mask=m_nope, other=127)
    o_tail = NOPE + 2 * (o_d - NOPE)
    low = tl.load(b_codes + o_tail, mask=m_tail, other=0).to(tl.uint32)
    high = tl.load(b_codes + o_tail + 1, mask=m_tail, other=0).to(tl.uint32)
    nope = e4m3_to_f32(code) * power_of_two(byte.to(tl.int32))
    return tl.where(o_d < NOPE, nope, bf16_to_f32(low | (high << 8)))


@triton.jit
def load_fp4_rows(
    codes_ptr,
    scales_ptr,
    rows,
    m_rows,
    WIDTH: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BD: tl.constexpr,
):
    """Rows (int64 [N], masked ones are 0) of an FP4 store -> float32 [N, BD], 0 past WIDTH."""
    o_d = tl.arange(0, BD)[None, :]  # [1, BD]
    m_rows = m_rows[:, None] & (o_d < WIDTH)  # [N, BD]
    pair = tl.load(codes_ptr + rows[:, None] * (WIDTH // 2) + o_d // 2, mask=m_rows, other=0)
    byte = tl.load(scales_ptr + rows[:, None] * SCALE_BYTES + o_d // 32, mask=m_rows, other=127)
    code = (pair.to(tl.int32) >> (4 * (o_d % 2))) & 15
    return e2m1_to_f32(code) * power_of_two(byte.to(tl.int32))

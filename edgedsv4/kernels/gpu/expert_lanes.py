"""Kernels of `expert_vec` for packed types that `lane_dots` decodes in place.

A program takes 16 rows at a time, all columns at once, a block of 256 per warp, and loads the next
rows before it computes with those that it has. Rows of the shared expert, of Q8_0, are an eighth of
the weights and two fifths of the bytes; they are sums of bytes times x, 16 columns per thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.group_dots import group_planes
from edgedsv4.kernels.gpu.lane_dots import (
    LANE_TYPES,
    load_rows,
    load_vector,
    product,
    total,
    vector_operand,
)
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.row_dots import q8_0_rows

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix


@dataclass(frozen=True, slots=True)
class LaneTile:
    """Size of a program's work."""

    warps: int
    """Of 256 columns each."""
    programs: int = 0
    """Programs at most (gate and up)."""
    hold: bool = True
    """Whether the vector stays in registers (gate and up)."""
    shared: int = 2
    """Rows of the shared expert at a time (gate and up); in one tensor, 2 to 8 (down)."""
    registers: int = 0
    """Registers per thread at most; 0 for any number."""


@dataclass(frozen=True, slots=True)
class LaneSizes:
    """What a launch depends on beside its tensors."""

    family: str
    tile: LaneTile | None
    """Other sizes than those of the table."""
    used: Tensor | None
    """int32 [1], how many of the slots count; None for all."""
    width: int = 0
    """F, for gate and up."""


_GATE_UP = {
    "sm_9": LaneTile(16, 264, hold=False, shared=4),
    "sm_10": LaneTile(16, 296, hold=False, shared=4),
}
_DOWN = {"sm_9": LaneTile(8), "sm_10": LaneTile(8)}
_OTHER_GATE_UP, _OTHER_DOWN = LaneTile(16, 128), LaneTile(8)


def fits_lanes(matrix: DeviceMatrix, shared: DeviceMatrix | None, family: str) -> bool:
    """Whether these kernels do it."""
    is_shared_fit = shared is None or shared.type == "Q8_0"
    return matrix.type in LANE_TYPES and is_shared_fit and not family.startswith("gfx")


def _tile(table: dict[str, LaneTile], other: LaneTile, family: str) -> LaneTile:
    return next((tile for name, tile in table.items() if family.startswith(name)), other)


def _planes(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor]:
    first, second, third = matrix.planes[:3]
    return first, second, third


def _table(matrix: DeviceMatrix) -> Tensor:
    return group_planes(matrix)[3] if matrix.type == "IQ2_XXS" else matrix.planes[0]


def _registers(tile: LaneTile) -> dict[str, int]:
    return {"maxnreg": tile.registers} if tile.registers else {}


def gate_up_lanes(
    h: Tensor,
    x: Tensor,
    slots: Tensor,
    gate_up: tuple[DeviceMatrix, DeviceMatrix],
    shared: tuple[DeviceMatrix, DeviceMatrix] | None,
    limits: tuple[float, float],
    *,
    sizes: LaneSizes,
) -> None:
    """`expert_gate_up` with checked arguments."""
    tile, width = sizes.tile or _tile(_GATE_UP, _OTHER_GATE_UP, sizes.family), sizes.width
    w1, w3 = gate_up
    s1, s3 = shared if shared is not None else gate_up
    shared_rows = s1.rows if shared is not None else 0
    c0, d0 = s1.planes[0].view(torch.uint8), s3.planes[0].view(torch.uint8)
    blocks = power_of_two(w1.cols // 256)
    tiles = len(slots) * -(-width // 8)
    launch(
        gate_up_kernel,
        (min(tiles, tile.programs),),
        *(h, x, slots, sizes.used, *_planes(w1), *_planes(w3), _table(w1)),
        *(c0, s1.planes[1], d0, s3.planes[1], len(slots), width, shared_rows, *limits),
        K=w1.cols,
        TYPE=w1.type,
        BU=blocks,
        HAS_SHARED=shared is not None,
        SHARED_BN=tile.shared,
        HOLD=tile.hold,
        num_warps=min(tile.warps, blocks),
        **_registers(tile),
    )


def down_lanes(
    out: Tensor,
    h: Tensor,
    slots: Tensor,
    weights: Tensor,
    down: DeviceMatrix,
    shared: DeviceMatrix | None,
    *,
    sizes: LaneSizes,
) -> None:
    """`expert_down` with checked arguments."""
    tile = sizes.tile or _tile(_DOWN, _OTHER_DOWN, sizes.family)
    other = shared if shared is not None else down
    blocks = len(slots) * (down.cols // 256)
    warps = min(tile.warps, power_of_two(blocks))
    launch(
        down_kernel,
        (-(-out.numel() // 16),),
        *(out, h, slots, weights, sizes.used, *_planes(down), _table(down)),
        *(other.planes[0].view(torch.uint8), other.planes[1], len(slots), out.numel()),
        K=down.cols,
        TYPE=down.type,
        BU=warps,
        SHARED_K=shared.cols if shared is not None else 0,
        SHARED_R=tile.shared,
        num_warps=warps,
        **_registers(tile),
    )


@triton.jit
def gated(gate, up, limit):
    """The hidden layer: silu(min(gate, limit)) clamp(up, -limit, limit)."""
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, up)
    up = tl.where(up < -limit, -limit, up)
    e = tl.exp(-tl.abs(gate))
    return gate * tl.where(gate < 0, e, 1.0) / (1.0 + e) * up


@triton.jit
def _gate_up_load(
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    slots_ptr,
    tile,
    width,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BU: tl.constexpr,
):
    blocks = tl.cdiv(width, 8)
    i_slot = tile // blocks
    first = (tile - i_slot * blocks) * 8
    o_n = tl.minimum(first + tl.arange(0, 8), width - 1)
    row = (tl.load(slots_ptr + i_slot).to(tl.int64) * width + o_n)[:, None]
    o_u = tl.arange(0, BU)
    return load_rows(a0, a1, a2, b0, b1, b2, row, row, o_u, o_u < K // 256, K, TYPE)


# Planes of four matrices: more arguments and lines than other kernels, all alike.
@triton.jit
def gate_up_kernel(
    h_ptr,
    x_ptr,
    slots_ptr,
    used_ptr,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    table_ptr,
    c0,
    c1,
    d0,
    d1,
    chosen,
    width,
    shared_rows,
    limit,
    shared_limit,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BU: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    SHARED_BN: tl.constexpr,
    HOLD: tl.constexpr,
):
    """Kernel of `gate_up_lanes`."""
    o_u = tl.arange(0, BU)
    blocks = tl.cdiv(width, 8)
    tiles = blocks * chosen
    last = tiles - 1
    if used_ptr is not None:
        # Without any, the first one's rows are loaded and not used.
        tiles = blocks * tl.load(used_ptr)
        last = tl.maximum(tiles - 1, 0)
    tile = tl.program_id(0)
    first, second, scale = _gate_up_load(
        a0, a1, a2, b0, b1, b2, slots_ptr, tl.minimum(tile, last), width, K, TYPE, BU
    )
    x = load_vector(x_ptr, o_u, o_u < K // 256)
    table = tl.load(table_ptr + tl.arange(0, 256))
    constants = (
        tl.load(table_ptr + 260).to(tl.uint32, bitcast=True),
        tl.load(table_ptr + 264).to(tl.uint32, bitcast=True),
    )
    x, sums = vector_operand(x, TYPE, BU)
    if HOLD:
        while tile < tiles:
            after = tile + tl.num_programs(0)
            later, more, scales = _gate_up_load(
                *(a0, a1, a2, b0, b1, b2, slots_ptr, tl.minimum(after, last), width, K),
                *(TYPE, BU),
            )
            acc = product(x, sums, first, second, scale, table, constants, TYPE, BU)
            _gate_up_store(h_ptr, acc, tile, width, limit, TYPE)
            first, second, scale, tile = later, more, scales, after
    else:
        for i in tl.range(tile, tiles, tl.num_programs(0), num_stages=1):
            after = i + tl.num_programs(0)
            later, more, scales = _gate_up_load(
                *(a0, a1, a2, b0, b1, b2, slots_ptr, tl.minimum(after, last), width, K),
                *(TYPE, BU),
            )
            acc = product(x, sums, first, second, scale, table, constants, TYPE, BU)
            _gate_up_store(h_ptr, acc, i, width, limit, TYPE)
            first, second, scale = later, more, scales
    if HAS_SHARED:
        is_up = tl.arange(0, 2) > 0
        p0, p1 = tl.where(is_up, d0, c0), tl.where(is_up, d1, c1)
        steps = tl.cdiv(shared_rows, SHARED_BN)
        for step in tl.range(tl.program_id(0), steps, tl.num_programs(0), num_stages=1):
            row = tl.zeros([2], tl.int64) + step * SHARED_BN
            both = q8_0_rows(x_ptr, p0, p1, row, 1, shared_rows - 1, K, 2, SHARED_BN)
            s_gate, s_up = tl.split(tl.permute(both, (1, 0)))
            o_s = step * SHARED_BN + tl.arange(0, SHARED_BN)
            hidden = gated(s_gate, s_up, shared_limit)
            tl.store(h_ptr + chosen * width + o_s, hidden, mask=o_s < shared_rows)


@triton.jit
def _gate_up_store(h_ptr, acc, tile, width, limit, TYPE: tl.constexpr):
    gate, up = tl.split(tl.permute(tl.reshape(total(acc, TYPE), (2, 8)), (1, 0)))
    blocks = tl.cdiv(width, 8)
    i_slot = tile // blocks
    o_n = (tile - i_slot * blocks) * 8 + tl.arange(0, 8)
    tl.store(h_ptr + i_slot * width + o_n, gated(gate, up, limit), mask=o_n < width)


@triton.jit
def _down_load(
    h_ptr,
    slots_ptr,
    weights_ptr,
    p0,
    p1,
    p2,
    step,
    chosen,
    first,
    rows,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BU: tl.constexpr,
):
    """Blocks step BU .. of the rows of all slots, one slot after the other."""
    o_u = step * BU + tl.arange(0, BU)
    m_u = o_u < chosen * (K // 256)
    i_slot = o_u // (K // 256)
    slot = tl.load(slots_ptr + i_slot, mask=m_u, other=0).to(tl.int64)
    weight = tl.load(weights_ptr + i_slot, mask=m_u, other=0.0)
    h = load_vector(h_ptr, o_u, m_u)
    o_n = tl.arange(0, 8)[:, None]
    base = (slot * rows)[None, :]
    a_row, b_row = (
        base + tl.minimum(first + o_n, rows - 1),
        base + tl.minimum(first + 8 + o_n, rows - 1),
    )
    within = o_u - i_slot * (K // 256)
    words, small, scale = load_rows(p0, p1, p2, p0, p1, p2, a_row, b_row, within, m_u, K, TYPE)
    return words, small, scale, h, weight


@triton.jit
def down_kernel(
    out_ptr,
    h_ptr,
    slots_ptr,
    weights_ptr,
    used_ptr,
    p0,
    p1,
    p2,
    table_ptr,
    c0,
    c1,
    chosen,
    rows,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BU: tl.constexpr,
    SHARED_K: tl.constexpr,
    SHARED_R: tl.constexpr,
):
    """Kernel of `down_lanes`."""
    first = tl.program_id(0) * 16
    o_n = first + tl.arange(0, 16)
    used = chosen
    if used_ptr is not None:
        used = tl.load(used_ptr)
    words, small, scale, h, weight = _down_load(
        h_ptr, slots_ptr, weights_ptr, p0, p1, p2, 0, used, first, rows, K, TYPE, BU
    )
    if TYPE == "IQ2_XXS":
        table = tl.load(table_ptr + tl.arange(0, 256))
        constants = (
            tl.load(table_ptr + 260).to(tl.uint32, bitcast=True),
            tl.load(table_ptr + 264).to(tl.uint32, bitcast=True),
        )
    else:
        table = 0
        constants = (0, 0)
    acc = tl.zeros([BU, 16, 2], tl.float32)
    steps = tl.cdiv(used * (K // 256), BU)
    for step in tl.range(0, steps, num_stages=1):
        later, more, scales, h_later, w_later = _down_load(
            h_ptr, slots_ptr, weights_ptr, p0, p1, p2, step + 1, used, first, rows, K, TYPE, BU
        )
        x, sums = vector_operand(h * weight[:, None], TYPE, BU)
        acc += product(x, sums, words, small, scale, table, constants, TYPE, BU)
        words, small, scale, h, weight = later, more, scales, h_later, w_later
    out = total(acc, TYPE)
    if SHARED_K > 0:
        o_r = tl.arange(0, SHARED_R)
        zero = tl.zeros([SHARED_R], tl.int64)
        y = q8_0_rows(
            *(h_ptr + chosen * K, c0 + zero, c1 + zero, zero + first + o_r, SHARED_R, rows - 1),
            *(SHARED_K, SHARED_R, 16 // SHARED_R),
        )  # [R, 16 / R]
        out += tl.reshape(tl.permute(y, (1, 0)), (16,))
    tl.store(out_ptr + o_n, out, mask=o_n < rows)

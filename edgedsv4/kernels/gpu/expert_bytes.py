"""Kernels of `expert_vec` for vectors of bytes, see `byte_products`.

The first launch makes 32 hidden values of one expert per program and rounds them to bytes for the
second, whose programs take some rows of the output over all chosen experts. With `used` only the
first of the slots are computed, how many says the device: no bytes of the others are read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.byte_products import (
    BYTE_ORDERS,
    LANE_COLUMNS,
    byte_planes,
    lane_products,
    load_constants,
    load_lanes,
    load_vector,
)
from edgedsv4.kernels.gpu.byte_vector import GROUP, ByteVector, store_bytes
from edgedsv4.kernels.gpu.expert_lanes import gated
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.gpu.tuples import appended, nothing

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix


@dataclass(frozen=True, slots=True)
class ByteTile:
    """Size of a program's work."""

    rows: int
    """At once, of each matrix; of gate and up 8 or 32."""
    warps: int


# By type, measured on an H200; more rows per warp would not fit into registers.
GATE_UP = {"IQ2_XXS": ByteTile(8, 4), "Q2_K": ByteTile(8, 8)}
DOWN = {"IQ2_XXS": ByteTile(8, 4), "Q2_K": ByteTile(8, 2)}
_LANES = 32


def gate_up_bytes(
    h: ByteVector,
    x: ByteVector,
    slots: Tensor,
    gate_up: tuple[DeviceMatrix, DeviceMatrix],
    limit: float,
    *,
    width: int,
    tile: ByteTile | None = None,
    overlap: bool = False,
    used: Tensor | None = None,
) -> None:
    """Hidden layers of the chosen experts.

    Args:
        h: of k F columns, set by the launch: slot after slot.
        x: of D columns.
        slots: int32 [k], places of the chosen experts in the banks.
        gate_up: banks W1 and W3 of one type, [slots F, D].
        limit: clamp; inf for none.
        width: F, a multiple of 32.
        tile: other sizes than the usual ones.
        overlap: see `nvidia.overlap_options`.
        used: int32 [1], how many of the slots count, 0..k; None for all. The hidden layers of the
            others are left as they were.

    Raises:
        ShapeError: if the shapes or the orders of the vectors do not fit.
    """
    w1, w3 = gate_up
    fits = h.columns == len(slots) * width and width % GROUP == 0 and w1.rows % width == 0
    is_pair = w1.type == w3.type and w1.rows == w3.rows and w1.cols == w3.cols
    if not (fits and is_pair and x.columns == w1.cols and x.order == BYTE_ORDERS[w1.type]):
        raise ShapeError(
            f"gate_up_bytes: h {h.columns}, x {x.columns} {x.order}, {len(slots)} slots of {width},"
            f" banks {w1.type} [{w1.rows}, {w1.cols}], {w3.type} [{w3.rows}, {w3.cols}]"
        )
    tile = tile or GATE_UP[w1.type]
    a0, a1, a2, table = byte_planes(w1)
    b0, b1, b2, _ = byte_planes(w3)
    launch(
        _gate_up_kernel,
        (len(slots) * (width // GROUP),),
        *(h.words, h.scales, x.words, x.scales, slots, used, a0, a1, a2, b0, b1, b2, table),
        *(width, h.scales.numel(), limit),
        K=w1.cols,
        TYPE=w1.type,
        ORDER=h.order,
        LANE=LANE_COLUMNS[w1.type],
        BL=_lanes(w1.cols // LANE_COLUMNS[w1.type]),
        BR=tile.rows,
        num_warps=tile.warps,
        **overlap_options(overlap=overlap),
    )


def down_bytes(
    out: Tensor,
    h: ByteVector,
    slots: Tensor,
    weights: Tensor,
    down: DeviceMatrix,
    *,
    tile: ByteTile | None = None,
    overlap: bool = False,
    used: Tensor | None = None,
) -> None:
    """Weighted sum of the outputs of the chosen experts.

    Args:
        out: f32 [1, D], set by the launch.
        h: of k F columns, of `gate_up_bytes`.
        slots: int32 [k].
        weights: f32 [k], of the router.
        down: bank W2, [slots D, F].
        tile: other sizes than the usual ones.
        overlap: see `nvidia.overlap_options`.
        used: as for `gate_up_bytes`.

    Raises:
        ShapeError: if the shapes or the order of the vector do not fit.
    """
    rows, chosen = out.numel(), len(slots)
    fits = h.columns == chosen * down.cols and weights.shape == slots.shape
    if not (fits and chosen and down.rows % rows == 0 and h.order == BYTE_ORDERS[down.type]):
        raise ShapeError(
            f"down_bytes: out {list(out.shape)}, h {h.columns} {h.order}, slots"
            f" {list(slots.shape)}, weights {list(weights.shape)}, bank {down.type}"
            f" [{down.rows}, {down.cols}]"
        )
    tile = tile or DOWN[down.type]
    p0, p1, p2, table = byte_planes(down)
    launch(
        _down_kernel,
        (-(-rows // tile.rows),),
        *(out, h.words, h.scales, slots, weights, used, p0, p1, p2, table),
        *(rows, chosen * (down.cols // GROUP)),
        K=down.cols,
        CHOSEN=chosen,
        TYPE=down.type,
        LANE=LANE_COLUMNS[down.type],
        BL=_lanes(chosen * down.cols // LANE_COLUMNS[down.type]),
        BR=tile.rows,
        num_warps=tile.warps,
        **overlap_options(overlap=overlap),
    )


def _lanes(count: int) -> int:
    """Threads that share a row."""
    return min(_LANES, power_of_two(count))


@triton.jit
def _gate_up_kernel(
    h_words_ptr,
    h_scales_ptr,
    words_ptr,
    scales_ptr,
    slots_ptr,
    used_ptr,
    a0,
    a1,
    a2,
    b0,
    b1,
    b2,
    table_ptr,
    width,
    h_groups,
    limit,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    ORDER: tl.constexpr,
    LANE: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    i_group = tl.program_id(0)
    blocks = width // 32
    i_slot = i_group // blocks
    if used_ptr is not None:  # noqa: SIM102 - decided when it is compiled
        if i_slot >= tl.load(used_ptr):
            return
    first = (i_group - i_slot * blocks) * 32
    base = tl.load(slots_ptr + i_slot).to(tl.int64) * width + first
    o_r = tl.arange(0, BR)
    constants = load_constants(table_ptr, tl.arange(0, BL), TYPE)
    hidden = nothing()
    for part in tl.static_range(32 // BR):
        row = (base + part * BR + o_r)[:, None]
        gate = tl.zeros([BR, BL], tl.float32)
        up = tl.zeros([BR, BL], tl.float32)
        for step in tl.static_range((K // LANE + BL - 1) // BL):
            o_l = step * BL + tl.arange(0, BL)
            m_l = o_l < K // LANE
            x = load_vector(words_ptr, scales_ptr, o_l, m_l, K // 32, TYPE)
            a = load_lanes(a0, a1, a2, row, o_l, m_l, K, TYPE)
            b = load_lanes(b0, b1, b2, row, o_l, m_l, K, TYPE)
            gate += lane_products(x, a, constants, TYPE)
            up += lane_products(x, b, constants, TYPE)
        hidden = appended(hidden, gated(tl.sum(gate, 1), tl.sum(up, 1), limit))
    together = _together(hidden, BR)
    o_g = i_group + tl.arange(0, 1)
    store_bytes(h_words_ptr, h_scales_ptr, together, o_g, o_g >= 0, h_groups, ORDER, 1)


@triton.jit
def _together(parts, BR: tl.constexpr):
    """Tensors of BR values as one [1, 32]."""
    if BR == 32:
        return parts[0][None, :]
    else:
        tl.static_assert(BR == 8)
        both = tl.join(tl.join(parts[0], parts[2]), tl.join(parts[1], parts[3]))  # [8, 2, 2]
        return tl.reshape(tl.permute(both, (1, 2, 0)), (1, 32))


@triton.jit
def _down_kernel(
    out_ptr,
    words_ptr,
    scales_ptr,
    slots_ptr,
    weights_ptr,
    used_ptr,
    p0,
    p1,
    p2,
    table_ptr,
    rows,
    groups,
    K: tl.constexpr,
    CHOSEN: tl.constexpr,
    TYPE: tl.constexpr,
    LANE: tl.constexpr,
    BL: tl.constexpr,
    BR: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    o_r = tl.program_id(0) * BR + tl.arange(0, BR)
    within_rows = tl.minimum(o_r, rows - 1)[:, None]
    constants = load_constants(table_ptr, tl.arange(0, BL), TYPE)
    acc = tl.zeros([BR, BL], tl.float32)
    LANES: tl.constexpr = K // LANE
    lanes = CHOSEN * LANES
    if used_ptr is not None:
        lanes = tl.load(used_ptr) * LANES
    for step in tl.static_range((CHOSEN * LANES + BL - 1) // BL):
        o_l = step * BL + tl.arange(0, BL)
        m_l = o_l < lanes
        i_slot = o_l // LANES
        slot = tl.load(slots_ptr + i_slot, mask=m_l, other=0).to(tl.int64)
        weight = tl.load(weights_ptr + i_slot, mask=m_l, other=0.0)
        row = (slot * rows)[None, :] + within_rows
        loaded = load_lanes(p0, p1, p2, row, o_l - i_slot * LANES, m_l, K, TYPE)
        x = load_vector(words_ptr, scales_ptr, o_l, m_l, groups, TYPE)
        acc += weight[None, :] * lane_products(x, loaded, constants, TYPE)
    tl.store(out_ptr + o_r, tl.sum(acc, 1), mask=o_r < rows)

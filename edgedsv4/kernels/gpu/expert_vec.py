"""The experts of one token.

h_j = silu(min(a, limit)) clamp(b, -limit, limit) with a = W1_j x and b = W3_j x, then
out = sum_j weight_j W2_j h_j, in slot order, then the shared expert. With `used` only the first of
the slots are computed, how many says the device: no bytes of the others are read.

Banks hold the rows of an expert at slot * F (W1, W3) or slot * D (W2). The rows of the shared
expert, of a type of its own, are further programs of the same launch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.expert_lanes import (
    LaneSizes,
    LaneTile,
    down_lanes,
    fits_lanes,
    gate_up_lanes,
    gated,
)
from edgedsv4.kernels.gpu.group_dots import (
    add_products,
    group_planes,
    total,
    unit_columns,
    vector_columns,
)
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.matvec import kernel_planes
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.gpu.row_dots import row_dots

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix


@dataclass(frozen=True, slots=True)
class _Tile:
    """Size of a program's work: of types with `group_dots`, rows, warps, groups of 32 per warp."""

    rows: int
    warps: int
    groups: int
    stages: int

    def units(self, type_name: str) -> int:
        """Units per step: every warp takes some of them."""
        return self.warps if unit_columns(type_name) == 256 else self.groups * self.warps


_ROWS = 4
"""Rows per program of types without `group_dots`."""

# By the beginning of the family's name, the first that fits. On Hopper, 2048 rows of six experts
# and the shared one run in one wave, and 4096 rows are a program of eight warps per multiprocessor.
# Blocks of 256 columns take much shared memory, on AMD too much.
_GATE_UP = {"sm_9": _Tile(32, 4, 2, 4), "sm_10": _Tile(32, 4, 2, 4), "gfx": _Tile(16, 4, 2, 1)}
_BLOCK_GATE_UP = {"gfx": _Tile(16, 4, 2, 1)}
_DOWN = {"gfx": _Tile(16, 4, 2, 1), "sm_12": _Tile(32, 8, 4, 2)}
_OTHER_GATE_UP, _OTHER_DOWN = _Tile(16, 4, 2, 3), _Tile(32, 8, 4, 3)


def _tile(table: dict[str, _Tile], other: _Tile, family: str) -> _Tile:
    return next((tile for name, tile in table.items() if family.startswith(name)), other)


def _is_grouped(matrix: DeviceMatrix, family: str) -> bool:
    """Whether `group_dots` computes the product."""
    columns = unit_columns(matrix.type)
    return columns == 32 or (columns > 0 and not family.startswith("gfx"))


def expert_gate_up(
    h: Tensor,
    x: Tensor,
    slots: Tensor,
    gate_up: tuple[DeviceMatrix, DeviceMatrix],
    shared: tuple[DeviceMatrix, DeviceMatrix] | None,
    limits: tuple[float, float],
    *,
    family: str = "sm_90",
    tile: LaneTile | None = None,
    overlap: bool = False,
    used: Tensor | None = None,
) -> None:
    """Hidden layers of the chosen experts and of the shared one.

    Args:
        h: f32 [k F + Fs], set by the launch: slot after slot, then the shared expert.
        x: f32 [1, D].
        slots: int32 [k], places of the chosen experts in the banks.
        gate_up: banks W1 and W3 of one type, [slots F, D].
        shared: W1 and W3 of the shared expert, [Fs, D] and of one type.
        limits: clamps of the routed experts and of the shared one; inf for none.
        family: target family, the key of the tile table.
        tile: other sizes than those of the table, of types with `lane_dots`.
        overlap: see `nvidia.overlap_options`; not of those types.
        used: int32 [1], how many of the slots count, 0..k; None for all. The hidden layers of the
            others are left as they were; the first slot is one of the bank in any case.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    w1, w3 = gate_up
    s1, s3 = shared if shared is not None else gate_up
    shared_rows = s1.rows if shared is not None else 0
    chosen, columns = len(slots), w1.cols
    width = (h.numel() - shared_rows) // chosen
    _check_gate_up(h, x, slots, (w1, w3, s1, s3), (width, shared_rows))
    if fits_lanes(w1, shared[0] if shared is not None else None, family):
        sizes = LaneSizes(family, tile, used, width)
        gate_up_lanes(h, x, slots, gate_up, shared, limits, sizes=sizes)
        return
    table = _GATE_UP if unit_columns(w1.type) == 32 else _BLOCK_GATE_UP
    size = _tile(table, _OTHER_GATE_UP, family)
    is_grouped, is_shared_grouped = _is_grouped(w1, family), _is_grouped(s1, family)
    block = size.rows if is_grouped else _ROWS
    shared_block = 16 if is_shared_grouped else _ROWS
    programs = chosen * -(-width // block) + -(-shared_rows // shared_block)
    launch(
        _gate_up_kernel,
        (programs,),
        *(h, x, slots, used, *_planes(w1, is_grouped), *_planes(w3, is_grouped)),
        *(*_planes(s1, is_shared_grouped), *_planes(s3, is_shared_grouped)),
        *(chosen, width, shared_rows, *limits),
        K=columns,
        TYPE=w1.type,
        SCALE_COLS=w1.scale_cols,
        UNIT=unit_columns(w1.type) if is_grouped else 0,
        BU=size.units(w1.type),
        BN=block,
        SHARED_TYPE=s1.type if shared is not None else "",
        SHARED_SCALE_COLS=s1.scale_cols,
        SHARED_UNIT=unit_columns(s1.type) if is_shared_grouped else 0,
        SHARED_BU=size.units(s1.type),
        SHARED_BN=shared_block,
        BG=_pieces(columns, size.warps),
        STAGES=size.stages,
        num_warps=size.warps,
        **overlap_options(overlap=overlap),
    )


def expert_down(
    out: Tensor,
    h: Tensor,
    slots: Tensor,
    weights: Tensor,
    down: DeviceMatrix,
    shared: DeviceMatrix | None,
    *,
    family: str = "sm_90",
    tile: LaneTile | None = None,
    overlap: bool = False,
    used: Tensor | None = None,
) -> None:
    """Weighted sum of the outputs of the chosen experts, and of the shared one.

    Args:
        out: f32 [1, D], set by the launch.
        h: f32 [k F + Fs] of `expert_gate_up`.
        slots: int32 [k].
        weights: f32 [k], of the router.
        down: bank W2, [slots D, F].
        shared: W2 of the shared expert, [D, Fs].
        family: target family, the key of the tile table.
        tile: other sizes than those of the table, of types with `lane_dots`.
        overlap: see `nvidia.overlap_options`; not of those types.
        used: as for `expert_gate_up`.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    rows, columns, chosen = out.numel(), down.cols, len(slots)
    other = shared if shared is not None else down
    shared_columns = other.cols if shared is not None else 0
    is_shared_fit = shared is None or shared.rows == rows
    fits = h.numel() == chosen * columns + shared_columns and weights.shape == slots.shape
    if not (fits and is_shared_fit and chosen and down.rows % rows == 0):
        raise ShapeError(
            f"expert_down: out {list(out.shape)}, h {list(h.shape)}, slots {list(slots.shape)},"
            f" weights {list(weights.shape)}, bank [{down.rows}, {columns}], shared {shared}"
        )
    if fits_lanes(down, shared, family):
        sizes = LaneSizes(family, tile, used)
        down_lanes(out, h, slots, weights, down, shared, sizes=sizes)
        return
    size = _tile(_DOWN, _OTHER_DOWN, family)
    are_grouped = _is_grouped(down, family) and _is_grouped(other, family)
    block = size.rows if are_grouped else _ROWS
    unit, shared_unit = (unit_columns(m.type) if are_grouped else 0 for m in (down, other))
    launch(
        _down_kernel,
        (-(-rows // block),),
        *(out, h, slots, weights, used, *_planes(down, are_grouped), *_planes(other, are_grouped)),
        *(chosen, rows),
        K=columns,
        TYPE=down.type,
        SCALE_COLS=down.scale_cols,
        UNIT=unit,
        BU=size.units(down.type),
        SHARED_K=shared_columns,
        SHARED_TYPE=other.type if shared is not None else "",
        SHARED_SCALE_COLS=other.scale_cols,
        SHARED_UNIT=shared_unit,
        SHARED_BU=size.units(other.type),
        BN=block,
        BG=_pieces(columns, size.warps),
        STAGES=size.stages,
        num_warps=size.warps,
        **overlap_options(overlap=overlap),
    )


def _planes(matrix: DeviceMatrix, is_grouped: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return group_planes(matrix) if is_grouped else kernel_planes(matrix)


def _pieces(columns: int, warps: int) -> int:
    return min(32 * warps, power_of_two(-(-columns // 16)))


def _check_gate_up(
    h: Tensor,
    x: Tensor,
    slots: Tensor,
    matrices: tuple[DeviceMatrix, ...],
    widths: tuple[int, int],
) -> None:
    w1, w3, s1, s3 = matrices
    width, shared_rows = widths
    is_one_type = w1.type == w3.type and s1.type == s3.type
    is_one_shape = w1.rows == w3.rows and s1.rows == s3.rows
    is_one_width = x.numel() == w1.cols == w3.cols == s1.cols == s3.cols
    fills = width > 0 and h.numel() == len(slots) * width + shared_rows
    if not (is_one_type and is_one_shape and is_one_width and fills and w1.rows % width == 0):
        shapes = [[matrix.type, matrix.rows, matrix.cols] for matrix in matrices]
        raise ShapeError(
            f"expert_gate_up: h {list(h.shape)}, x {list(x.shape)}, slots {list(slots.shape)},"
            f" matrices {shapes}"
        )
    if any(t.dtype != torch.float32 for t in (h, x)) or slots.dtype != torch.int32:
        raise ShapeError("expert_gate_up: h and x f32, slots int32 are needed")


@triton.jit
def _gate_up_rows(
    x_ptr,
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    base,
    first,
    rows,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows first .. first + BN - 1 of two matrices that start at row `base`: two f32 [BN]."""
    if UNIT > 0:
        row = base + tl.minimum(first + tl.arange(0, BN), rows - 1)
        gate = tl.zeros([BU, BN, 2], tl.float32)
        up = tl.zeros([BU, BN, 2], tl.float32)
        for u0 in tl.range(0, K // UNIT, BU, num_stages=STAGES):
            x, sums = vector_columns(x_ptr, 1.0, u0, K, TYPE, UNIT, BU)
            gate = add_products(gate, x, sums, a0, a1, a2, a3, row, u0, K, TYPE, UNIT, BU, BN)
            up = add_products(up, x, sums, b0, b1, b2, b3, row, u0, K, TYPE, UNIT, BU, BN)
        return total(gate, TYPE), total(up, TYPE)
    else:
        row, last = base + first, base + rows
        gate = row_dots(
            *(x_ptr, 0, 0, 1, a0, a1, a2, a3, row, last, K, TYPE, SCALE_COLS, 1, BN, BG)
        )
        up = row_dots(*(x_ptr, 0, 0, 1, b0, b1, b2, b3, row, last, K, TYPE, SCALE_COLS, 1, BN, BG))
        return tl.reshape(gate, (BN,)), tl.reshape(up, (BN,))


@triton.jit
def _gate_up_kernel(
    h_ptr,
    x_ptr,
    slots_ptr,
    used_ptr,
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    c0,
    c1,
    c2,
    c3,
    d0,
    d1,
    d2,
    d3,
    chosen,
    width,
    shared_rows,
    limit,
    shared_limit,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    BN: tl.constexpr,
    SHARED_TYPE: tl.constexpr,
    SHARED_SCALE_COLS: tl.constexpr,
    SHARED_UNIT: tl.constexpr,
    SHARED_BU: tl.constexpr,
    SHARED_BN: tl.constexpr,
    BG: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    # The programs of the shared expert read the most bytes, so they start first.
    i = tl.program_id(0) - tl.cdiv(shared_rows, SHARED_BN)
    blocks = tl.cdiv(width, BN)
    if used_ptr is not None:  # noqa: SIM102 - decided when it is compiled
        if i >= tl.load(used_ptr) * blocks:
            return
    if i >= 0:
        i_slot = i // blocks
        first = (i - i_slot * blocks) * BN
        base = tl.load(slots_ptr + i_slot).to(tl.int64) * width
        gate, up = _gate_up_rows(
            *(x_ptr, a0, a1, a2, a3, b0, b1, b2, b3, base, first, width, K, TYPE, SCALE_COLS),
            *(UNIT, BU, BN, BG, STAGES),
        )
        o_n = first + tl.arange(0, BN)
        tl.store(h_ptr + i_slot * width + o_n, gated(gate, up, limit), mask=o_n < width)
    elif SHARED_TYPE != "":
        s_first = tl.program_id(0) * SHARED_BN
        s_base = s_first.to(tl.int64) * 0
        s_gate, s_up = _gate_up_rows(
            *(x_ptr, c0, c1, c2, c3, d0, d1, d2, d3, s_base, s_first, shared_rows),
            *(K, SHARED_TYPE, SHARED_SCALE_COLS, SHARED_UNIT, SHARED_BU, SHARED_BN, BG, STAGES),
        )
        o_s = s_first + tl.arange(0, SHARED_BN)
        s_h = gated(s_gate, s_up, shared_limit)
        tl.store(h_ptr + chosen * width + o_s, s_h, mask=o_s < shared_rows)


@triton.jit
def _down_rows(
    h_ptr,
    slots_ptr,
    weights_ptr,
    p0,
    p1,
    p2,
    p3,
    chosen,
    first,
    rows,
    IS_SHARED: tl.constexpr,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Rows first .. first + BN - 1 of the sum over slots, or of the shared expert: f32 [BN]."""
    if UNIT > 0:
        STEPS: tl.constexpr = (K // UNIT + BU - 1) // BU
        o_n = tl.minimum(first + tl.arange(0, BN), rows - 1).to(tl.int64)
        acc = tl.zeros([BU, BN, 2], tl.float32)
        for step in tl.range(0, chosen * STEPS, num_stages=STAGES):
            i_slot = step // STEPS
            u0 = (step - i_slot * STEPS) * BU
            if IS_SHARED:
                row, weight = o_n, 1.0
            else:
                row = o_n + tl.load(slots_ptr + i_slot).to(tl.int64) * rows
                weight = tl.load(weights_ptr + i_slot)
            h, sums = vector_columns(h_ptr + i_slot * K, weight, u0, K, TYPE, UNIT, BU)
            acc = add_products(acc, h, sums, p0, p1, p2, p3, row, u0, K, TYPE, UNIT, BU, BN)
        return total(acc, TYPE)
    else:
        out = tl.zeros([1, BN], tl.float32)
        for i_slot in range(chosen):
            if IS_SHARED:
                base, weight = first.to(tl.int64) * 0, 1.0
            else:
                base = tl.load(slots_ptr + i_slot).to(tl.int64) * rows
                weight = tl.load(weights_ptr + i_slot)
            h_row = h_ptr + i_slot * K
            row, last = base + first, base + rows
            out += weight * row_dots(
                *(h_row, 0, 0, 1, p0, p1, p2, p3, row, last, K, TYPE, SCALE_COLS, 1, BN, BG)
            )
        return tl.reshape(out, (BN,))


@triton.jit
def _down_kernel(
    out_ptr,
    h_ptr,
    slots_ptr,
    weights_ptr,
    used_ptr,
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    chosen,
    rows,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    BU: tl.constexpr,
    SHARED_K: tl.constexpr,
    SHARED_TYPE: tl.constexpr,
    SHARED_SCALE_COLS: tl.constexpr,
    SHARED_UNIT: tl.constexpr,
    SHARED_BU: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    first = tl.program_id(0) * BN
    used = chosen
    if used_ptr is not None:
        used = tl.load(used_ptr)
    out = _down_rows(
        *(h_ptr, slots_ptr, weights_ptr, a0, a1, a2, a3, used, first, rows, False),
        *(K, TYPE, SCALE_COLS, UNIT, BU, BN, BG, STAGES),
    )
    if SHARED_TYPE != "":
        out += _down_rows(
            *(h_ptr + chosen * K, slots_ptr, weights_ptr, b0, b1, b2, b3, 1, first, rows, True),
            *(SHARED_K, SHARED_TYPE, SHARED_SCALE_COLS, SHARED_UNIT, SHARED_BU, BN, BG, STAGES),
        )
    o_n = first + tl.arange(0, BN)
    tl.store(out_ptr + o_n, out, mask=o_n < rows)

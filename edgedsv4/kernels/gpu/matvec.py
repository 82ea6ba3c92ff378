"""Products of a few tokens with stored matrices: y[t, n] = sum_k W[n, k] x[t, k].

Up to four matrices of one input width, of different types, lie below one another in y and take one
launch. With groups, row block g of the only matrix reads columns g K .. (g + 1) K - 1 of x (the
first half of the output projection). Decode is this product: every byte of the weights is read once
and nothing else counts, so a program takes few rows and keeps all its loads in flight.

`row_dots` holds the sum itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.group_dots import (
    add_products,
    group_planes,
    total,
    unit_columns,
    vector_columns,
)
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.gpu.planes import DeviceMatrix, plane_arguments
from edgedsv4.kernels.gpu.row_dots import q8_0_rows, row_dots


@dataclass(frozen=True, slots=True)
class MatvecTile:
    """Size of a program's work."""

    rows: int
    warps: int
    is_whole: bool
    """Whether all columns are loaded at once, of Q8_0 and one token."""


MAX_TOKENS = 8
MAX_MATRICES = 4
PIECED = frozenset(("Q8_0", "BF16", "F16", "F32"))
"""Types that `row_dots` reads 16 columns per thread, several tokens at once."""

GROUPED_Q8_0_ROWS = 1 << 30
"""Rows of a Q8_0 matrix from which tensor cores compute the product of one token."""
_GROUPED_ROWS, _GROUPED_WARPS = 16, 4

# Rows of all matrices up to which a program takes one or two rows, so that every multiprocessor
# gets some; above, four or eight.
_ONE_ROW, _TWO_ROWS, _FOUR_ROWS = 512, 1024, 4096
# Columns per warp: two loads of 16 columns by each of its threads.
_WARP_COLUMNS = 1024
_MAX_WARPS = 8


def matvec(
    y: Tensor,
    x: Tensor,
    matrices: Sequence[DeviceMatrix],
    groups: int = 1,
    *,
    family: str = "sm_90",
    tile: MatvecTile | None = None,
    overlap: bool = False,
) -> None:
    """Write the products of all matrices.

    Args:
        y: f32 [T, sum of rows], set by the launch; T from 1 to 8.
        x: f32 [T, groups * K].
        matrices: one to four of K columns each; one if there are groups.
        groups: row blocks that have columns of x of their own.
        family: target family.
        tile: other sizes than those that suit the rows.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    _check(y, x, matrices, groups)
    tokens, columns = len(x), matrices[0].cols
    rows = [matrix.rows for matrix in matrices] + [0] * (MAX_MATRICES - len(matrices))
    block = _rows_per_program(sum(rows), rows[0] // groups if groups > 1 else 0, tokens)
    warps = min(_MAX_WARPS, power_of_two(-(-columns // _WARP_COLUMNS)))
    if tile is not None:
        block, warps = tile.rows, tile.warps
    are_grouped = [tokens == 1 and groups == 1 and _is_grouped(m, family) for m in matrices]
    units = [unit_columns(m.type) if g else 0 for m, g in zip(matrices, are_grouped, strict=True)]
    units += [0] * (MAX_MATRICES - len(matrices))
    blocks = [_GROUPED_ROWS if unit else block for unit in units]
    padded = [*matrices, *[matrices[0]] * (MAX_MATRICES - len(matrices))]
    planes = [
        plane
        for matrix, unit in zip(padded, units, strict=True)
        for plane in (group_planes(matrix) if unit else kernel_planes(matrix))
    ]
    are_pieced = all(matrix.type in PIECED for matrix in matrices)
    constants: dict[str, str | int] = {}
    for i, matrix in enumerate(padded):
        constants[f"TYPE_{i}"] = matrix.type if i < len(matrices) else ""
        constants[f"SCALE_COLS_{i}"] = matrix.scale_cols
        constants[f"UNIT_{i}"] = units[i]
        constants[f"BN_{i}"] = blocks[i]
    programs = sum(-(-count // size) for count, size in zip(rows, blocks, strict=True))
    warps = _GROUPED_WARPS if any(units) else warps
    launch(
        _matvec_kernel,
        (programs,),
        *(y, x, *planes, *rows, y.stride(0), x.stride(0), tokens, rows[0] // groups),
        K=columns,
        HAS_GROUPS=groups > 1,
        BT=2 if tokens > 1 and are_pieced else 1,
        BG=min(32 * warps, power_of_two(-(-columns // 16))),
        WARPS=warps,
        IS_WHOLE=tile is not None and tile.is_whole and tokens == 1,
        STAGES=1 if family.startswith("gfx") else 3,
        num_warps=warps,
        **constants,
        **overlap_options(overlap=overlap),
    )


def kernel_planes(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The planes as `row_dots` takes them: bytes and 16-bit words where a path reads those."""
    p0, p1, p2, p3 = plane_arguments(matrix)
    if matrix.type == "Q8_0":
        return p0.view(torch.uint8), p1, p2, p3
    if matrix.type == "BF16":
        bits = p0.view(torch.uint16)
        return bits, bits, bits, bits
    return p0, p1, p2, p3


def _is_grouped(matrix: DeviceMatrix, family: str) -> bool:
    """Whether `group_dots` computes the product of one token."""
    if family.startswith("gfx") or unit_columns(matrix.type) == 0:
        return False
    return matrix.type != "Q8_0" or matrix.rows >= GROUPED_Q8_0_ROWS


def _rows_per_program(rows: int, group_rows: int, tokens: int) -> int:
    """1, 2, 4 or 8; a program stays within a group."""
    block = 1 if rows <= _ONE_ROW else 2 if rows <= _TWO_ROWS else 4
    if rows > _FOUR_ROWS and tokens == 1:
        block = 8
    while group_rows % block:
        block //= 2
    return block


def _check(y: Tensor, x: Tensor, matrices: Sequence[DeviceMatrix], groups: int) -> None:
    shapes = [[matrix.rows, matrix.cols] for matrix in matrices]
    message = f"matvec: y {list(y.shape)}, x {list(x.shape)}, matrices {shapes}, {groups} groups"
    if not 1 <= len(matrices) <= MAX_MATRICES or groups < 1 or x.dim() != 2:
        raise ShapeError(message)
    columns, rows = shapes[0][1], sum(shape[0] for shape in shapes)
    is_one_width = all(shape[1] == columns for shape in shapes)
    are_groups = groups == 1 or (len(matrices) == 1 and rows % groups == 0)
    is_short = 1 <= len(x) <= MAX_TOKENS
    fits = x.shape[1] == groups * columns and list(y.shape) == [len(x), rows]
    if not (is_one_width and are_groups and is_short and fits):
        raise ShapeError(message)
    if any(t.dtype != torch.float32 or t.stride(1) != 1 for t in (y, x)):
        raise ShapeError(f"{message}: f32 with contiguous rows is needed")


# Four matrices of four planes: more arguments and lines than other kernels, all alike.
@triton.jit
def _matvec_kernel(
    y_ptr,
    x_ptr,
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
    rows_0,
    rows_1,
    rows_2,
    rows_3,
    stride_y,
    stride_x,
    T,
    group_rows,
    K: tl.constexpr,
    TYPE_0: tl.constexpr,
    TYPE_1: tl.constexpr,
    TYPE_2: tl.constexpr,
    TYPE_3: tl.constexpr,
    SCALE_COLS_0: tl.constexpr,
    SCALE_COLS_1: tl.constexpr,
    SCALE_COLS_2: tl.constexpr,
    SCALE_COLS_3: tl.constexpr,
    UNIT_0: tl.constexpr,
    UNIT_1: tl.constexpr,
    UNIT_2: tl.constexpr,
    UNIT_3: tl.constexpr,
    BN_0: tl.constexpr,
    BN_1: tl.constexpr,
    BN_2: tl.constexpr,
    BN_3: tl.constexpr,
    HAS_GROUPS: tl.constexpr,
    BT: tl.constexpr,
    BG: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    i = tl.program_id(0)
    end_0 = tl.cdiv(rows_0, BN_0)
    end_1 = end_0 + tl.cdiv(rows_1, BN_1)
    end_2 = end_1 + tl.cdiv(rows_2, BN_2)
    if i < end_0:
        row = i * BN_0
        if HAS_GROUPS:
            x_ptr += (row // group_rows) * K
        _rows(
            *(y_ptr, x_ptr, a0, a1, a2, a3, row, rows_0, stride_y, stride_x, T),
            *(K, TYPE_0, SCALE_COLS_0, UNIT_0, BT, BN_0, BG, WARPS, IS_WHOLE, STAGES, OVERLAP),
        )
    elif i < end_1:
        if TYPE_1 != "":
            y_1 = y_ptr + rows_0
            _rows(
                *(y_1, x_ptr, b0, b1, b2, b3, (i - end_0) * BN_1, rows_1, stride_y, stride_x, T),
                *(K, TYPE_1, SCALE_COLS_1, UNIT_1, BT, BN_1, BG, WARPS, IS_WHOLE, STAGES, OVERLAP),
            )
    elif i < end_2:
        if TYPE_2 != "":
            y_2 = y_ptr + rows_0 + rows_1
            _rows(
                *(y_2, x_ptr, c0, c1, c2, c3, (i - end_1) * BN_2, rows_2, stride_y, stride_x, T),
                *(K, TYPE_2, SCALE_COLS_2, UNIT_2, BT, BN_2, BG, WARPS, IS_WHOLE, STAGES, OVERLAP),
            )
    elif TYPE_3 != "":
        y_3 = y_ptr + rows_0 + rows_1 + rows_2
        _rows(
            *(y_3, x_ptr, d0, d1, d2, d3, (i - end_2) * BN_3, rows_3, stride_y, stride_x, T),
            *(K, TYPE_3, SCALE_COLS_3, UNIT_3, BT, BN_3, BG, WARPS, IS_WHOLE, STAGES, OVERLAP),
        )


@triton.jit
def _rows(
    y_ptr,
    x_ptr,
    p0,
    p1,
    p2,
    p3,
    first,
    rows,
    stride_y,
    stride_x,
    T,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    UNIT: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    WARPS: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    STAGES: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Rows first .. first + BN - 1 of one matrix for every token."""
    o_n = first + tl.arange(0, BN)
    if UNIT > 0:
        # A block of 256 columns, or four groups of 32, per warp and step.
        BU: tl.constexpr = WARPS if UNIT == 256 else 4 * WARPS
        row = tl.minimum(o_n, rows - 1).to(tl.int64)
        acc = tl.zeros([BU, BN, 2], tl.float32)
        await_inputs(OVERLAP)
        for u0 in tl.range(0, K // UNIT, BU, num_stages=STAGES):
            x, sums = vector_columns(x_ptr, 1.0, u0, K, TYPE, UNIT, BU)
            acc = add_products(acc, x, sums, p0, p1, p2, p3, row, u0, K, TYPE, UNIT, BU, BN)
        tl.store(y_ptr + o_n, total(acc, TYPE), mask=o_n < rows)
    elif IS_WHOLE and TYPE == "Q8_0":
        one = tl.zeros([1], tl.int64)
        y = q8_0_rows(
            *(x_ptr, p0 + one, p1 + one, one + first, 1, rows - 1, K, 1, BN, OVERLAP),
        )
        tl.store(y_ptr + o_n, tl.reshape(y, (BN,)), mask=o_n < rows)
    else:
        row = first.to(tl.int64)
        for i_t in range(0, T, BT):
            y = row_dots(
                *(x_ptr, stride_x, i_t, T, p0, p1, p2, p3, row, rows, K, TYPE, SCALE_COLS),
                *(BT, BN, BG, OVERLAP),
            )  # [BT, BN]
            o_t = i_t + tl.arange(0, BT)
            mask = (o_t < T)[:, None] & (o_n < rows)[None, :]
            tl.store(y_ptr + o_t.to(tl.int64)[:, None] * stride_y + o_n[None, :], y, mask=mask)

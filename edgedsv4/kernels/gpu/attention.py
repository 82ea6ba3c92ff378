"""Attention of one token: the rows are split over programs, then their partial sums joined.

o_h = sum_i exp(s_i - M) row_i / (sum_i exp(s_i - M) + exp(sink_h - M)), s_i = d^-0.5 q_h . row_i,
over the last W rows of the window ring (slot = position mod slots, the token's own row included)
and the compressed rows: those listed in `selected`, or all (position + 1) // ratio visible ones.
The last r dims of o_h are rotated back. Definition: `kernels/sparse_attention.py`.

Split s takes whole tiles of rows; how many there are follows from the position in device memory,
so that one recorded launch serves every position. Its partial result is (m, l, acc): maximum of the
scores in base 2, sum of weights, weighted sum of rows; l = 0 where it had no rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.attention_rows import (
    LOG2_E,
    NATIVE_E4M3,
    Parts,
    check_rows,
    load_query,
    load_tile,
    rotate_back,
    row_format,
    sliced_scores,
    softmax_step,
    tile_of,
    weigh_rows,
)
from edgedsv4.kernels.gpu.conversions import dot_acc
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options

HEADS_PER_PROGRAM = 16
LOG2E = tl.constexpr(LOG2_E)
COMBINE_PAIRS = 64

# Family, or its first letters: rows of a tile, warps, columns of a slice (0: whole queries).
_TILES = {"gfx1": (16, 8, 64), "": (32, 8, 0)}
_EXACT_TILES = {"": (16, 8, 64)}


def decode_splits(multiprocessors: int, heads: int) -> int:
    """How many splits fill a device once."""
    return max(1, multiprocessors // -(-heads // HEADS_PER_PROGRAM))


def decode_partials(
    splits: int, heads: int, dim: int, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """Work space of `decode_attention`, float32: acc [splits, H, d] and (m, l) [splits, 2, H].

    A row of acc holds the even columns, then the odd ones.
    """
    acc = torch.empty((splits, heads, dim), dtype=torch.float32, device=device)
    return acc, torch.empty((splits, 2, heads), dtype=torch.float32, device=device)


def decode_attention(
    out: Tensor,
    q: Tensor,
    ring: Parts,
    position: Tensor,
    *,
    window: int,
    compressed: Parts | None,
    selected: Tensor | None,
    ratio: int,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    partials: tuple[Tensor, Tensor],
    family: str = "",
    overlap: bool = False,
) -> None:
    """Attend; two launches.

    Args:
        out: [1, H * d] f32, written.
        q: [1, H, d] f32, normalised and rotated.
        ring: window rows as stored, [slots, ...], slots >= window; holds the token's own row.
        position: [1] int32 on the device.
        window: W, rows of the window.
        compressed: rows as stored, [capacity, ...], or None for a layer without them.
        selected: [1, k] int32, rows of `compressed` to attend to, -1 = none; None = all visible.
        ratio: tokens per compressed row; any without compressed rows.
        sink: [H] f32.
        cos: [1, r / 2] f32, of the token's position.
        sin: [1, r / 2] f32.
        partials: of `decode_partials`; their first axis is the number of splits.
        family: target family ("sm_90", "gfx942", ...), the key of the tile table.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if the shapes disagree.
    """
    _, heads, dim = q.shape
    rope_dim = 2 * cos.shape[-1]
    rows = ring if compressed is None else compressed
    form = row_format(ring)
    check_rows(ring, dim, rope_dim, form, "window")
    check_rows(rows, dim, rope_dim, form, "compressed")
    _check(out, q, sink, partials)
    if ring[0].shape[0] < window:
        raise ShapeError(f"decode_attention: {ring[0].shape[0]} slots for {window} rows")
    block_rows, warps, columns = tile_of(_EXACT_TILES if form == "f32" else _TILES, family)
    top = 0 if selected is None or compressed is None else selected.shape[1]
    splits, has_few_tiles = partials[0].shape[0], bool(top) or compressed is None
    if has_few_tiles:
        splits = min(splits, cdiv(window, block_rows) + cdiv(top, block_rows))
    launch(
        _decode_kernel,
        (splits, cdiv(heads, HEADS_PER_PROGRAM)),
        *partials,
        *(q, position, ring[0], ring[-1], rows[0], rows[-1]),
        *(position if selected is None else selected, heads, rows[0].shape[0]),
        dim**-0.5 * LOG2_E,
        SPLITS=splits,
        WINDOW=window,
        SLOTS=ring[0].shape[0],
        RATIO=0 if compressed is None else ratio,
        TOP=top,
        D=dim,
        R=rope_dim,
        BH=max(16, power_of_two(dim) // 2),
        HB=HEADS_PER_PROGRAM,
        BK=block_rows,
        SLICE=min(columns, power_of_two(dim)),
        FORMAT=form,
        NATIVE=family in NATIVE_E4M3,
        num_warps=warps,
        num_stages=1 if has_few_tiles else 2,
        **overlap_options(overlap=overlap),
    )
    parts = (partials[0][:splits], partials[1])
    _combine(out, parts, sink, cos, sin, overlap=overlap)


def _check(out: Tensor, q: Tensor, sink: Tensor, partials: tuple[Tensor, Tensor]) -> None:
    _, heads, dim = q.shape
    acc, sums = partials
    shapes = (q.shape[0], out.shape, sink.shape, acc.shape[1:], sums.shape)
    if shapes != (1, (1, heads * dim), (heads,), (heads, dim), (acc.shape[0], 2, heads)):
        raise ShapeError(
            f"decode_attention: out {list(out.shape)}, q {list(q.shape)}, sink {list(sink.shape)},"
            f" partials {list(acc.shape)}, {list(sums.shape)}"
        )


def _combine(
    out: Tensor,
    partials: tuple[Tensor, Tensor],
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    overlap: bool,
) -> None:
    acc, sums = partials
    splits, heads, dim = acc.shape
    launch(
        _combine_kernel,
        (heads, cdiv(dim // 2, COMBINE_PAIRS)),
        out,
        acc,
        sums,
        sink,
        cos,
        sin,
        heads,
        SPLITS=splits,
        BS=power_of_two(splits),
        D=dim,
        R=2 * cos.shape[-1],
        BC=COMBINE_PAIRS,
        num_warps=4,
        **overlap_options(overlap=overlap),
    )


@triton.jit(do_not_specialize=["capacity"])
def _decode_kernel(
    acc_ptr,  # [SPLITS, H, D]
    sums_ptr,  # [SPLITS, 2, H]
    q_ptr,  # [H, D]
    position_ptr,  # [1]
    ring_ptr,
    ring_scale_ptr,
    rows_ptr,
    rows_scale_ptr,
    selected_ptr,  # [TOP]
    heads,
    capacity,
    scale,
    SPLITS: tl.constexpr,
    WINDOW: tl.constexpr,
    SLOTS: tl.constexpr,
    RATIO: tl.constexpr,  # 0: no compressed rows
    TOP: tl.constexpr,  # 0: all visible rows
    D: tl.constexpr,
    R: tl.constexpr,
    BH: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    SLICE: tl.constexpr,  # columns of a query at a time, 0: all
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # house-rule: long function, because one loop reads window and compressed rows alike
    PRECISE: tl.constexpr = FORMAT == "f32"
    WINDOW_TILES: tl.constexpr = (WINDOW + BK - 1) // BK
    i_split = tl.program_id(0)
    i_head = tl.program_id(1) * HB + tl.arange(0, HB)
    inside = i_head < heads
    i_row = tl.arange(0, BK)
    await_inputs(OVERLAP)
    if SLICE == 0:
        b_q_even, b_q_odd = load_query(q_ptr, i_head, inside, D, BH)  # [HB, BH]
    position = tl.load(position_ptr)
    count = TOP
    if RATIO > 0 and TOP == 0:
        count = tl.minimum((position + 1) // RATIO, capacity)
    tiles = WINDOW_TILES + (count + BK - 1) // BK
    per_split = (tiles + SPLITS - 1) // SPLITS
    first = i_split * per_split

    b_m = tl.full((HB,), float("-inf"), tl.float32)
    b_l = tl.zeros((HB,), tl.float32)
    b_even = tl.zeros((HB, BH), tl.float32)
    b_odd = tl.zeros((HB, BH), tl.float32)
    for tile in range(first, tl.minimum(first + per_split, tiles)):
        in_window = tile < WINDOW_TILES
        i_old = tile * BK + i_row
        at = position - (WINDOW - 1) + i_old  # position of a window row
        valid = in_window & (i_old < WINDOW) & (at >= 0)
        row = tl.maximum(at, 0) % SLOTS
        data_ptr, scale_ptr = ring_ptr, ring_scale_ptr
        if RATIO > 0:
            i_new = i_old - WINDOW_TILES * BK
            listed = (i_new >= 0) & (i_new < count)
            entry = i_new
            if TOP > 0:
                entry = tl.load(selected_ptr + i_new, mask=listed, other=-1)
                listed = entry >= 0
            row = tl.where(in_window, row, tl.where(listed, entry, 0))
            valid = valid | listed
            data_ptr = tl.where(in_window, ring_ptr, rows_ptr)
            scale_ptr = tl.where(in_window, ring_scale_ptr, rows_scale_ptr)
        row = row.to(tl.int64)
        # [BK, BH] twice
        k_even, k_odd = load_tile(data_ptr, scale_ptr, row, valid, D, R, BH, FORMAT, NATIVE)
        if SLICE > 0:
            b_s = sliced_scores(
                q_ptr,
                data_ptr,
                scale_ptr,
                i_head,
                inside,
                row,
                valid,
                D,
                R,
                SLICE,
                FORMAT,
                NATIVE,
            )
        else:
            # Two chains of dependent products take half the time of one.
            zero = tl.zeros((HB, BK), tl.float32)
            b_s = dot_acc(b_q_even, tl.trans(k_even), zero)
            b_s += dot_acc(b_q_odd, tl.trans(k_odd), zero)
        b_p, b_m, b_decay = softmax_step(b_s * scale, valid, b_m)
        b_l = b_l * b_decay + tl.sum(b_p, axis=1)
        b_even = weigh_rows(b_even * b_decay[:, None], b_p, k_even, PRECISE)
        b_odd = weigh_rows(b_odd * b_decay[:, None], b_p, k_odd, PRECISE)

    sums_ptr += i_split * 2 * heads
    tl.store(sums_ptr + i_head, b_m, mask=inside)
    tl.store(sums_ptr + heads + i_head, b_l, mask=inside)
    if first < tiles:
        i_pair = tl.arange(0, BH)
        mask = inside[:, None] & (i_pair < D // 2)[None, :]
        at = acc_ptr + (i_split.to(tl.int64) * heads + i_head)[:, None] * D + i_pair[None, :]
        tl.store(at, b_even, mask=mask)
        tl.store(at + D // 2, b_odd, mask=mask)


@triton.jit
def _combine_kernel(
    out_ptr,  # [H, D]
    acc_ptr,  # [SPLITS, H, D]
    sums_ptr,  # [SPLITS, 2, H]
    sink_ptr,  # [H]
    cos_ptr,  # [R / 2]
    sin_ptr,
    heads,
    SPLITS: tl.constexpr,
    BS: tl.constexpr,
    D: tl.constexpr,
    R: tl.constexpr,
    BC: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    i_head = tl.program_id(0)
    i_pair = tl.program_id(1) * BC + tl.arange(0, BC)
    i_split = tl.arange(0, BS)
    there = i_split < SPLITS
    sums_ptr += i_split * 2 * heads + i_head
    b_m = tl.load(sums_ptr, mask=there, other=float("-inf"))  # [BS]
    b_l = tl.load(sums_ptr + heads, mask=there, other=0.0)
    mask = there[:, None] & (i_pair < D // 2)[None, :]
    acc_ptr += (i_split.to(tl.int64) * heads + i_head)[:, None] * D + i_pair[None, :]
    b_even = tl.load(acc_ptr, mask=mask, other=0.0)  # [BS, BC]
    b_odd = tl.load(acc_ptr + D // 2, mask=mask, other=0.0)
    # A split without rows wrote no acc. NaN in l must go on, so ask for l and not for m.
    has_rows = (b_l != 0.0)[:, None]
    b_even, b_odd = tl.where(has_rows, b_even, 0.0), tl.where(has_rows, b_odd, 0.0)
    sink = tl.load(sink_ptr + i_head) * LOG2E
    top = tl.maximum(tl.max(b_m, axis=0), sink)
    b_weight = tl.exp2(b_m - top)
    total = tl.sum(b_weight * b_l, axis=0) + tl.exp2(sink - top)
    b_even = tl.sum(b_weight[:, None] * b_even, axis=0)[None, :] / total  # [1, BC]
    b_odd = tl.sum(b_weight[:, None] * b_odd, axis=0)[None, :] / total
    b_even, b_odd = rotate_back(b_even, b_odd, cos_ptr, sin_ptr, i_pair, D, R)
    i_half = tl.arange(0, 2)
    out_ptr += i_head * D + 2 * i_pair[None, :, None] + i_half[None, None, :]
    tl.store(out_ptr, tl.join(b_even, b_odd), mask=(i_pair < D // 2)[None, :, None])

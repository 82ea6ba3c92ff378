"""Attention of a chunk of tokens: one program per token and block of heads.

The formula of `attention.py` for T tokens at positions p, p + 1, ... Token t sees the rows of
positions max(0, p + t - W + 1) .. p + t, which lie in order in one buffer (rows kept from before
the chunk, then those of the chunk), and compressed rows: those its row of `selected` lists, or the
first (p + t + 1) // ratio. Definition: `kernels/sparse_attention.py`.

A program walks over tiles of rows with a running softmax. A tile is decoded to bfloat16 once and
serves both products for all heads of the program, so a program takes as many heads as its registers
can accumulate.
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
    load_whole_tile,
    rotate_back,
    row_format,
    sliced_scores,
    softmax_step,
    tile_of,
    weigh_rows,
    widen_rows,
)
from edgedsv4.kernels.gpu.conversions import dot_acc, to_bf16
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two

LOG2E = tl.constexpr(LOG2_E)

# Family, or its first letters: heads of a program, rows of a tile, warps, stages, columns of a
# slice (0: whole queries).
_TILES = {
    "sm_90": (64, 32, 8, 3, 0),
    "sm_": (32, 32, 8, 3, 0),
    "gfx9": (16, 32, 8, 1, 0),
    "gfx11": (16, 16, 16, 1, 64),
    "": (16, 16, 8, 1, 64),
}
_FP8_TILES = {"sm_": (16, 32, 8, 1, 0), "gfx9": (16, 32, 8, 1, 0), "": (16, 16, 8, 1, 64)}
_EXACT_TILES = {"gfx11": (16, 16, 16, 1, 64), "": (16, 16, 8, 1, 64)}


_FEW_TOKENS = 32
"""Tokens whose programs, blocks of few heads, still run all at once."""
_ROWS_PER_TOKEN = 1000
"""Rows that may be decoded first for each token of a chunk: about what that saves the token."""


def chunk_attention(
    out: Tensor,
    q: Tensor,
    window_rows: Parts,
    *,
    first: int,
    position: Tensor,
    window: int,
    compressed: Parts | None,
    selected: Tensor | None,
    ratio: int,
    sink: Tensor,
    cos: Tensor,
    sin: Tensor,
    wide: tuple[Tensor, Tensor | None] | None = None,
    family: str = "",
) -> None:
    """Attend; one launch, or up to three with `wide`. The exact profile is that of float32 rows.

    Args:
        out: [T, H * d] f32 or bf16, written.
        q: [T, H, d] f32 or bf16, normalised and rotated.
        window_rows: rows as stored of positions first, first + 1, ... up to the chunk's last.
        first: position of the first window row, at most max(0, p - W + 1).
        position: [1] int32 on the device, p: position of the chunk's first token.
        window: W, rows of the window.
        compressed: rows as stored, [capacity, ...], or None for a layer without them.
        selected: [T, k] int32, rows of `compressed` per token, -1 = none; None = all visible.
        ratio: tokens per compressed row; any without compressed rows.
        sink: [H] f32.
        cos: [T, r / 2] f32, of the tokens' positions.
        sin: [T, r / 2] f32.
        wide: work space to decode FP8 rows into first, bf16: [n, d] for all window rows and [v, d]
            for the compressed rows that the last token sees. None: every program decodes them.
        family: target family ("sm_90", "gfx942", ...), the key of the tile table.

    Raises:
        ShapeError: if the shapes disagree.
    """
    count, heads, dim = q.shape
    rope_dim = 2 * cos.shape[-1]
    if wide is not None:
        window_rows, compressed = _widen(window_rows, compressed, wide, rope_dim, family)
    if compressed is None:
        selected = None
    form = row_format(window_rows)
    check_rows(window_rows, dim, rope_dim, form, "window")
    rows = window_rows if compressed is None else compressed
    check_rows(rows, dim, rope_dim, form, "compressed")
    _check(out, q, selected, sink, cos)
    block_heads, block_rows, warps, stages, columns = _tile(q, form, family)
    launch(
        _chunk_kernel,
        (count * cdiv(heads, block_heads),),
        *(out, q, position),
        window_rows[0],
        window_rows[-1],
        rows[0],
        rows[-1],
        position if selected is None else selected,
        sink,
        cos,
        sin,
        heads,
        first,
        rows[0].shape[0],
        dim**-0.5 * LOG2_E,
        WINDOW=window,
        RATIO=0 if compressed is None else ratio,
        TOP=0 if selected is None else selected.shape[1],
        D=dim,
        R=rope_dim,
        BD=max(32, power_of_two(dim)),
        HB=block_heads,
        BK=block_rows,
        SLICE=min(columns, power_of_two(dim)),
        FORMAT=form,
        NATIVE=family in NATIVE_E4M3,
        num_warps=warps,
        num_stages=stages,
    )


def wants_wide_rows(tokens: int, visible: int, family: str) -> bool:
    """Whether `wide` pays for a chunk that can see `visible` compressed rows."""
    is_long = tokens > _FEW_TOKENS and tokens * _ROWS_PER_TOKEN >= visible
    return is_long and not family.startswith("gfx1")


def _tile(q: Tensor, form: str, family: str) -> tuple[int, ...]:
    """Heads of a program, no more than there are, rows of a tile, warps, stages, columns."""
    table = {"fp8": _FP8_TILES, "bf16": _TILES, "f32": _EXACT_TILES}[form]
    if form == "bf16" and q.dtype != torch.bfloat16:
        # Converted queries would be held in registers, which those of a large block do not fit.
        table = _FP8_TILES
    block_heads, *rest = tile_of(table, family)
    return (min(block_heads, max(16, power_of_two(q.shape[1]))), *rest)


def _widen(
    window_rows: Parts,
    compressed: Parts | None,
    wide: tuple[Tensor, Tensor | None],
    rope_dim: int,
    family: str,
) -> tuple[Parts, Parts | None]:
    window, visible = wide
    widen_rows(window, window_rows, rope_dim, family=family)
    if compressed is None or visible is None or len(visible) == 0:
        return (window,), None
    widen_rows(visible, compressed, rope_dim, family=family)
    return (window,), (visible,)


def _check(out: Tensor, q: Tensor, selected: Tensor | None, sink: Tensor, cos: Tensor) -> None:
    count, heads, dim = q.shape
    shapes = (out.shape, sink.shape, cos.shape[0], count if selected is None else len(selected))
    if shapes != ((count, heads * dim), (heads,), count, count):
        raise ShapeError(
            f"chunk_attention: out {list(out.shape)}, q {list(q.shape)}, sink {list(sink.shape)},"
            f" cos {list(cos.shape)}, selected {None if selected is None else list(selected.shape)}"
        )


@triton.jit(do_not_specialize=["first", "capacity"])
def _chunk_kernel(
    out_ptr,  # [T, H, D]
    q_ptr,  # [T, H, D]
    position_ptr,  # [1]
    window_ptr,
    window_scale_ptr,
    rows_ptr,
    rows_scale_ptr,
    selected_ptr,  # [T, TOP]
    sink_ptr,  # [H]
    cos_ptr,  # [T, R / 2]
    sin_ptr,
    heads,
    first,
    capacity,
    scale,
    WINDOW: tl.constexpr,
    RATIO: tl.constexpr,  # 0: no compressed rows
    TOP: tl.constexpr,  # 0: all visible rows
    D: tl.constexpr,
    R: tl.constexpr,
    BD: tl.constexpr,
    HB: tl.constexpr,
    BK: tl.constexpr,
    SLICE: tl.constexpr,  # columns of a query at a time, 0: all
    FORMAT: tl.constexpr,
    NATIVE: tl.constexpr,
):
    # house-rule: long function, because one loop reads window and compressed rows alike
    PRECISE: tl.constexpr = FORMAT == "f32"
    WINDOW_TILES: tl.constexpr = (WINDOW + BK - 1) // BK
    head_blocks = tl.cdiv(heads, HB)
    i_token = tl.program_id(0) // head_blocks
    i_head = (tl.program_id(0) % head_blocks) * HB + tl.arange(0, HB)
    inside = i_head < heads
    i_row = tl.arange(0, BK)
    i_col = tl.arange(0, BD)
    q_ptr += i_token.to(tl.int64) * heads * D
    if SLICE == 0:
        b_mask = inside[:, None] & (i_col < D)[None, :]  # [HB, BD]
        b_q = tl.load(q_ptr + (i_head[:, None] * D + i_col[None, :]), mask=b_mask, other=0.0)
        if q_ptr.dtype.element_ty == tl.float32:
            b_q = to_bf16(b_q)
    position = tl.load(position_ptr) + i_token
    selected_ptr += i_token.to(tl.int64) * TOP
    count = TOP
    if RATIO > 0 and TOP == 0:
        count = tl.minimum((position + 1) // RATIO, capacity)

    b_m = tl.full((HB,), float("-inf"), tl.float32)
    b_l = tl.zeros((HB,), tl.float32)
    b_acc = tl.zeros((HB, BD), tl.float32)
    for tile in range(0, WINDOW_TILES + (count + BK - 1) // BK):
        in_window = tile < WINDOW_TILES
        i_old = tile * BK + i_row
        at = position - (WINDOW - 1) + i_old  # position of a window row
        row = tl.where((i_old < WINDOW) & (at >= 0), at - first, -1)
        data_ptr, scale_ptr = window_ptr, window_scale_ptr
        if RATIO > 0:
            i_new = i_old - WINDOW_TILES * BK
            listed = (i_new >= 0) & (i_new < count)
            if TOP > 0:
                entry = tl.load(selected_ptr + i_new, mask=listed, other=-1)
            else:
                entry = tl.where(listed, i_new, -1)
            row = tl.where(in_window, row, entry)
            data_ptr = tl.where(in_window, window_ptr, rows_ptr)
            scale_ptr = tl.where(in_window, window_scale_ptr, rows_scale_ptr)
        valid = row >= 0
        row = tl.maximum(row, 0).to(tl.int64)
        b_rows = load_whole_tile(data_ptr, scale_ptr, row, valid, 0, D, R, BD, FORMAT, NATIVE)
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
            b_s = dot_acc(b_q, tl.trans(b_rows), tl.zeros((HB, BK), tl.float32))
        b_p, b_m, b_decay = softmax_step(b_s * scale, valid, b_m)
        b_l = b_l * b_decay + tl.sum(b_p, axis=1)
        b_acc = weigh_rows(b_acc * b_decay[:, None], b_p, b_rows, PRECISE)

    # A query always sees its own row, so the maximum is that of a row.
    sink = tl.load(sink_ptr + i_head, mask=inside, other=0.0) * LOG2E
    top = tl.maximum(b_m, sink)
    b_share = tl.exp2(b_m - top)
    b_share = b_share / (b_l * b_share + tl.exp2(sink - top))
    b_even, b_odd = tl.split(tl.reshape(b_acc * b_share[:, None], (HB, BD // 2, 2)))
    i_angle = i_token * (R // 2)
    b_even, b_odd = rotate_back(
        b_even, b_odd, cos_ptr + i_angle, sin_ptr + i_angle, tl.arange(0, BD // 2), D, R
    )
    b_out = tl.reshape(tl.join(b_even, b_odd), (HB, BD))
    if out_ptr.dtype.element_ty == tl.bfloat16:
        b_out = to_bf16(b_out)
    # Places found anew, from what the compiler cannot know to be i_head, do not take registers
    # through the loop.
    i_head += tl.load(position_ptr, volatile=True) + i_token - position
    out_ptr += i_token.to(tl.int64) * heads * D
    b_mask = (i_head < heads)[:, None] & (i_col < D)[None, :]
    tl.store(out_ptr + (i_head[:, None] * D + i_col[None, :]), b_out, mask=b_mask)

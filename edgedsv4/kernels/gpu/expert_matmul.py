"""Routed experts of a chunk: out[t] = sum_j weights[t, j] W2_e h, h = silu(min(W1_e x_t, limit)) *
clamp(W3_e x_t, -limit, limit), e = ids[t, j].

Pairs (token, expert) are sorted by expert; a program multiplies some rows of one expert with a tile
of its tokens. The weights are decoded in registers and are the left operand, so that an expert with
few tokens still fills the matrix units. The places of a token are added in their order.
Source: spec 10 §7; the reference is `kernels.expert_ffn` with the sum of `model.moe`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.common import dot_acc, to_bf16
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.expert_sort import sort_pairs, tile_capacity
from edgedsv4.kernels.gpu.matmul import column_block
from edgedsv4.kernels.gpu.planes import plane_arguments

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix

_WIDTHS = (16, 32, 64, 128)
_ROWS = 64
_CONVERT_BLOCK = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScratch:
    """Working memory of `expert_ffn_chunk` for up to a number of tokens."""

    x: Tensor
    """[T, D], bf16 or f32: the input as it is multiplied."""
    order: Tensor
    """int32 [T * k], see `expert_sort`."""
    bounds: Tensor
    """int32 [2 * slots]."""
    tiles: Tensor
    """int32 [2 * capacity] for the narrowest tiles."""
    hidden: Tensor
    """[T * k, F], bf16 or f32, in sorted order."""
    outputs: Tensor
    """[T * k, D], bf16 or f32, in the order of the pairs."""


def expert_scratch(
    tokens: int, k: int, slots: int, hidden: int, width: int, *, device: torch.device, precise: bool
) -> ExpertScratch:
    """Memory for chunks of up to `tokens` tokens.

    Args:
        tokens: T.
        k: experts per token.
        slots: slots of the largest bank.
        hidden: D.
        width: F.
        device: where.
        precise: whether products are f32.
    """
    dtype = torch.float32 if precise else torch.bfloat16
    pairs = tokens * k

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    return ExpertScratch(
        x=empty(tokens, hidden, dtype=dtype),
        order=empty(pairs),
        bounds=empty(2 * slots),
        tiles=empty(2 * tile_capacity(pairs, slots, _WIDTHS[0])),
        hidden=empty(pairs, width, dtype=dtype),
        outputs=empty(pairs, hidden, dtype=dtype),
    )


def expert_scratch_bytes(
    tokens: int, k: int, slots: int, hidden: int, width: int, *, precise: bool
) -> int:
    """Size of what `expert_scratch` makes."""
    made = expert_scratch(
        tokens, k, slots, hidden, width, device=torch.device("meta"), precise=precise
    )
    parts = (made.x, made.order, made.bounds, made.tiles, made.hidden, made.outputs)
    return sum(part.numel() * part.element_size() for part in parts)


def tile_width(pairs: int, slots: int) -> int:
    """Pairs per tile: the least width that holds 1.25 times an average slot's pairs."""
    wanted = 5 * pairs // (4 * max(1, slots))
    return next((width for width in _WIDTHS if width >= wanted), _WIDTHS[-1])


def expert_ffn_chunk(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    w1: DeviceMatrix,
    w3: DeviceMatrix,
    w2: DeviceMatrix,
    limit: float,
    *,
    scratch: ExpertScratch,
    precise: bool = False,
) -> None:
    """Run the routed experts of a chunk; six launches, no transfer to the host.

    Args:
        out: out, [T, D] f32, contiguous.
        x: [T, D] f32 or bf16, contiguous.
        ids: slots, int32 [T, k]; a place with a slot outside of the bank adds nothing.
        weights: routing weights, f32 [T, k].
        w1: bank of gate matrices, [slots * F, D].
        w3: bank of up matrices, [slots * F, D].
        w2: bank of down matrices, [slots * D, F].
        limit: clamp of the hidden layer; inf for none.
        scratch: working memory, made for the same precision.
        precise: products in f32 instead of bf16 products with f32 sums.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    tokens, hidden = x.shape
    slots = _check(out, x, ids, weights, (w1, w3, w2), scratch, precise)
    if tokens == 0:
        return
    pairs = ids.numel()
    block = tile_width(pairs, slots)
    capacity = tile_capacity(pairs, slots, block)
    tiles = scratch.tiles[: 2 * capacity].view(2, capacity)
    bounds = scratch.bounds[: 2 * slots].view(2, slots)
    if x.dtype != scratch.x.dtype:
        grid = (triton.cdiv(x.numel(), _CONVERT_BLOCK),)
        _convert_kernel[grid](scratch.x, x, x.numel(), BLOCK=_CONVERT_BLOCK, num_warps=4)
        x = scratch.x
    sort_pairs(scratch.order, bounds, tiles, ids, block)
    sorting = (scratch.order, bounds, tiles, capacity, slots)
    _launch_gate_up(scratch.hidden, x, sorting, (w1, w3), limit, ids.shape[1], block)
    _launch_down(scratch.outputs, scratch.hidden, sorting, w2, block)
    block_d = min(1024, triton.next_power_of_2(hidden))
    _sum_kernel[(tokens, triton.cdiv(hidden, block_d))](
        out, scratch.outputs, ids, weights, hidden, slots, K=ids.shape[1], BLOCK=block_d
    )


def _check(out, x, ids, weights, banks, scratch, precise) -> int:
    """Number of slots of the banks."""
    w1, w3, w2 = banks
    tokens, hidden = x.shape
    width = w2.cols
    slots = w2.rows // hidden
    fits = (w1.rows, w3.rows, w2.rows) == (slots * width, slots * width, slots * hidden)
    fits = fits and (w1.cols, w3.cols) == (hidden, hidden) and out.shape == x.shape
    fits = fits and ids.shape == weights.shape and len(ids) == tokens
    if not fits:
        raise ShapeError(
            f"expert_ffn_chunk: x {list(x.shape)}, out {list(out.shape)}, ids {list(ids.shape)},"
            f" weights {list(weights.shape)}, w1 [{w1.rows}, {w1.cols}], w3 [{w3.rows}, {w3.cols}],"
            f" w2 [{w2.rows}, {w2.cols}]"
        )
    if not all(tensor.is_contiguous() for tensor in (out, x, ids, weights)):
        raise ShapeError("expert_ffn_chunk: out, x, ids and weights must be contiguous")
    pairs = ids.numel()
    dtype = torch.float32 if precise else torch.bfloat16
    has_room = len(scratch.x) >= tokens and scratch.x.shape[1] == hidden
    has_room = has_room and len(scratch.hidden) >= pairs and scratch.hidden.shape[1] == width
    has_room = has_room and scratch.bounds.numel() >= 2 * slots and scratch.hidden.dtype == dtype
    if not has_room:
        raise ShapeError(
            f"expert_ffn_chunk: scratch for {dtype} and {pairs} pairs of {slots} slots is needed,"
            f" found {scratch.hidden.dtype} {list(scratch.hidden.shape)},"
            f" x {list(scratch.x.shape)}, {scratch.bounds.numel() // 2} slots"
        )
    return slots


def _launch_gate_up(hidden, x, sorting, banks, limit, k, block) -> None:
    order, bounds, tiles, capacity, slots = sorting
    w1, w3 = banks
    width = w1.rows // slots
    columns = max(column_block(w1.type), column_block(w3.type))
    grid = (triton.cdiv(width, _ROWS), capacity)
    _gate_up_kernel[grid](
        hidden,
        x,
        order,
        bounds,
        tiles,
        *plane_arguments(w1),
        *plane_arguments(w3),
        float(limit),
        slots,
        capacity,
        k,
        w1.cols,
        width,
        TYPE1=w1.type,
        SCALE1=w1.scale_cols,
        TYPE3=w3.type,
        SCALE3=w3.scale_cols,
        PRECISE=hidden.dtype == torch.float32,
        BR=_ROWS,
        BK=columns,
        BT=block,
        num_warps=4,
        num_stages=3,
    )


def _launch_down(outputs, hidden, sorting, w2, block) -> None:
    order, bounds, tiles, capacity, slots = sorting
    rows = w2.rows // slots
    grid = (triton.cdiv(rows, _ROWS), capacity)
    _down_kernel[grid](
        outputs,
        hidden,
        order,
        bounds,
        tiles,
        *plane_arguments(w2),
        slots,
        capacity,
        w2.cols,
        rows,
        TYPE=w2.type,
        SCALE=w2.scale_cols,
        PRECISE=hidden.dtype == torch.float32,
        BR=_ROWS,
        BK=column_block(w2.type),
        BT=block,
        num_warps=4,
        num_stages=3,
    )


@triton.jit
def _convert_kernel(y_ptr, x_ptr, n, BLOCK: tl.constexpr):
    o = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + o, mask=o < n, other=0.0)
    if y_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(y_ptr + o, to_bf16(x.to(tl.float32)), mask=o < n)
    else:
        tl.store(y_ptr + o, x.to(tl.float32), mask=o < n)


@triton.jit
def _multiply(acc, w, x, PRECISE: tl.constexpr):
    """acc + w x: weights f32 [BR, BK], activations [BK, BT]."""
    if PRECISE:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return dot_acc(to_bf16(w), x, acc)


@triton.jit
def _gate_up_kernel(
    hidden_ptr,
    x_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,
    limit,
    slots,
    capacity,
    k,
    D,
    F,
    TYPE1: tl.constexpr,
    SCALE1: tl.constexpr,
    TYPE3: tl.constexpr,
    SCALE3: tl.constexpr,
    PRECISE: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """BR rows of w1 and of w3 of one slot with BT of its pairs (longer than a screen: two banks)."""
    slot = tl.load(tiles_ptr + tl.program_id(1))
    if slot < 0:
        return
    o_place = tl.load(tiles_ptr + capacity + tl.program_id(1)) + tl.arange(0, BT)  # [BT]
    m_place = o_place < tl.load(bounds_ptr + slots + slot)
    token = tl.load(order_ptr + o_place, mask=m_place, other=0) // k
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < F
    row = slot.to(tl.int64) * F + o_row
    o_k = tl.arange(0, BK)
    x_ptrs = x_ptr + token.to(tl.int64)[None, :] * D + o_k[:, None]  # [BK, BT]
    gate = tl.zeros([BR, BT], tl.float32)
    up = tl.zeros([BR, BT], tl.float32)
    for k0 in range(0, D, BK):
        x = tl.load(x_ptrs + k0, mask=m_place[None, :] & (k0 + o_k < D)[:, None], other=0.0)
        w = decode_tile(a0, a1, a2, a3, row, m_row, k0, D, TYPE1, BK, SCALE1)  # [BR, BK]
        gate = _multiply(gate, w, x, PRECISE)
        w = decode_tile(b0, b1, b2, b3, row, m_row, k0, D, TYPE3, BK, SCALE3)
        up = _multiply(up, w, x, PRECISE)
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    h = gate / (1.0 + tl.exp(-gate)) * up
    if not PRECISE:
        h = to_bf16(h)
    o_hidden = o_place.to(tl.int64)[None, :] * F + o_row[:, None]  # [BR, BT]
    tl.store(hidden_ptr + o_hidden, h, mask=m_row[:, None] & m_place[None, :])


@triton.jit
def _down_kernel(
    outputs_ptr,
    hidden_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    a0,
    a1,
    a2,
    a3,
    slots,
    capacity,
    F,
    D,
    TYPE: tl.constexpr,
    SCALE: tl.constexpr,
    PRECISE: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """BR rows of w2 of one slot with BT of its pairs; results go to the places of the pairs."""
    slot = tl.load(tiles_ptr + tl.program_id(1))
    if slot < 0:
        return
    o_place = tl.load(tiles_ptr + capacity + tl.program_id(1)) + tl.arange(0, BT)  # [BT]
    m_place = o_place < tl.load(bounds_ptr + slots + slot)
    pair = tl.load(order_ptr + o_place, mask=m_place, other=0)
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < D
    row = slot.to(tl.int64) * D + o_row
    o_k = tl.arange(0, BK)
    h_ptrs = hidden_ptr + o_place.to(tl.int64)[None, :] * F + o_k[:, None]  # [BK, BT]
    acc = tl.zeros([BR, BT], tl.float32)
    for k0 in range(0, F, BK):
        h = tl.load(h_ptrs + k0, mask=m_place[None, :] & (k0 + o_k < F)[:, None], other=0.0)
        w = decode_tile(a0, a1, a2, a3, row, m_row, k0, F, TYPE, BK, SCALE)  # [BR, BK]
        acc = _multiply(acc, w, h, PRECISE)
    if not PRECISE:
        acc = to_bf16(acc)
    o_out = pair.to(tl.int64)[None, :] * D + o_row[:, None]  # [BR, BT]
    tl.store(outputs_ptr + o_out, acc, mask=m_row[:, None] & m_place[None, :])


@triton.jit
def _sum_kernel(
    out_ptr, outputs_ptr, ids_ptr, weights_ptr, D, slots, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One token: the weighted results of its places, in their order."""
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < D
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(K):
        slot = tl.load(ids_ptr + token * K + place)
        weight = tl.load(weights_ptr + token * K + place)
        is_used = (slot >= 0) & (slot < slots)
        y = tl.load(
            outputs_ptr + (token * K + place) * D + o_column, mask=m_column & is_used, other=0.0
        )
        total += tl.where(is_used, weight, 0.0) * y.to(tl.float32)
    tl.store(out_ptr + token * D + o_column, total, mask=m_column)

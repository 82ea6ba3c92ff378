"""Routed experts of a chunk.

out[t] = sum_j weights[t, j] W2_e h, h = silu(min(W1_e x_t, limit)) clamp(W3_e x_t, -limit, limit),
where e = ids[t, j].

Pairs (token, expert) are sorted by expert; a program multiplies some rows of one expert with a tile
of its tokens. The weights are decoded in registers and are the left operand, so that an expert with
few tokens still fills the matrix units. The places of a token are added in their order.
The reference is `kernels.expert_ffn` with the sum of `model.moe`.

Experts need not all be in memory: they are computed part by part, and a token's results are added
when all parts are done. So they have the same bits wherever an expert lay, and whenever it came.
"""
# house-rule: long file, because the kernels of one grouped product and their launches share tiles.

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import dot_acc, to_bf16
from edgedsv4.kernels.gpu.decode_product import PRODUCT_TYPES, product_tile
from edgedsv4.kernels.gpu.expert_sort import cut_tiles, sort_pairs, tile_capacity
from edgedsv4.kernels.gpu.expert_sum import sum_places
from edgedsv4.kernels.gpu.expert_tiling import (
    WIDTHS,
    Tiling,
    is_pair,
    is_split,
    tile_width,
    tilings,
)
from edgedsv4.kernels.gpu.fragments import (
    pack_activations,
    padded,
    position_of,
    weights_in_positions,
)
from edgedsv4.kernels.gpu.half_tiles import HALF_TYPES, add_halves, half_planes
from edgedsv4.kernels.gpu.launching import cdiv, launch
from edgedsv4.kernels.gpu.planes import plane_arguments

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix


@dataclass(frozen=True, slots=True, eq=False)
class ExpertScratch:
    """Working memory of `expert_ffn_chunk` for up to a number of tokens."""

    x: Tensor
    """[T, padded(D)], bf16 or f32: the input, columns in the order of `fragments`."""
    order: Tensor
    """int32 [T * k], see `expert_sort`."""
    bounds: Tensor
    """int32 [2 * slots]."""
    tiles: Tensor
    """int32 [2 * capacity] for the narrowest tiles."""
    hidden: Tensor
    """[T * k, padded(F)], bf16 or f32: rows in sorted order, columns in that of `fragments`."""
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
        x=empty(tokens, padded(hidden), dtype=dtype),
        order=empty(pairs),
        bounds=empty(2 * slots),
        tiles=empty(2 * tile_capacity(pairs, slots, WIDTHS[0])),
        hidden=empty(pairs, padded(width), dtype=dtype),
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


@dataclass(frozen=True, slots=True, eq=False)
class ExpertPart:
    """Experts that are in memory at a time."""

    banks: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix]
    """Of gate and up matrices, [slots * F, D], and of down matrices, [slots * D, F]."""
    places: Tensor | None
    """int32 [E], slot of each expert, negative for those of other parts; None: all, in order."""


@dataclass(frozen=True, slots=True)
class ExpertSizes:
    """What the launches of a chunk have in common."""

    experts: int
    k: int
    pairs: int
    limit: float
    precise: bool


def expert_ffn_chunk(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    banks: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix],
    limit: float,
    *,
    scratch: ExpertScratch,
    precise: bool = False,
) -> None:
    """Run the routed experts of a chunk; seven launches, no transfer to the host.

    Args:
        out: out, [T, D] f32, contiguous.
        x: [T, D] f32 or bf16, contiguous.
        ids: slots, int32 [T, k]; a place with a slot outside of the bank adds nothing.
        weights: routing weights, f32 [T, k].
        banks: of gate and up matrices, [slots * F, D], and of down matrices, [slots * D, F].
        limit: clamp of the hidden layer; inf for none.
        scratch: working memory, made for the same precision.
        precise: products in f32 instead of bf16 products with f32 sums.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    expert_ffn_parts(
        out,
        x,
        ids,
        weights,
        (ExpertPart(banks, None),),
        limit,
        experts=banks[2].rows // x.shape[1],
        scratch=scratch,
        precise=precise,
    )


def expert_ffn_parts(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    parts: Iterable[ExpertPart],
    limit: float,
    *,
    experts: int,
    scratch: ExpertScratch,
    precise: bool = False,
) -> None:
    """Run the routed experts of a chunk, part by part.

    Args:
        out: out, [T, D] f32, contiguous.
        x: [T, D] f32 or bf16, contiguous.
        ids: experts, int32 [T, k]; a place with a number outside of 0 .. E - 1 adds nothing.
        weights: routing weights, f32 [T, k].
        parts: where experts are. The next one is asked for when what uses this one was launched.
            Every expert of `ids` must be in one of them; none for no experts at all.
        limit: clamp of the hidden layer; inf for none.
        experts: E.
        scratch: working memory, made for the same precision and E slots.
        precise: products in f32 instead of bf16 products with f32 sums.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    if len(x) == 0:
        return
    size = ExpertSizes(experts, ids.shape[1], ids.numel(), limit, precise)
    bounds = scratch.bounds[: 2 * experts].view(2, experts)
    packed: torch.dtype | None = None
    for part in parts:
        check_experts((out, x, ids, weights), part, scratch, size)
        own = _in_halves(scratch, *part.banks, precise)
        if packed is None:
            sort_pairs(scratch.order, bounds, ids)
        if own.x.dtype != packed:
            pack_activations(own.x, x)
            packed = own.x.dtype
        _run_part(own, bounds, part, size)
    if packed is None:
        out.zero_()
        return
    sum_places(out, scratch.outputs, ids, weights, experts)


def _run_part(scratch: ExpertScratch, bounds: Tensor, part: ExpertPart, size: ExpertSizes) -> None:
    gate_up, down = tilings(part.banks, size.precise)
    block = tile_width(size.pairs, size.experts, min(max(gate_up), max(down)))
    capacity = tile_capacity(size.pairs, size.experts, block)
    tiles = scratch.tiles[: 2 * capacity].view(2, capacity)
    cut_tiles(tiles, bounds, size.pairs, block, part.places)
    table = _Table(tiles, bounds, part.places, block)
    _launch_gate_up(scratch, table, part.banks, gate_up[block], size)
    _launch_down(scratch, table, part.banks[2], down[block], size)


def _in_halves(
    scratch: ExpertScratch, w1: DeviceMatrix, w3: DeviceMatrix, w2: DeviceMatrix, precise: bool
) -> ExpertScratch:
    """The same memory, with the operands of weights of `HALF_TYPES` as f16."""
    x, hidden = scratch.x, scratch.hidden
    if is_pair(w1, w3, precise) and w1.type in HALF_TYPES:
        x = x.view(torch.float16)
    if w2.type in HALF_TYPES and not precise:
        hidden = hidden.view(torch.float16)
    return replace(scratch, x=x, hidden=hidden)


def check_experts(
    tensors: tuple[Tensor, Tensor, Tensor, Tensor],
    part: ExpertPart,
    scratch: ExpertScratch,
    size: ExpertSizes,
) -> None:
    """Tensors are the result, x, ids and weights."""
    out, x, ids, weights = tensors
    w1, w3, w2 = part.banks
    tokens, hidden = x.shape
    width, slots = w2.cols, w2.rows // hidden
    fits = (w1.rows, w3.rows, w2.rows) == (slots * width, slots * width, slots * hidden)
    fits = fits and (w1.cols, w3.cols) == (hidden, hidden) and out.shape == x.shape
    fits = fits and ids.shape == weights.shape and len(ids) == tokens
    whole = slots if part.places is None else part.places.numel()
    if not (fits and whole == size.experts):
        raise ShapeError(
            f"expert_ffn_chunk: x {list(x.shape)}, out {list(out.shape)}, ids {list(ids.shape)},"
            f" weights {list(weights.shape)}, w1 [{w1.rows}, {w1.cols}], w3 [{w3.rows}, {w3.cols}],"
            f" w2 [{w2.rows}, {w2.cols}], {whole} of {size.experts} experts"
        )
    if not all(tensor.is_contiguous() for tensor in (out, x, ids, weights)):
        raise ShapeError("expert_ffn_chunk: out, x, ids and weights must be contiguous")
    pairs, experts = size.pairs, size.experts
    dtype = torch.float32 if size.precise else torch.bfloat16
    has_room = len(scratch.x) >= tokens and scratch.x.shape[1] == padded(hidden)
    has_room = (
        has_room and len(scratch.hidden) >= pairs and scratch.hidden.shape[1] == padded(width)
    )
    has_room = has_room and scratch.bounds.numel() >= 2 * experts and scratch.hidden.dtype == dtype
    if scratch.x.numel() >= 1 << 31 or scratch.hidden.numel() >= 1 << 31:
        raise ShapeError("expert_ffn_chunk: the chunk is too long for 32-bit offsets")
    if not has_room:
        raise ShapeError(
            f"expert_ffn_chunk: scratch for {dtype} and {pairs} pairs of {experts} slots is needed,"
            f" found {scratch.hidden.dtype} {list(scratch.hidden.shape)},"
            f" x {list(scratch.x.shape)}, {scratch.bounds.numel() // 2} slots"
        )


@dataclass(frozen=True, slots=True, eq=False)
class _Table:
    """Tiles of a part, see `expert_sort`."""

    tiles: Tensor
    bounds: Tensor
    places: Tensor | None
    block: int
    """Pairs per tile."""

    @property
    def capacity(self) -> int:
        """Tiles at most."""
        return self.tiles.shape[1]


def _launch_gate_up(
    scratch: ExpertScratch,
    table: _Table,
    banks: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix],
    tiling: Tiling,
    size: ExpertSizes,
) -> None:
    w1, w3, w2 = banks
    stride_hidden_row = scratch.hidden.shape[1]
    is_precise = scratch.hidden.dtype == torch.float32
    kernel = _gate_up_kernel if is_pair(w1, w3, is_precise) else _gate_then_up_kernel
    launch(
        kernel,
        (cdiv(stride_hidden_row, tiling.rows), table.capacity),
        scratch.hidden,
        scratch.x,
        scratch.order,
        table.bounds,
        table.tiles,
        table.places,
        *_planes(w1, scratch.x.dtype),
        *_planes(w3, scratch.x.dtype),
        float(size.limit),
        size.experts,
        table.capacity,
        size.k,
        scratch.x.shape[1],
        stride_hidden_row,
        D=w1.cols,
        F=w2.cols,
        TYPE1=w1.type,
        SCALE1=w1.scale_cols,
        TYPE3=w3.type,
        SCALE3=w3.scale_cols,
        PRECISE=is_precise,
        IS_SPLIT=is_split(),
        BR=tiling.rows,
        BK=_columns(tiling, w1, w3),
        BT=table.block,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _launch_down(
    scratch: ExpertScratch, table: _Table, w2: DeviceMatrix, tiling: Tiling, size: ExpertSizes
) -> None:
    rows = scratch.outputs.shape[1]
    launch(
        _down_kernel,
        (cdiv(rows, tiling.rows), table.capacity),
        scratch.outputs,
        scratch.hidden,
        scratch.order,
        table.bounds,
        table.tiles,
        table.places,
        *_planes(w2, scratch.hidden.dtype),
        size.experts,
        table.capacity,
        scratch.hidden.shape[1],
        D=rows,
        F=w2.cols,
        TYPE=w2.type,
        SCALE=w2.scale_cols,
        PRECISE=scratch.hidden.dtype == torch.float32,
        BR=tiling.rows,
        BK=_columns(tiling, w2),
        BT=table.block,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _planes(matrix: DeviceMatrix, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Planes for products with activations of a type."""
    return half_planes(matrix) if dtype == torch.float16 else plane_arguments(matrix)


def _columns(tiling: Tiling, *matrices: DeviceMatrix) -> int:
    """Columns per tile: at least 256 where a type is decoded so."""
    is_narrow = all(matrix.type in PRODUCT_TYPES for matrix in matrices)
    return tiling.columns if is_narrow else 256


@triton.jit
def _multiply(acc, w, x, PRECISE: tl.constexpr):
    """The sum acc + w x: weights f32 [BR, BK] by column, activations [BK, BT] by position."""
    if PRECISE:
        return tl.dot(weights_in_positions(w), x, acc, input_precision="ieee")
    else:
        return dot_acc(weights_in_positions(to_bf16(w)), x, acc)


@triton.jit
def _places(tiles_ptr, bounds_ptr, slot, slots, capacity, BT: tl.constexpr):
    """Positions of the pairs of this program's tile in the sorted order, and which there are."""
    o_place = tl.load(tiles_ptr + capacity + tl.program_id(1)) + tl.arange(0, BT)
    return o_place, o_place < tl.load(bounds_ptr + slots + slot)


@triton.jit
def _place(places_ptr, slot):
    """Where the rows of an expert are in the bank, int64."""
    place = slot
    if places_ptr is not None:
        place = tl.load(places_ptr + slot)
    return place.to(tl.int64)


@triton.jit
def _store_hidden(hidden_ptr, gate, up, limit, o_row, o_place, m_place, stride_hidden_row):
    """SwiGLU of two [BR, BT]; rows past F are zero, as their weights are."""
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    h = gate / (1.0 + tl.exp(-gate)) * up
    if hidden_ptr.dtype.element_ty == tl.bfloat16:
        h = to_bf16(h)
    o_hidden = o_place.to(tl.int64)[None, :] * stride_hidden_row + position_of(o_row)[:, None]
    mask = (o_row < stride_hidden_row)[:, None] & m_place[None, :]
    tl.store(hidden_ptr + o_hidden, h, mask=mask)


# Long for its planes: the rows of both matrices are one operand, and each pair meets in a thread.
@triton.jit
def _gate_up_kernel(
    hidden_ptr,
    x_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    places_ptr,
    a0,
    a1,
    a2,
    a3,
    b0,
    b1,
    b2,
    b3,  # noqa: ARG001 - arguments are those of `_gate_then_up_kernel`
    limit,
    slots,
    capacity,
    k,
    stride_x_row,
    stride_hidden_row,
    D: tl.constexpr,
    F: tl.constexpr,
    TYPE1: tl.constexpr,
    SCALE1: tl.constexpr,
    TYPE3: tl.constexpr,  # noqa: ARG001
    SCALE3: tl.constexpr,  # noqa: ARG001
    PRECISE: tl.constexpr,
    IS_SPLIT: tl.constexpr,  # noqa: ARG001
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """BR rows of w1 and of w3 of one slot, of one type, with BT of its pairs.

    Of 16 rows of the operand the first 8 are of w1, the others the same ones of w3: a matrix unit
    keeps rows r and r + 8 of its result in one thread.
    """
    slot = tl.load(tiles_ptr + tl.program_id(1))
    if slot < 0:
        return
    o_place, m_place = _places(tiles_ptr, bounds_ptr, slot, slots, capacity, BT)
    token = tl.load(order_ptr + o_place, mask=m_place, other=0) // k  # [BT]
    o_x = token[None, :] * stride_x_row + tl.arange(0, BK)[:, None]  # [BK, BT]
    m_x = m_place[None, :]
    first = tl.program_id(0) * BR
    slot_row = _place(places_ptr, slot) * F
    acc = tl.zeros([2 * BR, BT], tl.float32)
    if x_ptr.dtype.element_ty == tl.float16:
        o = first + tl.arange(0, BR)
        row, m = slot_row + o, o < F
        acc = add_halves(
            acc, x_ptr + o_x, m_x, a0, a1, a2, b0, b1, b2, a3, row, row, m, m, D, TYPE1, BK
        )
    else:
        o = tl.arange(0, 2 * BR)
        is_up = o // 8 % 2 == 1
        o = first + o // 16 * 8 + o % 8  # [2 BR]
        p0 = tl.where(is_up, b0, a0)[:, None]
        p1 = tl.where(is_up, b1, a1)[:, None]
        p2 = tl.where(is_up, b2, a2)[:, None]
        row, m = slot_row + o, o < F
        for k0 in range(0, D, BK):
            x = tl.load(x_ptr + k0 + o_x, mask=m_x, other=0.0)
            w = product_tile(p0, p1, p2, a3, row, m, k0, D, TYPE1, BK, SCALE1)  # [2 BR, BK]
            acc = _multiply(acc, w, x, PRECISE)
    acc = tl.permute(tl.reshape(acc, (BR // 8, 2, 8, BT)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(acc, (BR, BT, 2)))
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)
    _store_hidden(hidden_ptr, gate, up, limit, o_row, o_place, m_place, stride_hidden_row)


# Long for its planes.
@triton.jit
def _gate_then_up_kernel(
    hidden_ptr,
    x_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    places_ptr,
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
    stride_x_row,
    stride_hidden_row,
    D: tl.constexpr,
    F: tl.constexpr,
    TYPE1: tl.constexpr,
    SCALE1: tl.constexpr,
    TYPE3: tl.constexpr,
    SCALE3: tl.constexpr,
    PRECISE: tl.constexpr,
    IS_SPLIT: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """As `_gate_up_kernel` for any types: BR rows of w1, then of w3, for each tile of columns.

    With IS_SPLIT for all columns: activations are read twice, and need no registers in between.
    """
    slot = tl.load(tiles_ptr + tl.program_id(1))
    if slot < 0:
        return
    o_place, m_place = _places(tiles_ptr, bounds_ptr, slot, slots, capacity, BT)
    token = tl.load(order_ptr + o_place, mask=m_place, other=0) // k  # [BT]
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < F
    row = _place(places_ptr, slot) * F + o_row
    o_x = token[None, :] * stride_x_row + tl.arange(0, BK)[:, None]  # [BK, BT]
    gate = tl.zeros([BR, BT], tl.float32)
    up = tl.zeros([BR, BT], tl.float32)
    if IS_SPLIT:
        for k0 in range(0, D, BK):
            x = tl.load(x_ptr + k0 + o_x, mask=m_place[None, :], other=0.0)
            w = product_tile(a0, a1, a2, a3, row, m_row, k0, D, TYPE1, BK, SCALE1)  # [BR, BK]
            gate = _multiply(gate, w, x, PRECISE)
        for k0 in range(0, D, BK):
            x = tl.load(x_ptr + k0 + o_x, mask=m_place[None, :], other=0.0)
            w = product_tile(b0, b1, b2, b3, row, m_row, k0, D, TYPE3, BK, SCALE3)
            up = _multiply(up, w, x, PRECISE)
    else:
        for k0 in range(0, D, BK):
            x = tl.load(x_ptr + k0 + o_x, mask=m_place[None, :], other=0.0)
            w = product_tile(a0, a1, a2, a3, row, m_row, k0, D, TYPE1, BK, SCALE1)  # [BR, BK]
            gate = _multiply(gate, w, x, PRECISE)
            w = product_tile(b0, b1, b2, b3, row, m_row, k0, D, TYPE3, BK, SCALE3)
            up = _multiply(up, w, x, PRECISE)
    _store_hidden(hidden_ptr, gate, up, limit, o_row, o_place, m_place, stride_hidden_row)


@triton.jit
def _down_kernel(
    outputs_ptr,
    hidden_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    places_ptr,
    a0,
    a1,
    a2,
    a3,
    slots,
    capacity,
    stride_hidden_row,
    D: tl.constexpr,
    F: tl.constexpr,
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
    o_place, m_place = _places(tiles_ptr, bounds_ptr, slot, slots, capacity, BT)
    pair = tl.load(order_ptr + o_place, mask=m_place, other=0)  # [BT]
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    m_row = o_row < D
    row = _place(places_ptr, slot) * D + o_row
    o_h = o_place[None, :] * stride_hidden_row + tl.arange(0, BK)[:, None]  # [BK, BT]
    m_h = m_place[None, :]
    acc = tl.zeros([BR, BT], tl.float32)
    if hidden_ptr.dtype.element_ty == tl.float16:
        o = tl.program_id(0) * BR + tl.arange(0, BR // 2) // 8 * 8 + tl.arange(0, BR // 2)
        a_row = _place(places_ptr, slot) * D + o
        b_row, a_mask, b_mask = a_row + 8, o < D, o + 8 < D
        h_ptr = hidden_ptr + o_h
        acc = add_halves(
            acc, h_ptr, m_h, a0, a1, a2, a0, a1, a2, a3, a_row, b_row, a_mask, b_mask, F, TYPE, BK
        )
    else:
        for k0 in range(0, F, BK):
            h = tl.load(hidden_ptr + k0 + o_h, mask=m_h, other=0.0)
            w = product_tile(a0, a1, a2, a3, row, m_row, k0, F, TYPE, BK, SCALE)  # [BR, BK]
            acc = _multiply(acc, w, h, PRECISE)
    if not PRECISE:
        acc = to_bf16(acc)
    o_out = pair.to(tl.int64)[None, :] * D + o_row[:, None]  # [BR, BT]
    tl.store(outputs_ptr + o_out, acc, mask=m_row[:, None] & m_place[None, :])

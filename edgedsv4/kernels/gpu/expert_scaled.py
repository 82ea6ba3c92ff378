"""Routed experts of a chunk as block-scaled products of 8-bit floats: MXFP4 weights on sm_120.

The formula is that of `expert_matmul`. The matrix units of these cards multiply e4m3 numbers in
groups of 32 that share a power of two, and add in f32: every product is exact. What is rounded is
the left side of each product, x and the hidden layer. A group of 32 columns has as its scale the
smallest power of two 2^e with max |x| <= 448 2^e (e at least -127), and x 2^-e becomes the nearest
e4m3 number, ties to even. A group with a NaN or an infinity has the scale NaN, and so have all sums
over it. On 2,056 tokens of pocket-v4 this costs 2.4e-4 nats of KL, and all roundings of the profile
`default` together with it 2.0e-4.

A weight, sign and e e m, is put into an e4m3 number as it is: s 00ee m00, subnormal for ee = 0.
That is 2^-6 of it in every case, so the bytes of the activations' scales are 6 larger than theirs:
e + 133. The scales of weights are the stored bytes: 0 is 2^-127 and 255 is NaN here, too.

A matrix unit wants of every group of 32 the columns 4c .. 4c + 3 and 16 + 4c .. 16 + 4c + 3 of one
thread, c its place among four. A word of the plane has eight consecutive codes. So a position p of
a group stands for another column: position 16 h + 4 c + 2 b + a for column 8 c + 4 h + 2 a + b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels._triton import HAVE_TRITON, IS_INTERPRETED, tl, triton
from edgedsv4.kernels.gpu.conversions import e4m3_to_f32, e8m0_to_f32, f32_to_e4m3, to_bf16
from edgedsv4.kernels.gpu.decode_common import join8, spread
from edgedsv4.kernels.gpu.decode_product import plane_numbers, plane_words
from edgedsv4.kernels.gpu.expert_matmul import ExpertPart, ExpertScratch, ExpertSizes, check_experts
from edgedsv4.kernels.gpu.expert_sort import cut_tiles, sort_pairs, tile_capacity
from edgedsv4.kernels.gpu.expert_sum import sum_places
from edgedsv4.kernels.gpu.expert_tiling import Tiling, tile_width
from edgedsv4.kernels.gpu.launching import cdiv, launch

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix

GROUP = 32
"""Columns per scale."""
LARGEST = 448.0
"""Largest e4m3 number."""
_LEAST_EXPONENT = -127
_BLOCK = 1024
# By pairs per tile: rows of each matrix. Gate and up of as many rows make one operand.
_GATE_UP = {
    16: Tiling(32, 128, 4, 3),
    32: Tiling(32, 128, 4, 3),
    64: Tiling(32, 128, 4, 2),
    128: Tiling(64, 64, 8, 3),
}
_DOWN = {
    16: Tiling(64, 128, 4, 3),
    32: Tiling(64, 128, 4, 3),
    64: Tiling(64, 128, 4, 2),
    128: Tiling(128, 64, 8, 3),
}
_PairsOfTiles = tuple[Tensor, Tensor, Tensor, int, int]
"""`order`, `bounds` and `tiles` of `expert_sort`; slots, and places in `tiles`."""
NATIVE = tl.constexpr(not IS_INTERPRETED)
"""Whether there are 8-bit floats and `dot_scaled`; the interpreter decodes and multiplies f32."""


def has_scaled_products(family: str) -> bool:
    """Whether a family has these products and the installed Triton makes them.

    On sm_121 Triton before 3.8 takes them apart into products of bfloat16; so does every release on
    other cards of NVIDIA, where some do not compile. Triton 3.6 was seen to lose the order of bytes
    within a thread.
    """
    least = {"sm_120": (3, 7), "sm_121": (3, 8)}.get(family)
    return HAVE_TRITON and least is not None and triton_release() >= least


def triton_release() -> tuple[int, int]:
    """Major and minor number of the installed Triton."""
    major, minor = triton.__version__.split(".")[:2]
    return int(major), int(minor)


def fits_scaled(banks: tuple[DeviceMatrix, ...], family: str, precise: bool) -> bool:
    """Whether a chunk's experts go through `expert_ffn_scaled`.

    Args:
        banks: gate, up and down.
        family: of the card, a name of `targets`.
        precise: profile `exact`, which rounds no activation.
    """
    return not precise and has_scaled_products(family) and all(b.type == "MXFP4" for b in banks)


def scaled_reference(x: Tensor) -> Tensor:
    """What rounding makes of activations, in float64.

    Args:
        x: [..., n], n a multiple of 32, any float dtype.

    Returns:
        float64 [..., n].
    """
    groups = x.double().unflatten(-1, (-1, GROUP))
    largest = groups.abs().amax(-1, keepdim=True)
    exponent = torch.ceil(torch.log2(largest / LARGEST)).clamp(min=_LEAST_EXPONENT)
    scale = torch.where(largest.isfinite(), torch.exp2(exponent), torch.nan)
    scaled = groups / scale
    # e4m3 has three bits below the first one; from 2^-6 down its numbers are as far apart as there.
    step = torch.exp2(torch.floor(torch.log2(scaled.abs())).clamp(min=-6) - 3)
    return (torch.round(scaled / step) * step * scale).flatten(-2)


def expert_ffn_scaled(
    out: Tensor,
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    banks: tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix],
    limit: float,
    *,
    scratch: ExpertScratch,
) -> None:
    """Run the routed experts of a chunk; six launches, no transfer to the host.

    Args:
        out: out, [T, D] f32, contiguous.
        x: [T, D] f32 or bf16, contiguous.
        ids: slots, int32 [T, k]; a place with a slot outside of the bank adds nothing.
        weights: routing weights, f32 [T, k].
        banks: of MXFP4, as for `expert_ffn_chunk`.
        limit: clamp of the hidden layer; inf for none.
        scratch: working memory, made for bfloat16 products; a row of x or hidden holds first the
            8-bit floats, then the scales.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    w1, w3, w2 = banks
    slots, pairs, k = w2.rows // x.shape[1], ids.numel(), ids.shape[1]
    size = ExpertSizes(slots, k, pairs, limit, precise=False)
    check_experts((out, x, ids, weights), ExpertPart(banks, None), scratch, size)
    if len(x) == 0:
        return
    block = tile_width(pairs, slots)
    capacity = tile_capacity(pairs, slots, block)
    tiles = scratch.tiles[: 2 * capacity].view(2, capacity)
    bounds = scratch.bounds[: 2 * slots].view(2, slots)
    rounded, hidden = (rows.view(torch.uint8) for rows in (scratch.x, scratch.hidden))
    pack_scaled(rounded, x)
    sort_pairs(scratch.order, bounds, ids)
    cut_tiles(tiles, bounds, pairs, block)
    pairs_of_tiles = (scratch.order, bounds, tiles, slots, capacity)
    _launch_gate_up(hidden, rounded, pairs_of_tiles, (w1, w3), limit=limit, k=k, block=block)
    _launch_down(scratch.outputs, hidden, pairs_of_tiles, w2, block=block)
    sum_places(out, scratch.outputs, ids, weights, slots)


def _launch_gate_up(
    hidden: Tensor,
    x: Tensor,
    pairs_of_tiles: _PairsOfTiles,
    banks: tuple[DeviceMatrix, DeviceMatrix],
    *,
    limit: float,
    k: int,
    block: int,
) -> None:
    w1, w3 = banks
    slots, capacity = pairs_of_tiles[3:]
    tiling = _GATE_UP[block]
    launch(
        _scaled_gate_up_kernel,
        (cdiv(hidden.shape[1] // 2, tiling.rows), capacity),
        hidden,
        x,
        *pairs_of_tiles,
        *w1.planes,
        *w3.planes,
        float(limit),
        k,
        x.shape[1],
        hidden.shape[1],
        D=w1.cols,
        F=w1.rows // slots,
        BR=tiling.rows,
        BK=tiling.columns,
        BT=block,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def _launch_down(
    outputs: Tensor,
    hidden: Tensor,
    pairs_of_tiles: _PairsOfTiles,
    w2: DeviceMatrix,
    *,
    block: int,
) -> None:
    slots, capacity = pairs_of_tiles[3:]
    tiling = _DOWN[block]
    rows = w2.rows // slots
    launch(
        _scaled_down_kernel,
        (cdiv(rows, tiling.rows), capacity),
        outputs,
        hidden,
        *pairs_of_tiles,
        *w2.planes,
        hidden.shape[1],
        D=rows,
        F=w2.cols,
        BR=tiling.rows,
        BK=tiling.columns,
        BT=block,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


def pack_scaled(out: Tensor, x: Tensor) -> None:
    """Round rows to 8-bit floats in the order of positions; one launch.

    Args:
        out: out, uint8 [T, 2 padded(K)], contiguous: padded(K) numbers, zeros for columns that
            there are not, and padded(K) / 32 bytes of scales; what follows stays as it was.
        x: [T, K] f32 or bf16, K a multiple of 32.
    """
    tokens, columns = x.shape
    width = out.shape[1] // 2
    launch(
        _pack_kernel,
        (tokens, cdiv(width, _BLOCK)),
        out,
        x,
        columns,
        width,
        x.stride(0),
        BLOCK=_BLOCK,
        num_warps=4,
    )


@triton.jit
def _pack_kernel(out_ptr, x_ptr, K, width, stride_x_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x_row + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    q, s = _rounded(tl.reshape(x, (BLOCK, 1)))
    row_ptr = out_ptr + token * (2 * width)
    tl.store(row_ptr + _position(o_k), tl.reshape(q, (BLOCK,)), mask=o_k < width)
    o_group = tl.program_id(1) * (BLOCK // 32) + tl.arange(0, BLOCK // 32)
    s_ptrs = row_ptr + width + o_group
    tl.store(s_ptrs, tl.reshape(s, (BLOCK // 32,)), mask=o_group < width // 32)


@triton.jit
def _position(column):
    """Where a column's number is stored; Triton 3.6 loses a permutation between two reshapes."""
    group, half = column & -32, (column >> 2) & 1
    return group + half * 16 + ((column >> 3) & 3) * 4 + (column & 1) * 2 + ((column >> 1) & 1)


@triton.jit
def _rounded(x):
    """Groups of 32 of columns f32 [N, BT]: e4m3 uint8 [N, BT], scales uint8 [N / 32, BT]."""
    N: tl.constexpr = x.shape[0]
    BT: tl.constexpr = x.shape[1]
    x = tl.reshape(x, (N // 32, 32, BT))
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # NaN above all numbers
    is_finite = largest < 0x7F800000
    # 448 is 1.75 2^8: a larger significand carries into the exponent.
    exponent = tl.maximum(((largest + 0x1FFFFF) >> 23) - 8, 0)  # [N / 32, BT]
    factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    x = tl.where(is_finite[:, None, :], x * factor[:, None, :], 0.0)
    q = tl.reshape(f32_to_e4m3(x), (N, BT))
    return q, tl.where(is_finite, exponent + 6, 255).to(tl.uint8)


@triton.jit
def _weights(words):
    """Weights e4m3 2^-6 in positions, uint8 [BR, BK], from words [BR, BK / 8] of `pack_e2m1`."""
    BR: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    first = ((words >> 8) & 0x00800080) | ((words >> 7) & 0x001C001C)
    first |= ((words << 3) & 0x80008000) | ((words << 4) & 0x1C001C00)
    second = ((words >> 6) & 0x00800080) | ((words >> 1) & 0x001C001C)
    second |= ((words << 1) & 0x80008000) | ((words << 10) & 0x1C001C00)
    w = join8(
        first.to(tl.uint8),
        (first >> 8).to(tl.uint8),
        (first >> 16).to(tl.uint8),
        (first >> 24).to(tl.uint8),
        second.to(tl.uint8),
        (second >> 8).to(tl.uint8),
        (second >> 16).to(tl.uint8),
        (second >> 24).to(tl.uint8),
    )
    w = tl.permute(tl.reshape(w, (BR, WORDS // 4, 4, 2, 4)), (0, 1, 3, 2, 4))
    return tl.reshape(w, (BR, 8 * WORDS))


@triton.jit
def _add_scaled(acc, w, w_s, x_ptrs, x_s_ptrs, m_place):
    """The sum acc + w x, of bytes: w [BR, BK] and x [BK, BT], scales [.., BK / 32] of each."""
    x_s = tl.load(x_s_ptrs, mask=m_place[:, None], other=127)
    if NATIVE:
        x_ptrs = x_ptrs.to(tl.pointer_type(tl.float8e4nv))
        x = tl.load(x_ptrs, mask=m_place[None, :], other=0.0)
        w = w.to(tl.float8e4nv, bitcast=True)
        return tl.dot_scaled(w, w_s, "e4m3", x, x_s, "e4m3", acc)
    else:
        x = e4m3_to_f32(tl.load(x_ptrs, mask=m_place[None, :], other=0))
        x *= tl.trans(spread(e8m0_to_f32(x_s), x.shape[0]))
        w = e4m3_to_f32(w) * spread(e8m0_to_f32(w_s), w.shape[1])
        return tl.dot(w, x, acc, input_precision="ieee")


@triton.jit
def _scaled_gate_up_kernel(
    hidden_ptr,
    x_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    slots,
    capacity,
    a_ptr,
    a_s_ptr,
    b_ptr,
    b_s_ptr,
    limit,
    k,
    stride_x_row,
    stride_hidden_row,
    D: tl.constexpr,
    F: tl.constexpr,
    BR: tl.constexpr,
    BK: tl.constexpr,
    BT: tl.constexpr,
):
    """BR rows of w1 and of w3 of one slot with BT of its pairs: hidden layer, rounded.

    Of 16 rows of the operand the first 8 are of w1, the others the same ones of w3: a matrix unit
    keeps rows r and r + 8 of its result in one thread.
    """
    slot = tl.load(tiles_ptr + tl.program_id(1))
    if slot < 0:
        return
    o_place = tl.load(tiles_ptr + capacity + tl.program_id(1)) + tl.arange(0, BT)  # [BT]
    m_place = o_place < tl.load(bounds_ptr + slots + slot)
    token = tl.load(order_ptr + o_place, mask=m_place, other=0) // k  # [BT]
    first = tl.program_id(0) * BR
    o = tl.arange(0, 2 * BR)
    is_up = o // 8 % 2 == 1
    o = first + o // 16 * 8 + o % 8  # [2 BR]
    row, m = slot.to(tl.int64) * F + o, o < F
    w_ptr = tl.where(is_up, b_ptr, a_ptr)[:, None]
    w_s_ptr = tl.where(is_up, b_s_ptr, a_s_ptr)[:, None]
    o_x = token.to(tl.int64) * stride_x_row
    x_ptrs = x_ptr + o_x[None, :] + tl.arange(0, BK)[:, None]  # [BK, BT]
    o_s = stride_x_row // 2 + tl.arange(0, BK // 32)
    x_s_ptrs = x_ptr + o_x[:, None] + o_s[None, :]  # [BT, BK / 32]
    acc = tl.zeros([2 * BR, BT], tl.float32)
    for k0 in range(0, D, BK):
        words = plane_words(w_ptr, row, m, k0, D, 8, BK)  # [2 BR, BK / 8]
        w_s = plane_numbers(w_s_ptr, row, m, k0, D, 32, BK)  # [2 BR, BK / 32]
        acc = _add_scaled(acc, _weights(words), w_s, x_ptrs + k0, x_s_ptrs + k0 // 32, m_place)
    acc = tl.permute(tl.reshape(acc, (BR // 8, 2, 8, BT)), (0, 2, 3, 1))
    gate, up = tl.split(tl.reshape(acc, (BR, BT, 2)))
    gate = tl.where(gate > limit, limit, gate)  # a NaN stays
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    q, s = _rounded(gate / (1.0 + tl.exp(-gate)) * up)  # rows past F are zero, as weights are
    width = stride_hidden_row // 2
    hidden_row = hidden_ptr + o_place.to(tl.int64)[None, :] * stride_hidden_row  # [1, BT]
    o_row = first + tl.arange(0, BR)[:, None]
    tl.store(hidden_row + _position(o_row), q, mask=(o_row < width) & m_place[None, :])
    o_group = first // 32 + tl.arange(0, BR // 32)[:, None]
    tl.store(hidden_row + width + o_group, s, mask=(o_group < width // 32) & m_place[None, :])


@triton.jit
def _scaled_down_kernel(
    outputs_ptr,
    hidden_ptr,
    order_ptr,
    bounds_ptr,
    tiles_ptr,
    slots,
    capacity,
    w_ptr,
    w_s_ptr,
    stride_hidden_row,
    D: tl.constexpr,
    F: tl.constexpr,
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
    pair = tl.load(order_ptr + o_place, mask=m_place, other=0)  # [BT]
    o_row = tl.program_id(0) * BR + tl.arange(0, BR)  # [BR]
    row, m = slot.to(tl.int64) * D + o_row, o_row < D
    o_h = o_place.to(tl.int64) * stride_hidden_row
    h_ptrs = hidden_ptr + o_h[None, :] + tl.arange(0, BK)[:, None]  # [BK, BT]
    o_s = stride_hidden_row // 2 + tl.arange(0, BK // 32)
    h_s_ptrs = hidden_ptr + o_h[:, None] + o_s[None, :]  # [BT, BK / 32]
    acc = tl.zeros([BR, BT], tl.float32)
    for k0 in range(0, F, BK):
        words = plane_words(w_ptr, row, m, k0, F, 8, BK)  # [BR, BK / 8]
        w_s = plane_numbers(w_s_ptr, row, m, k0, F, 32, BK)  # [BR, BK / 32]
        acc = _add_scaled(acc, _weights(words), w_s, h_ptrs + k0, h_s_ptrs + k0 // 32, m_place)
    o_out = pair.to(tl.int64)[None, :] * D + o_row[:, None]  # [BR, BT]
    tl.store(outputs_ptr + o_out, to_bf16(acc), mask=m[:, None] & m_place[None, :])

"""Dot products of a few rows of a stored matrix with a few vectors: the inner loop of decode.

A thread takes a piece of 16 neighbouring columns of every row at a time, 16 bytes of an 8-bit code,
and keeps its part of x in registers for all rows; a row is summed over the threads once, at the
end. Types without a path of their own are decoded by `decode_tile`.
"""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import bf16_to_f32
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.nvidia import await_inputs
from edgedsv4.kernels.gpu.tuples import appended, nothing


@triton.jit
def row_dots(
    x_ptr,
    stride_x,
    i_t,
    T,
    p0,
    p1,
    p2,
    p3,
    row,
    last,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Rows row .. row + BN - 1 (below last) times tokens i_t .. i_t + BT - 1: f32 [BT, BN]."""
    # Triton has no sets.
    IS_FLOAT: tl.constexpr = TYPE == "BF16" or TYPE == "F16" or TYPE == "F32"  # noqa: PLR1714
    HAS_PATH: tl.constexpr = IS_FLOAT or TYPE == "Q8_0"
    if HAS_PATH:
        return _by_pieces(
            x_ptr, stride_x, i_t, T, p0, p1, row, last, K, TYPE, BT, BN, BG, OVERLAP
        )  # [BT, BN]
    else:
        tl.static_assert(BT == 1)
        await_inputs(OVERLAP)
        return _by_tiles(
            x_ptr, stride_x, i_t, p0, p1, p2, p3, row, last, K, TYPE, SCALE_COLS, BN, BG
        )  # [1, BN]


@triton.jit
def q8_0_rows(
    x_ptr,
    p0,
    p1,
    row,
    step,
    last,
    K: tl.constexpr,
    R: tl.constexpr,
    BN: tl.constexpr,
    OVERLAP: tl.constexpr = False,
):
    """Rows row [R] + i step (at most last), i < BN, of Q8_0 matrices times x: f32 [R, BN].

    The planes p0 and p1 are pointers [R]. All loads come first.
    """
    BG: tl.constexpr = triton.next_power_of_2(K // 16)
    piece = tl.arange(0, BG)
    is_piece = (piece < K // 16)[None, :]
    column = piece[None, :, None] * 16 + tl.arange(0, 16)[None, None, :]
    codes, scales = nothing(), nothing()
    for i in tl.static_range(BN):
        address = p0 + tl.minimum(row + i * step, last) * K
        w = tl.load(
            address[:, None, None] + column,
            mask=is_piece[:, :, None],
            other=0,
            eviction_policy="evict_first",
        )  # [R, BG, 16]
        codes = appended(codes, w)
    for i in tl.static_range(BN):
        address = p1 + tl.minimum(row + i * step, last) * (K // 32)
        scale = tl.load(address[:, None] + (piece // 2)[None, :], mask=is_piece, other=0.0)
        scales = appended(scales, scale)
    await_inputs(OVERLAP)
    # The address has as many rows as the others, so that the layout is theirs.
    x_address = x_ptr + (row * 0)[:, None, None] + column
    x = tl.load(x_address, mask=is_piece[:, :, None], other=0.0)  # [R, BG, 16]
    # Codes are stored with 128 added; as half floats they are numbers times 2^-24.
    offset = tl.sum(x, 2) * (-128.0 / 16777216.0)
    sums = nothing()
    for i in tl.static_range(BN):
        w = codes[i].to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
        part = (tl.sum(w * x, 2) + offset) * (scales[i].to(tl.float32) * 16777216.0)
        sums = appended(sums, part)
    return tl.sum(_rows_last(sums, R, BN, BG), 1)


@triton.jit
def _rows_last(a, R: tl.constexpr, BN: tl.constexpr, BG: tl.constexpr):
    """Tensors [R, BG] on a last axis."""
    if BN == 1:
        return a[0][:, :, None]
    elif BN == 2:
        return tl.join(a[0], a[1])
    elif BN == 4:
        return tl.reshape(_join4(a[0], a[1], a[2], a[3]), (R, BG, 4))
    else:
        tl.static_assert(BN == 8)
        both = tl.join(_join4(a[0], a[2], a[4], a[6]), _join4(a[1], a[3], a[5], a[7]))
        return tl.reshape(both, (R, BG, 8))


@triton.jit
def _by_pieces(
    x_ptr,
    stride_x,
    i_t,
    T,
    p0,
    p1,
    row,
    last,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    o_t = i_t + tl.arange(0, BT)
    piece = tl.arange(0, BG)
    column = piece[:, None] * 16 + tl.arange(0, 16)[None, :]  # [BG, 16]
    token = o_t.to(tl.int64)[:, None, None] * stride_x
    sums = nothing()
    for _ in tl.static_range(BN):
        sums = appended(sums, tl.zeros([BT, BG], tl.float32))
    for k0 in tl.static_range(0, K, BG * 16):
        weights, scales = nothing(), nothing()
        for i in tl.static_range(BN):
            w, scale = _piece(p0, p1, row + i, row + i < last, k0, K, TYPE, BG)
            weights, scales = appended(weights, w), appended(scales, scale)
        if k0 == 0:
            await_inputs(OVERLAP)
        m_x = (o_t < T)[:, None, None] & (k0 + column < K)[None, :, :]
        x = tl.load(x_ptr + token + (k0 + column)[None, :, :], mask=m_x, other=0.0)  # [BT, BG, 16]
        total = tl.sum(x, 2)
        added = nothing()
        for i in tl.static_range(BN):
            part = _piece_product(weights[i], scales[i], x, total, TYPE)
            added = appended(added, sums[i] + part)
        sums = added
    if BN == 1:
        return tl.sum(sums[0], 1)[:, None]
    elif BN == 2:
        return tl.sum(tl.join(sums[0], sums[1]), 1)  # [BT, 2]
    elif BN == 4:
        both = _join4(sums[0], sums[1], sums[2], sums[3])
        return tl.sum(tl.reshape(both, (BT, BG, 4)), 1)
    else:
        even = _join4(sums[0], sums[2], sums[4], sums[6])
        odd = _join4(sums[1], sums[3], sums[5], sums[7])
        return tl.sum(tl.reshape(tl.join(even, odd), (BT, BG, 8)), 1)


@triton.jit
def _join4(a0, a1, a2, a3):
    return tl.join(tl.join(a0, a2), tl.join(a1, a3))


@triton.jit
def _piece(
    p0, p1, row, is_row, k0: tl.constexpr, K: tl.constexpr, TYPE: tl.constexpr, BG: tl.constexpr
):
    """16 columns per thread of one row as stored, [1, BG, 16], and of Q8_0 their scales [BG]."""
    piece = tl.arange(0, BG)
    m_piece = k0 + piece * 16 < K
    column = k0 + piece[:, None] * 16 + tl.arange(0, 16)[None, :]
    if TYPE == "Q8_0" or K % 16 == 0:
        mask = (m_piece & is_row)[None, :, None]
    else:
        mask = ((column < K) & is_row)[None, :, :]
    address = p0 + row * K + column[None, :, :]
    w = tl.load(address, mask=mask, other=0, eviction_policy="evict_first")
    if TYPE == "Q8_0":
        at = p1 + row * (K // 32) + k0 // 32 + piece // 2
        return w, tl.load(at, mask=m_piece & is_row, other=0.0, eviction_policy="evict_first")
    else:
        return w, piece


@triton.jit
def _piece_product(w, scale, x, total, TYPE: tl.constexpr):
    """The product of a piece with x [BT, BG, 16] of sums `total`: f32 [BT, BG]."""
    if TYPE == "Q8_0":
        # Codes are stored with 128 added.
        return (tl.sum(w.to(tl.float32) * x, 2) - 128.0 * total) * scale.to(tl.float32)[None, :]
    elif TYPE == "BF16":
        return tl.sum(bf16_to_f32(w) * x, 2)
    else:
        return tl.sum(w.to(tl.float32) * x, 2)


@triton.jit
def _by_tiles(
    x_ptr,
    stride_x,
    i_t,
    p0,
    p1,
    p2,
    p3,
    row,
    last,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    SCALE_COLS: tl.constexpr,
    BN: tl.constexpr,
    BG: tl.constexpr,
):
    BK: tl.constexpr = BG * 16 // 2 if BG * 16 > 512 else 256
    o_n = (row + tl.arange(0, BN)).to(tl.int64)
    o_k = tl.arange(0, BK)
    token = i_t * stride_x
    acc = tl.zeros([BN, BK], tl.float32)
    for k0 in range(0, K, BK):
        w = decode_tile(p0, p1, p2, p3, o_n, o_n < last, k0, K, TYPE, BK, SCALE_COLS)
        x = tl.load(x_ptr + token + k0 + o_k, mask=k0 + o_k < K, other=0.0)  # [BK]
        acc += w * x[None, :]
    return tl.sum(acc, 1)[None, :]

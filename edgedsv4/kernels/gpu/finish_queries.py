"""From the products of wq_b to queries: norm and rotation of heads, rounding of index queries.

A head is divided by its root mean square (no weight) and its last r dims are rotated. An index
query is rotated and, where index keys are FP4, Hadamard transformed and taken through FP4 storage,
so that its values are what a key's would be. Definitions: `edgedsv4.model.attention`,
`edgedsv4.model.indexer`. One launch does both, in place or into another buffer, also bfloat16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import to_bf16
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.make_rows import hadamard, load_rotation, rotate
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.gpu.rows import group_pairs, number_pairs, round_fp4

NUM_WARPS = 4
TILE = {True: 512, False: 2048}
"""Elements of a tile of heads, for one token and for more: one token needs many programs, a chunk
bytes in flight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rotation:
    """cos and sin of the T positions, [T, r / 2] float32 each."""

    cos: Tensor
    sin: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexQueries:
    """Queries of the indexer."""

    out: Tensor
    """[T, index_heads, index_dim] float32 or bfloat16, result; may be `raw` itself."""
    raw: Tensor
    """[T, index_heads, index_dim] float32, products."""
    is_rounded: bool
    """Transform and round as FP4 keys are."""
    bad: Tensor
    """[1] int32, set to 1 when a query is not finite; the caller clears it."""


def finish_queries(
    out: Tensor,
    raw: Tensor,
    rotation: Rotation,
    eps: float,
    index: IndexQueries | None = None,
    *,
    overlap: bool = False,
) -> None:
    """Make queries of products.

    Args:
        out: [T, H, d] float32 or bfloat16, result; may be `raw` itself.
        raw: [T, H, d] float32.
        rotation: of the tokens.
        eps: of the norm.
        index: queries of the indexer of the same layer.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if shapes disagree.
    """
    tokens, heads, dim = raw.shape
    rope_dim = 2 * rotation.cos.shape[1]
    _check_buffers(out, raw, tokens)
    _check_buffers(rotation.sin, rotation.cos, tokens)
    tile = TILE[tokens == 1]
    block = power_of_two(dim)
    rows = _tile_rows(tile, heads, dim)
    programs = tokens * -(-heads // rows)
    launch(
        _finish_queries_kernel,
        (programs + _index_programs(index, tokens, tile),),
        out,
        raw,
        rotation.cos,
        rotation.sin,
        eps=eps,
        programs=programs,
        HEADS=heads,
        WIDTH=dim,
        ROPE=rope_dim,
        BH=rows,
        BD=block,
        BR=power_of_two(rope_dim // 2),
        **_index_arguments(out, index, tile),
        num_warps=NUM_WARPS,
        **overlap_options(overlap=overlap),
    )


def _check_buffers(out: Tensor, raw: Tensor, tokens: int) -> None:
    if out.shape != raw.shape or raw.shape[0] != tokens or raw.dtype != torch.float32:
        raise ShapeError(f"queries: {list(out.shape)} of {list(raw.shape)}, {tokens} tokens")
    if not (out.is_contiguous() and raw.is_contiguous()):
        raise ShapeError("queries: buffers must be contiguous")


def _tile_rows(tile: int, heads: int, dim: int) -> int:
    rows: int = min(tile // power_of_two(dim), power_of_two(heads))
    return max(1, rows)


def _index_rows(index: IndexQueries, tile: int) -> int:
    """Heads of one tile."""
    return _tile_rows(tile, index.raw.shape[1], index.raw.shape[2])


def _index_programs(index: IndexQueries | None, tokens: int, tile: int) -> int:
    if index is None:
        return 0
    _check_buffers(index.out, index.raw, tokens)
    return tokens * -(-index.raw.shape[1] // _index_rows(index, tile))


def _index_arguments(out: Tensor, index: IndexQueries | None, tile: int) -> dict[str, Any]:
    if index is None:
        nothing = {"index_out_ptr": out, "index_raw_ptr": out, "bad_ptr": out}
        sizes = {"I_HEADS": 1, "I_WIDTH": 2, "BI": 1, "G": 1, "GP": 1, "LOG_HADAMARD": 0}
        return {**nothing, **sizes}
    heads, dim = index.raw.shape[1:]
    block = power_of_two(dim)
    if index.is_rounded and block != dim:
        raise ShapeError(f"queries: Hadamard transform of {dim} dims")
    pairs = group_pairs("fp4", block)
    return {
        "index_out_ptr": index.out,
        "index_raw_ptr": index.raw,
        "bad_ptr": index.bad,
        "I_HEADS": heads,
        "I_WIDTH": dim,
        "BI": _index_rows(index, tile),
        "G": block // (2 * pairs),
        "GP": pairs,
        "LOG_HADAMARD": dim.bit_length() - 1 if index.is_rounded else 0,
    }


@triton.jit
def _store(pointers, x, mask):
    """Store float32 as what the pointers are to."""
    if pointers.dtype.element_ty == tl.bfloat16:
        tl.store(pointers, to_bf16(x), mask=mask)
    else:
        tl.store(pointers, x, mask=mask)


@triton.jit
def _finish_heads(
    out_ptr,
    raw_ptr,
    cos_ptr,
    sin_ptr,
    i_tile,
    eps,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
):
    """Heads of one tile of one token.

    The rotated dims are loaded a second time, as pairs; they are stored after the norm is known,
    when nothing has to be loaded any more.
    """
    TILES: tl.constexpr = (HEADS + BH - 1) // BH
    NOPE: tl.constexpr = WIDTH - ROPE
    token = (i_tile // TILES).to(tl.int64)
    i_head = i_tile % TILES * BH + tl.arange(0, BH)
    m_head = (i_head < HEADS)[:, None]
    o_head = (token * HEADS + i_head)[:, None] * WIDTH
    o_d = tl.arange(0, BD)[None, :]
    o_r = tl.arange(0, BR)[None, :]
    m_pair = m_head & (o_r < ROPE // 2)
    o_pair = o_head + NOPE + 2 * o_r  # [BH, BR]
    x = tl.load(raw_ptr + o_head + o_d, mask=m_head & (o_d < WIDTH), other=0.0)  # [BH, BD]
    a = tl.load(raw_ptr + o_pair, mask=m_pair, other=0.0)
    b = tl.load(raw_ptr + o_pair + 1, mask=m_pair, other=0.0)
    o_table = token * (ROPE // 2) + o_r
    cos = tl.load(cos_ptr + o_table, mask=o_r < ROPE // 2, other=1.0)
    sin = tl.load(sin_ptr + o_table, mask=o_r < ROPE // 2, other=0.0)
    scale = tl.math.rsqrt(tl.sum(x * x, axis=1) / WIDTH + eps)[:, None]
    _store(out_ptr + o_head + o_d, x * scale, m_head & (o_d < NOPE))
    a, b = a * scale, b * scale
    _store(out_ptr + o_pair, a * cos - b * sin, m_pair)
    _store(out_ptr + o_pair + 1, a * sin + b * cos, m_pair)


@triton.jit
def _finish_index(
    out_ptr,
    raw_ptr,
    cos_ptr,
    sin_ptr,
    bad_ptr,
    i_tile,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BI: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
):
    """Index queries of one tile of one token, as pairs [BI * G, GP]: G groups are a head."""
    TILES: tl.constexpr = (HEADS + BI - 1) // BI
    token = (i_tile // TILES).to(tl.int64)
    i_row = number_pairs(BI * G, GP)
    i_head, i_pair = i_tile % TILES * BI + i_row // (G * GP), i_row % (G * GP)
    m_pair = (i_head < HEADS) & (i_pair < WIDTH // 2)
    o_pair = (token * HEADS + i_head) * WIDTH + 2 * i_pair
    a = tl.load(raw_ptr + o_pair, mask=m_pair, other=0.0)
    b = tl.load(raw_ptr + o_pair + 1, mask=m_pair, other=0.0)
    o_table = token * (ROPE // 2)
    cos, sin = load_rotation(cos_ptr + o_table, sin_ptr + o_table, i_pair, WIDTH, ROPE)
    a, b = rotate(a, b, cos, sin, i_pair, WIDTH, ROPE)
    largest = tl.max(tl.where((tl.abs(a) < float("inf")) & (tl.abs(b) < float("inf")), 0, 1))
    tl.store(bad_ptr, 1, mask=largest > 0)
    if LOG_HADAMARD > 0:
        SIZE: tl.constexpr = 2 * BI * G * GP
        x = hadamard(tl.reshape(tl.join(a, b), (SIZE,)), LOG_HADAMARD, SIZE)
        a, b = tl.split(tl.reshape(x * (WIDTH**-0.5), (BI * G, GP, 2)))
        a, b = round_fp4(a, b)
    _store(out_ptr + o_pair, a, m_pair)
    _store(out_ptr + o_pair + 1, b, m_pair)


@triton.jit(do_not_specialize=["programs"])
def _finish_queries_kernel(
    out_ptr,
    raw_ptr,
    cos_ptr,
    sin_ptr,
    index_out_ptr,
    index_raw_ptr,
    bad_ptr,
    eps,
    programs,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    BH: tl.constexpr,
    BD: tl.constexpr,
    BR: tl.constexpr,
    I_HEADS: tl.constexpr,
    I_WIDTH: tl.constexpr,
    BI: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    LOG_HADAMARD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """The first `programs` programs make heads, the others index queries."""
    i_tile = tl.program_id(0)
    await_inputs(OVERLAP)
    if i_tile < programs:
        _finish_heads(
            out_ptr, raw_ptr, cos_ptr, sin_ptr, i_tile, eps, HEADS, WIDTH, ROPE, BH, BD, BR
        )
    else:
        _finish_index(
            index_out_ptr,
            index_raw_ptr,
            cos_ptr,
            sin_ptr,
            bad_ptr,
            i_tile - programs,
            I_HEADS,
            I_WIDTH,
            ROPE,
            BI,
            G,
            GP,
            LOG_HADAMARD,
        )

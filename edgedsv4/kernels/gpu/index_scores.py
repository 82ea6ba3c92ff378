"""Scores of the lightning indexer: S[t, w] = sum_h weights[t, h] * relu(q[t, h] . keys[w]).

The definition is `edgedsv4.kernels.index_scores`. Keys are scored as they are stored: FP4 codes are
widened to bfloat16, which holds them and the queries exactly, and multiplied with float32 sums; a
key of float32 is multiplied in float32. A program keeps the queries of a few tokens and walks over
tiles of keys, so that a tile is decoded once for all of them.

Token t sees n = (position + t + 1) // ratio rows. Programs past n end at once, and so do all of a
tile of tokens that take every row they see; scores are then not written. `position` is read on the
device: a launch captured in a graph serves every later position.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.conversions import dot_acc, to_bf16
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.kv_quant import FP4_GROUP

_PROGRAMS = 528
"""Programs at most of a launch with few tokens: four for each processor of a large GPU."""
_TILES = {
    "": (64, 64, 4, 3),
    "sm_89": (64, 128, 4, 3),
    "sm_90": (64, 256, 4, 2),
    "sm_120": (64, 128, 4, 3),
    "sm_121": (64, 128, 4, 3),
    "f32": (32, 64, 4, 1),
}
"""Keys, heads of all tokens of a program together, warps and stages, by target family."""
_F32_DIMS = 32
"""Dims multiplied at once."""


def tokens_per_tile(tokens: int, rows: int, budget_bytes: int) -> int:
    """How many tokens to score and select at once, so that their scores fit the budget.

    Args:
        tokens: of the chunk.
        rows: columns of the scores, at least what the last token sees.
        budget_bytes: of the scores.
    """
    fitting = max(1, budget_bytes // (4 * max(rows, 1)))
    return min(tokens, fitting if fitting < 16 else fitting // 16 * 16)


def score_keys(
    scores: Tensor,
    iq: Tensor,
    head_weights: Tensor,
    keys: Sequence[Tensor],
    position: Tensor,
    *,
    ratio: int,
    topk: int,
    first: int = 0,
    factor: float = 1.0,
    family: str = "",
    overlap: bool = False,
) -> None:
    """Score every row that a token sees, for tokens that see more than `topk`.

    Args:
        scores: written, [T, capacity] float32; a row counts up to what its token sees.
        iq: queries, rotated, [T, heads, dim] float32 or bfloat16. With FP4 keys they must be
            rounded like them: bfloat16 has to hold them exactly.
        head_weights: [T, heads] float32.
        keys: (codes uint8 [rows, dim / 2], scales uint8 [rows, ceil(dim / 32)]) or
            (values float32 [rows, dim],).
        position: int32 [1], of the first token of the chunk.
        ratio: tokens per row.
        topk: rows a token takes; one that sees no more needs no scores.
        first: index in the chunk of the first of these tokens.
        factor: of all head weights.
        family: target family ("sm_90", "gfx942", ...), the key of the tile table.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if shapes disagree, a tensor has gaps, or 8 does not divide the FP4 dims.
    """
    _check(scores, iq, head_weights, keys)
    tokens, heads, dim = iq.shape
    is_fp4 = len(keys) == 2
    capacity = min(scores.shape[1], keys[0].shape[0])
    if tokens == 0 or capacity == 0:
        return
    keys_block, columns, warps, stages = _TILES.get(family if is_fp4 else "f32", _TILES[""])
    head_block = max(16, power_of_two(heads))
    token_block = min(power_of_two(tokens), max(1, columns // head_block))
    tiles = cdiv(tokens, token_block)
    splits = max(1, min(cdiv(capacity, keys_block), _PROGRAMS // tiles))
    kernel = _score_fp4_kernel if is_fp4 else _score_f32_kernel
    launch(
        kernel,
        (tiles, splits),
        scores,
        iq,
        head_weights,
        *((keys[0].view(torch.int32), keys[1]) if is_fp4 else keys),
        position,
        first,
        tokens,
        capacity,
        scores.stride(0),
        ratio,
        topk,
        factor,
        HEADS=heads,
        HEAD_BLOCK=head_block,
        DIM=dim,
        TOKEN_BLOCK=token_block,
        BN=keys_block,
        **_dim_blocks(dim, is_fp4=is_fp4),
        num_warps=warps,
        num_stages=stages,
        **overlap_options(overlap=overlap),
    )


def _check(scores: Tensor, iq: Tensor, head_weights: Tensor, keys: Sequence[Tensor]) -> None:
    dim = iq.shape[2]
    width = keys[0].shape[1] * len(keys)
    if scores.shape[0] != iq.shape[0] or head_weights.shape != iq.shape[:2] or width != dim:
        raise ShapeError(
            f"score_keys: scores {list(scores.shape)}, iq {list(iq.shape)},"
            f" head_weights {list(head_weights.shape)}, keys {[list(k.shape) for k in keys]}"
        )
    if len(keys) == 2 and dim % 8 != 0:
        raise ShapeError(f"score_keys: dims of FP4 keys must be a multiple of 8, not {dim}")
    if not all(x.is_contiguous() for x in (iq, head_weights, *keys)) or scores.stride(1) != 1:
        raise ShapeError("score_keys: queries, head weights and keys must be contiguous")


def _dim_blocks(dim: int, *, is_fp4: bool) -> dict[str, int]:
    if is_fp4:
        return {"GROUPS": max(2, power_of_two(-(-dim // FP4_GROUP)))}
    return {"DIM_BLOCK": _F32_DIMS}


@triton.jit
def _visible_rows(position_ptr, tokens, capacity, ratio):
    """Rows that the last of `tokens` tokens of the chunk sees."""
    return tl.minimum((tl.load(position_ptr) + tokens) // ratio, capacity)


@triton.jit
def _weighted_sum(dots, b_weights, BN: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr):
    """[BN, TOKENS * HEADS] -> sum over heads of weight * relu, [BN, TOKENS]; NaN stays NaN."""
    weighted = tl.maximum(dots, 0.0, propagate_nan=tl.PropagateNan.ALL) * b_weights[None, :]
    return tl.sum(weighted.reshape(BN, TOKENS, HEADS), axis=2)


@triton.jit
def _query_elements(iq_ptr, o_query, m_query, J, DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Elements 8 i + J and 8 i + J + 4 of the queries, i = 0, 1, ...: [GROUPS * 8, COLUMNS]."""
    o_k = tl.arange(0, GROUPS * 8)
    o_d = o_k // 2 * 8 + o_k % 2 * 4 + J
    p_q = iq_ptr + o_query[:, None] * DIM + o_d[None, :]
    b_q = tl.load(p_q, mask=m_query[:, None] & (o_d < DIM)[None, :], other=0.0)
    return tl.trans(to_bf16(b_q.to(tl.float32)))


@triton.jit
def _load_scales(scales_ptr, i_n, n, DIM: tl.constexpr, GROUPS: tl.constexpr, BN: tl.constexpr):
    """Exponents of BN rows from i_n, [BN, GROUPS] uint8."""
    SCALES: tl.constexpr = (DIM + 31) // 32
    o_n, o_g = i_n + tl.arange(0, BN), tl.arange(0, GROUPS)
    mask = (o_n < n)[:, None]
    if SCALES != GROUPS:
        mask = mask & (o_g < SCALES)[None, :]
    p_scales = scales_ptr + o_n.to(tl.int64)[:, None] * SCALES + o_g[None, :]
    return tl.load(p_scales, mask=mask, other=127)


@triton.jit
def _scale_factors(scales):
    """uint8 exponents -> 2^(s - 127) * 2^14, float32; NaN where that is past the largest."""
    factors = ((scales.to(tl.uint32) + 14) << 23).to(tl.float32, bitcast=True)
    return tl.where(scales > 240, float("nan"), factors)


@triton.jit
def _key_elements(signs, magnitudes, factors, BN: tl.constexpr, GROUPS: tl.constexpr):
    """The same elements of the keys, [BN, GROUPS * 8].

    Both arguments are words of eight codes, [BN, GROUPS, 4], shifted so that two of the codes end
    where two float16 have sign and lowest exponent bits: the values, times 2^-14.
    """
    pairs = (signs & 0x80008000) | (magnitudes & 0x0E000E00)
    low = (pairs & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pairs >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    return tl.join(to_bf16(low * factors), to_bf16(high * factors)).reshape(BN, GROUPS * 8)


@triton.jit(do_not_specialize=["first", "tokens", "capacity"])
def _score_fp4_kernel(
    scores_ptr,
    iq_ptr,
    weights_ptr,
    codes_ptr,
    scales_ptr,
    position_ptr,
    first,
    tokens,
    capacity,
    stride_scores_token,
    ratio,
    topk,
    factor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    BN: tl.constexpr,
    GROUPS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    i_t = tl.program_id(0) * TOKEN_BLOCK
    n = _visible_rows(position_ptr, first + tl.minimum(i_t + TOKEN_BLOCK, tokens), capacity, ratio)
    if n <= topk:
        return
    if tl.program_id(1) * BN >= n:
        return
    COLUMNS: tl.constexpr = TOKEN_BLOCK * HEAD_BLOCK
    o_c = tl.arange(0, COLUMNS)
    o_token, o_head = i_t + o_c // HEAD_BLOCK, o_c % HEAD_BLOCK
    m_c = (o_token < tokens) & (o_head < HEADS)
    o_query = o_token.to(tl.int64) * HEADS + o_head  # [COLUMNS]
    b_weights = tl.load(weights_ptr + o_query, mask=m_c, other=0.0) * factor
    b_q0 = _query_elements(iq_ptr, o_query, m_c, 0, DIM, GROUPS)
    b_q1 = _query_elements(iq_ptr, o_query, m_c, 1, DIM, GROUPS)
    b_q2 = _query_elements(iq_ptr, o_query, m_c, 2, DIM, GROUPS)
    b_q3 = _query_elements(iq_ptr, o_query, m_c, 3, DIM, GROUPS)

    o_word = tl.arange(0, GROUPS)[:, None] * 4 + tl.arange(0, 4)[None, :]  # [GROUPS, 4]
    o_store = i_t + tl.arange(0, TOKEN_BLOCK)
    step = tl.num_programs(1) * BN
    # Bytes are not copied ahead by the compiler, so the scales of the next tile are loaded by hand.
    b_next = _load_scales(scales_ptr, tl.program_id(1) * BN, n, DIM, GROUPS, BN)
    for i_n in range(tl.program_id(1) * BN, n, step):
        factors = _scale_factors(b_next)[:, :, None]
        b_next = _load_scales(scales_ptr, i_n + step, n, DIM, GROUPS, BN)
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < n
        m_codes = m_n[:, None, None]
        if GROUPS * 32 != DIM:
            m_codes = m_codes & (o_word < DIM // 8)[None, :, :]
        p_codes = codes_ptr + o_n.to(tl.int64)[:, None, None] * (DIM // 8) + o_word[None, :, :]
        b_codes = tl.load(p_codes, mask=m_codes, other=0)  # [BN, GROUPS, 4]
        codes = b_codes.to(tl.uint32, bitcast=True)
        dots = tl.zeros((BN, COLUMNS), tl.float32)
        dots = dot_acc(_key_elements(codes << 12, codes << 9, factors, BN, GROUPS), b_q0, dots)
        dots = dot_acc(_key_elements(codes << 8, codes << 5, factors, BN, GROUPS), b_q1, dots)
        dots = dot_acc(_key_elements(codes << 4, codes << 1, factors, BN, GROUPS), b_q2, dots)
        dots = dot_acc(_key_elements(codes, codes >> 3, factors, BN, GROUPS), b_q3, dots)
        b_scores = _weighted_sum(dots, b_weights, BN, TOKEN_BLOCK, HEAD_BLOCK)
        p_scores = scores_ptr + o_store.to(tl.int64)[None, :] * stride_scores_token + o_n[:, None]
        tl.store(p_scores, b_scores, mask=m_n[:, None] & (o_store < tokens)[None, :])


@triton.jit(do_not_specialize=["first", "tokens", "capacity"])
def _score_f32_kernel(
    scores_ptr,
    iq_ptr,
    weights_ptr,
    keys_ptr,
    position_ptr,
    first,
    tokens,
    capacity,
    stride_scores_token,
    ratio,
    topk,
    factor,
    HEADS: tl.constexpr,
    HEAD_BLOCK: tl.constexpr,
    DIM: tl.constexpr,
    TOKEN_BLOCK: tl.constexpr,
    BN: tl.constexpr,
    DIM_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    await_inputs(OVERLAP)
    i_t = tl.program_id(0) * TOKEN_BLOCK
    n = _visible_rows(position_ptr, first + tl.minimum(i_t + TOKEN_BLOCK, tokens), capacity, ratio)
    if n <= topk:
        return
    COLUMNS: tl.constexpr = TOKEN_BLOCK * HEAD_BLOCK
    o_c = tl.arange(0, COLUMNS)
    o_token, o_head = i_t + o_c // HEAD_BLOCK, o_c % HEAD_BLOCK
    m_c = (o_token < tokens) & (o_head < HEADS)
    o_query = o_token.to(tl.int64) * HEADS + o_head  # [COLUMNS]
    b_weights = tl.load(weights_ptr + o_query, mask=m_c, other=0.0) * factor
    o_store = i_t + tl.arange(0, TOKEN_BLOCK)
    for i_n in range(tl.program_id(1) * BN, n, tl.num_programs(1) * BN):
        o_n = i_n + tl.arange(0, BN)
        m_n = o_n < n
        dots = tl.zeros((BN, COLUMNS), tl.float32)
        for i_d in range(0, DIM, DIM_BLOCK):
            o_d = i_d + tl.arange(0, DIM_BLOCK)
            m_d = o_d < DIM
            p_q = iq_ptr + o_query[None, :] * DIM + o_d[:, None]  # [DIM_BLOCK, COLUMNS]
            b_q = tl.load(p_q, mask=m_d[:, None] & m_c[None, :], other=0.0).to(tl.float32)
            p_keys = keys_ptr + o_n.to(tl.int64)[:, None] * DIM + o_d[None, :]  # [BN, DIM_BLOCK]
            b_keys = tl.load(p_keys, mask=m_n[:, None] & m_d[None, :], other=0.0)
            dots = tl.dot(b_keys, b_q, dots, input_precision="ieee")
        b_scores = _weighted_sum(dots, b_weights, BN, TOKEN_BLOCK, HEAD_BLOCK)
        p_scores = scores_ptr + o_store.to(tl.int64)[None, :] * stride_scores_token + o_n[:, None]
        tl.store(p_scores, b_scores, mask=m_n[:, None] & (o_store < tokens)[None, :])

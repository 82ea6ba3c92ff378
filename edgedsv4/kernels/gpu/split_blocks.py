"""Blocks of a file taken apart into planes by one launch, for weights that pass through the card.

What `plane_layouts.split_blocks` does with a dozen operations of torch and memory for each: experts
that are brought to the card for one chunk are taken apart as fast as they arrive. The layouts are
those of `plane_layouts`; types without a kernel here go through torch.

Blocks of all rows lie one after the other, and so do the numbers of a plane, so a program takes
BLOCKS of them wherever rows begin.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import cdiv, launch

SPLIT_TYPES = ("IQ2_XXS", "MXFP4", "Q2_K", "Q4_K", "Q8_0")
"""Types with a kernel."""
_BLOCKS = 128


def split_rows(type_name: str, planes: Sequence[Tensor], rows: Tensor) -> None:
    """Write the planes of some rows.

    Args:
        type_name: one of `SPLIT_TYPES`.
        planes: those of `plane_layouts` for as many rows, contiguous; a table behind them is left.
        rows: uint8 [n, row_bytes] as a file has them, contiguous.

    Raises:
        ShapeError: if a tensor is not contiguous, or the sizes do not fit.
    """
    block_bytes = BLOCK_TYPES[type_name].block_bytes
    count = rows.numel() // block_bytes
    used = planes[: _PLANES[type_name]]
    sizes = [plane.nbytes for plane in used]
    is_whole = rows.is_contiguous() and all(plane.is_contiguous() for plane in used)
    if sum(sizes) != rows.numel() or rows.numel() % block_bytes or not is_whole:
        raise ShapeError(
            f"split_rows: planes of {sizes} bytes for {list(rows.shape)} bytes of {type_name}; all"
            " must be contiguous"
        )
    if count == 0:
        return
    kernel = _KERNELS[type_name]
    launch(
        kernel,
        (cdiv(count, _BLOCKS),),
        *(plane.view(_WORDS[plane.element_size()]) for plane in used),
        rows.view(-1).view(_UNITS[type_name]),
        count,
        BLOCKS=_BLOCKS,
        num_warps=4,
    )


@triton.jit
def _iq2_xxs_kernel(grid_ptr, sign_ptr, scale_ptr, raw_ptr, count, BLOCKS: tl.constexpr):
    """33 half words: d, then eight times two of indices and two of signs and scale."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < count
    tl.store(scale_ptr + o_b, tl.load(raw_ptr + o_b * 33, mask=m_b, other=0), mask=m_b)
    o_g = tl.arange(0, 8)[None, :]
    at = raw_ptr + o_b[:, None] * 33 + 1 + 4 * o_g  # [BLOCKS, 8]
    mask = m_b[:, None] & (o_g < 8)
    tl.store(grid_ptr + o_b[:, None] * 8 + o_g, _word(at, mask), mask=mask)
    word = _word(at + 2, mask)
    moved = word & -268435456
    for octet in tl.static_range(4):
        for i in tl.static_range(7):
            bit = (word >> (7 * octet + i)) & 1
            moved |= bit << (4 * (i // 2) + octet + 16 * (i % 2))
    tl.store(sign_ptr + o_b[:, None] * 8 + o_g, moved, mask=mask)


@triton.jit
def _word(at, mask):
    """Two neighbouring half words, the lower one first: int32."""
    low = tl.load(at, mask=mask, other=0).to(tl.int32) & 0xFFFF
    return low | (tl.load(at + 1, mask=mask, other=0).to(tl.int32) << 16)


@triton.jit
def _q8_0_kernel(code_ptr, scale_ptr, raw_ptr, count, BLOCKS: tl.constexpr):
    """17 half words: d, codes."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < count
    tl.store(scale_ptr + o_b, tl.load(raw_ptr + o_b * 17, mask=m_b, other=0), mask=m_b)
    o_w = tl.arange(0, 8)[None, :]
    mask = m_b[:, None] & (o_w < 8)
    word = _word(raw_ptr + o_b[:, None] * 17 + 1 + 2 * o_w, mask)
    tl.store(code_ptr + o_b[:, None] * 8 + o_w, word ^ -2139062144, mask=mask)


@triton.jit
def _q2_k_kernel(code_ptr, small_ptr, scale_ptr, raw_ptr, count, BLOCKS: tl.constexpr):
    """21 words: four of scales, sixteen of codes, d and dmin."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < count
    tl.store(scale_ptr + o_b, tl.load(raw_ptr + o_b * 21 + 20, mask=m_b, other=0), mask=m_b)
    o_s = tl.arange(0, 4)[None, :]
    m_s = m_b[:, None] & (o_s < 4)
    small = tl.load(raw_ptr + o_b[:, None] * 21 + o_s, mask=m_s, other=0)
    tl.store(small_ptr + o_b[:, None] * 4 + o_s, small, mask=m_s)
    # Word w of the plane: 16 elements, of one shift, from 16 bytes.
    o_w = tl.arange(0, 16)[None, :]
    m_w = m_b[:, None] & (o_w < 16)
    at = raw_ptr + o_b[:, None] * 21 + 4 + o_w // 8 * 8 + o_w % 2 * 4
    shift = o_w % 8 // 2 * 2
    codes = tl.zeros([BLOCKS, 16], tl.int32)
    for i in tl.static_range(4):
        m = (tl.load(at + i, mask=m_w, other=0) >> shift) & 0x03030303
        pairs = (m & 3) | (((m >> 16) & 3) << 2) | (((m >> 8) & 3) << 16) | (((m >> 24) & 3) << 18)
        codes |= pairs << (4 * i)
    tl.store(code_ptr + o_b[:, None] * 16 + o_w, codes, mask=m_w)


@triton.jit
def _q4_k_kernel(code_ptr, head_ptr, raw_ptr, count, BLOCKS: tl.constexpr):
    """36 words: d and dmin, three of scales, 32 of codes."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < count
    raw_ptr += o_b * 36
    o_w = tl.arange(0, 32)[None, :]
    m_w = m_b[:, None] & (o_w < 32)
    at = raw_ptr[:, None] + 4 + o_w // 8 * 8 + o_w % 4 * 2
    shift = o_w % 8 // 4 * 4
    codes = tl.zeros([BLOCKS, 32], tl.int32)
    for i in tl.static_range(2):
        m = (tl.load(at + i, mask=m_w, other=0) >> shift) & 0x0F0F0F0F
        pairs = (m & 15) | (((m >> 16) & 15) << 4)
        pairs |= (((m >> 8) & 15) << 16) | (((m >> 24) & 15) << 20)
        codes |= pairs << (8 * i)
    tl.store(code_ptr + o_b[:, None] * 32 + o_w, codes, mask=m_w)
    first = tl.load(raw_ptr + 1, mask=m_b, other=0)
    second = tl.load(raw_ptr + 2, mask=m_b, other=0)
    third = tl.load(raw_ptr + 3, mask=m_b, other=0)
    s_low, m_low, high = first * 0, first * 0, first * 0
    for i in tl.static_range(8):
        at_bit = 8 * (i % 4)
        if i < 4:
            s, m = (first >> at_bit) & 63, (second >> at_bit) & 63
        else:
            both = third >> at_bit
            s = (both & 15) | (((first >> (at_bit + 6)) & 3) << 4)
            m = ((both >> 4) & 15) | (((second >> (at_bit + 6)) & 3) << 4)
        s_low |= (s & 15) << (4 * i)
        m_low |= (m & 15) << (4 * i)
        high |= ((s >> 4) << (2 * i)) | ((m >> 4) << (2 * i + 16))
    head_ptr += o_b * 4
    tl.store(head_ptr, tl.load(raw_ptr, mask=m_b, other=0), mask=m_b)
    tl.store(head_ptr + 1, s_low, mask=m_b)
    tl.store(head_ptr + 2, m_low, mask=m_b)
    tl.store(head_ptr + 3, high, mask=m_b)


@triton.jit
def _mxfp4_kernel(code_ptr, scale_ptr, raw_ptr, count, BLOCKS: tl.constexpr):
    """17 bytes: the exponent, then 16 with elements i and i + 16."""
    o_b = tl.program_id(0).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    m_b = o_b < count
    tl.store(scale_ptr + o_b, tl.load(raw_ptr + o_b * 17, mask=m_b, other=0), mask=m_b)
    o_w = tl.arange(0, 4)[None, :]
    m_w = m_b[:, None] & (o_w < 4)
    at = raw_ptr + o_b[:, None] * 17 + 1 + o_w % 2 * 8
    shift = o_w // 2 * 4
    codes = tl.zeros([BLOCKS, 4], tl.int32)
    for i in tl.static_range(8):
        code = (tl.load(at + i, mask=m_w, other=0).to(tl.int32) >> shift) & 15
        r = i // 2
        # As in `pack_e2m1`: magnitudes at 9, 6, 3, 0 and signs at 15, 12, 13, 14.
        top = 15 if r == 0 else 11 + r
        lane = ((code & 7) << (9 - 3 * r)) | ((code >> 3) << top)
        codes |= lane << (16 * (i % 2))
    tl.store(code_ptr + o_b[:, None] * 4 + o_w, codes, mask=m_w)


_KERNELS = {
    "IQ2_XXS": _iq2_xxs_kernel,
    "MXFP4": _mxfp4_kernel,
    "Q2_K": _q2_k_kernel,
    "Q4_K": _q4_k_kernel,
    "Q8_0": _q8_0_kernel,
}
_PLANES = {"IQ2_XXS": 3, "MXFP4": 2, "Q2_K": 3, "Q4_K": 2, "Q8_0": 2}
_WORDS = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
# What blocks are read in: their sizes are no multiples of more.
_UNITS = {
    "IQ2_XXS": torch.int16,
    "MXFP4": torch.uint8,
    "Q2_K": torch.int32,
    "Q4_K": torch.int32,
    "Q8_0": torch.int16,
}

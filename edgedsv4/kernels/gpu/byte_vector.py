"""A vector as signed bytes in groups of 32, in the order in which products of bytes want them.

scale = max |x| / 127, q = round_to_even(x 127 / max |x|), as in `native/quantize_rows.c`: the
profile `default` rounds the inputs of products with quantized weights so, on either processor. A
group whose largest magnitude is below 2^-110 is zero; one that is not finite has the scale NaN.

A word has four bytes, and a group eight words. Which element is where follows from how codes lie in
the words of a plane (`plane_layouts`):

- "nibbles", of 8 codes per word: word 2 o + p of an octet o has its elements p, p + 2, p + 4,
  p + 6.
- "twos", of 16 codes per word: word 4 b + k of a half b has its elements 2 k, 2 k + 8, 2 k + 1,
  2 k + 9.

Word w of all groups comes before word w + 1, so that threads read side by side. In the order "twos"
a thread takes two groups: words and scales of the even ones come before those of the odd ones.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch

Order = Literal["nibbles", "twos"]
GROUP = 32
_GROUPS = 4


@dataclass(frozen=True, slots=True)
class ByteVector:
    """Place for a vector of n elements, n a multiple of 64."""

    words: Tensor
    """int32 [n / 4]."""
    scales: Tensor
    """f32 [n / 32]."""
    order: Order

    @property
    def columns(self) -> int:
        """Elements of the vector."""
        return GROUP * self.scales.numel()


def empty_bytes(columns: int, order: Order, device: torch.device | str) -> ByteVector:
    """Place for a vector.

    Raises:
        ShapeError: if `columns` is no multiple of 64.
    """
    if columns <= 0 or columns % (2 * GROUP):
        raise ShapeError(f"a vector of bytes has pairs of {GROUP} columns, found {columns}")
    words = torch.empty(columns // 4, dtype=torch.int32, device=device)
    scales = torch.empty(columns // GROUP, dtype=torch.float32, device=device)
    return ByteVector(words, scales, order)


def to_bytes(out: ByteVector, x: Tensor) -> None:
    """Round a vector f32 [n] or [1, n] to bytes.

    Raises:
        ShapeError: if the sizes differ or x is not contiguous float32.
    """
    if x.numel() != out.columns or x.dtype != torch.float32 or not x.is_contiguous():
        raise ShapeError(f"to_bytes: x {list(x.shape)} {x.dtype} for {out.columns} columns")
    groups = out.scales.numel()
    launch(
        _to_bytes_kernel,
        (-(-groups // _GROUPS),),
        out.words,
        out.scales,
        x,
        groups,
        ORDER=out.order,
        BG=_GROUPS,
        num_warps=1,
    )


@triton.jit
def _to_bytes_kernel(words_ptr, scales_ptr, x_ptr, groups, ORDER: tl.constexpr, BG: tl.constexpr):
    o_g = tl.program_id(0) * BG + tl.arange(0, BG)
    m_g = o_g < groups
    column = o_g[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + column, mask=m_g[:, None], other=0.0)
    store_bytes(words_ptr, scales_ptr, x, o_g, m_g, groups, ORDER, BG)


@triton.jit
def store_bytes(words_ptr, scales_ptr, x, o_g, m_g, groups, ORDER: tl.constexpr, BG: tl.constexpr):
    """Round the groups o_g [BG] of a vector, x f32 [BG, 32], and store those of the mask."""
    largest = tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)  # NaN above all numbers
    is_finite = largest < 0x7F800000
    is_used = is_finite & (largest >= (17 << 23))
    size = tl.where(is_used, largest, 0x3F800000).to(tl.float32, bitcast=True)
    scale = tl.where(is_used, tl.div_rn(size, 127.0), tl.where(is_finite, 0.0, float("nan")))
    factor = tl.div_rn(127.0, size)
    # The bound keeps product and sum from becoming one instruction, which would not round the
    # product as the CPU does; it changes nothing.
    x = tl.where(is_used[:, None], tl.minimum(x * factor[:, None], 128.0), 0.0)
    # Adding 1.5 2^23 rounds to even and leaves the number in the lowest bits.
    q = (x + 12582912.0).to(tl.uint32, bitcast=True) & 255
    if ORDER == "nibbles":
        q = tl.permute(tl.reshape(q, (BG, 4, 4, 2)), (0, 1, 3, 2))
        at = words_ptr + o_g[:, None]
        step, place = groups, o_g
    else:
        step = groups // 2
        odd = o_g & 1
        at = words_ptr + (odd * 8 * step + o_g // 2)[:, None]
        place = odd * step + o_g // 2
        q = tl.reshape(tl.permute(tl.reshape(q, (BG, 2, 2, 4, 2)), (0, 1, 3, 4, 2)), (BG, 2, 4, 4))
    shift = tl.arange(0, 4) * 8
    words = tl.reshape(tl.sum(q << shift[None, None, None, :].to(tl.uint32), 3), (BG, 8))
    at += tl.arange(0, 8)[None, :] * step
    tl.store(at, words.to(tl.int32, bitcast=True), mask=m_g[:, None])
    tl.store(scales_ptr + place, scale, mask=m_g)

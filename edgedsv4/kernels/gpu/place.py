"""Where a decoded token stands: its position, and the rotations that follow from it."""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch, power_of_two


def place(
    position: Tensor,
    bad: Tensor,
    cos: Tensor,
    sin: Tensor,
    *,
    given: Tensor,
    ratios: Tensor,
    frequencies: Tensor,
) -> None:
    """Follow the host's word; one launch.

    Args:
        position: int32 [1] out, of the token.
        bad: int32 [1] out, 0.
        cos: f32 [n, r / 2] out; row i belongs to the first position of the token's window of
            `ratios[i]` tokens.
        sin: likewise.
        given: int64 [2], token id and position.
        ratios: int64 [n], at least 1.
        frequencies: f32 [n, r / 2].

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    count, width = frequencies.shape
    tables = (cos, sin, frequencies)
    shapes = [tuple(t.shape) for t in (*tables, position, bad, given, ratios)]
    if shapes != [(count, width)] * 3 + [(1,), (1,), (2,), (count,)]:
        raise ShapeError(f"place: cos, sin, frequencies and the rest are {shapes}")
    if not all(t.is_contiguous() for t in tables) or given.dtype != torch.int64:
        raise ShapeError("place: tables must be contiguous, token id and position int64")
    arguments = (position, bad, cos, sin, given, ratios, frequencies, width)
    launch(_place_kernel, (count,), *arguments, BW=power_of_two(width), num_warps=1)


@triton.jit
def _place_kernel(
    position_ptr,
    bad_ptr,
    cos_ptr,
    sin_ptr,
    given_ptr,
    ratios_ptr,
    frequencies_ptr,
    width,
    BW: tl.constexpr,
):
    """Program: one row of the tables."""
    i = tl.program_id(0)
    o_w = tl.arange(0, BW)
    m_w = o_w < width
    position = tl.load(given_ptr + 1)
    ratio = tl.load(ratios_ptr + i)
    frequency = tl.load(frequencies_ptr + i * width + o_w, mask=m_w, other=0.0)  # [BW]
    # The angle is the float32 product: that rounding is part of the model.
    angle = (position // ratio * ratio).to(tl.float32) * frequency
    cos, sin = _cos_sin(angle)
    tl.store(cos_ptr + i * width + o_w, cos, mask=m_w)
    tl.store(sin_ptr + i * width + o_w, sin, mask=m_w)
    if i == 0:
        tl.store(position_ptr, position.to(tl.int32))
        tl.store(bad_ptr, 0)


@triton.jit
def _cos_sin(angle):
    """Cosine and sine of angles from 0 on, to the rounding of float32.

    Those of the compilers keep an array in memory for large angles, which long contexts have. Here
    the quarter turns are taken off in float64, and Taylor's series do the rest, below pi / 4.
    """
    x = angle.to(tl.float64)
    turns = tl.floor(x * 0.6366197723675814 + 0.5)
    r = x - turns * 1.5707963267948966
    z = r * r
    sin, cos = 1.0 - z / 156.0, 1.0 - z / 132.0
    for n in tl.static_range(10, 0, -2):
        sin = 1.0 - z / (n * (n + 1)) * sin
        cos = 1.0 - z / ((n - 1) * n) * cos
    sin *= r
    quarter = turns.to(tl.int64) & 3
    is_odd = (quarter & 1) == 1
    c, s = tl.where(is_odd, sin, cos), tl.where(is_odd, cos, sin)
    c = tl.where((quarter == 1) | (quarter == 2), -c, c)
    s = tl.where(quarter >= 2, -s, s)
    return c.to(tl.float32), s.to(tl.float32)

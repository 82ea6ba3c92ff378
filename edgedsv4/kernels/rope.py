"""Rotary position embedding of the last r dims of a head, in interleaved pairs (2i, 2i + 1).

(a, b) -> (a cos - b sin, a sin + b cos) with angle = float32(position) * f_i rounded to float32.
The frequencies are f_i = base^(-2i/r); YaRN divides the slow ones by `factor`, leaves the fast ones
and blends linearly between. There is no magnitude factor on cos and sin. Source: DeepSeek-V4
reference code; YaRN (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend, RopeScaling


@dataclass(frozen=True, slots=True)
class RopeTable:
    """cos and sin of some positions, each [T, r / 2], float32 or float64."""

    cos: Tensor
    sin: Tensor


def rope_frequencies(rope_dim: int, base: float, scaling: RopeScaling | None) -> Tensor:
    """Frequencies in radians per position.

    Args:
        rope_dim: r, rotated dims, even.
        base: theta.
        scaling: YaRN parameters, or None for unscaled frequencies.

    Returns:
        [r / 2] float32.
    """
    exponents = torch.arange(0, rope_dim, 2, dtype=torch.float32) / rope_dim
    frequencies = 1.0 / (base**exponents)
    if scaling is None:
        return frequencies
    low, high = _yarn_range(rope_dim, base, scaling)
    pairs = torch.arange(rope_dim // 2, dtype=torch.float32)
    ramp = ((pairs - low) / (high - low)).clamp(0, 1)
    return frequencies / scaling.factor * ramp + frequencies * (1 - ramp)


def _yarn_range(rope_dim: int, base: float, scaling: RopeScaling) -> tuple[float, float]:
    """First pair that is blended and first pair that is fully divided."""

    def pair_of(rotations: float) -> float:
        wavelengths = scaling.original_context / (rotations * 2 * math.pi)
        return rope_dim * math.log(wavelengths) / (2 * math.log(base))

    low = max(math.floor(pair_of(scaling.beta_fast)), 0)
    high = min(math.ceil(pair_of(scaling.beta_slow)), rope_dim - 1)
    return low, high if high != low else low + 0.001


def rope_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> RopeTable:
    """Cos and sin at `positions`.

    The angle is rounded to float32 in every dtype, since that rounding (up to 0.03 rad at a million
    positions) is part of the trained model; cos and sin of that angle are then accurate.

    Args:
        positions: [T] int64, absolute.
        frequencies: [r / 2] float32.
        dtype: compute dtype of the caller; the table is its accumulator dtype.
    """
    angles = positions.to(torch.float32)[:, None] * frequencies
    wide = angles.to(accumulator(dtype))
    return RopeTable(torch.cos(wide), torch.sin(wide))


def apply_rope(
    x: Tensor, table: RopeTable, *, inverse: bool = False, backend: Backend = "auto"
) -> Tensor:
    """Rotate the last r dims of every head.

    Args:
        x: [T, ..., n] with n >= r, any float dtype.
        table: cos and sin of the T positions.
        inverse: rotate back by the same angle.
        backend: which implementation; `auto` takes the best one.

    Returns:
        A new tensor like `x`.

    Raises:
        ShapeError: if T or r disagree.
    """
    chosen = resolve_backend(backend, available_on(x, table.cos, table.sin), operation="rope")
    rope_dim = 2 * table.cos.shape[-1]
    if x.shape[0] != table.cos.shape[0] or x.shape[-1] < rope_dim:
        raise ShapeError(
            f"rope: x is {list(x.shape)}, expected [{table.cos.shape[0]}, ..., >= {rope_dim}]"
        )
    if chosen == "native":
        return _apply_rope_native(x, table, inverse=inverse)
    return apply_rope_reference(x, table, inverse=inverse)


def apply_rope_reference(x: Tensor, table: RopeTable, *, inverse: bool = False) -> Tensor:
    """The formula of the module docstring."""
    rope_dim = 2 * table.cos.shape[-1]
    shape = [x.shape[0], *[1] * (x.dim() - 2), rope_dim // 2]
    cos = table.cos.view(shape)
    sin = -table.sin.view(shape) if inverse else table.sin.view(shape)
    tail = x[..., x.shape[-1] - rope_dim :].to(cos.dtype)
    a, b = tail[..., 0::2], tail[..., 1::2]
    rotated = torch.stack((a * cos - b * sin, a * sin + b * cos), dim=-1).flatten(-2)
    return torch.cat((x[..., : x.shape[-1] - rope_dim], rotated.to(x.dtype)), dim=-1)


def _apply_rope_native(x: Tensor, table: RopeTable, *, inverse: bool) -> Tensor:
    lib, _ = library()
    run = run_here()
    y = x.clone(memory_format=torch.contiguous_format)
    cos, sin = table.cos.contiguous(), table.sin.contiguous()
    tokens, dim, half = x.shape[0], x.shape[-1], cos.shape[-1]
    heads = math.prod(x.shape[1:-1])
    arguments = (tokens, heads, dim, pointer(cos), pointer(sin), half, inverse)
    run.check(lib.dk_rope(run.cdata, pointer(y), *arguments))
    return y

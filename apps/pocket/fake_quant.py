"""The shipped model's roundings inside training: values are rounded, gradients pass through.

The values are those that `edgedsv4.kernels.kv_quant` stores and reads back (tests hold them
together bit for bit), so a network trained with them is stored without loss. They are computed
without codes and tables: what reads a table on a GPU waits for it.
Source: straight-through estimator (arXiv 1308.3432); formats as in the DeepSeek-V4 reference code.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.kv_quant import FP4_GROUP, FP4_MAX, FP8_GROUP, FP8_MAX

_FP4_FLOOR = FP4_MAX * 2.0**-126
_FP8_FLOOR = 1e-4


class _StraightThrough(torch.autograd.Function):
    """y = round(x), dy/dx = 1."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:  # noqa: ARG004
        """Round."""
        return rounding(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:  # noqa: ARG004
        """Hand the gradient on."""
        return gradients[0], None


def _pass_through(x: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    result: Tensor = _StraightThrough.apply(x, rounding)  # type: ignore[no-untyped-call]
    return result


# The scales go through a view of integers as floats, which the compiler need not follow: these few
# element-wise kernels are not where the time goes.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def fp4_weights(weights: Tensor) -> Tensor:
    """Round to e2m1 values with one power-of-two scale per 32 elements of a row.

    Args:
        weights: [..., columns], columns a multiple of 32.

    Returns:
        Same shape and dtype.
    """
    return _pass_through(weights, _round_fp4)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fp8_rows(rows: Tensor, rope_dim: int) -> Tensor:
    """Round key/value rows as the cache stores them: FP8 in groups of 64, rotated dims bfloat16.

    Args:
        rows: [..., d], rotated.
        rope_dim: r, last dims that are rotated.

    Returns:
        Same shape and dtype.
    """
    return _pass_through(rows, lambda x: _round_rows(x, rope_dim))


@torch.compiler.disable  # type: ignore[untyped-decorator]
def fp4_index(x: Tensor) -> Tensor:
    """Hadamard transform, then e2m1 in groups of 32: index queries and index keys.

    Args:
        x: [..., index_dim], rotated.

    Returns:
        Same shape and dtype, transformed.
    """
    return _pass_through(_transformed(x), _round_fp4)


def _transformed(x: Tensor) -> Tensor:
    """The Hadamard transform; on a GPU as one product, where seven passes over memory cost more."""
    if not x.is_cuda:
        return hadamard(x)
    return (x.float() @ _matrix(x.shape[-1], x.device)).to(x.dtype)


@cache
def _matrix(n: int, device: torch.device) -> Tensor:
    return hadamard(torch.eye(n, device=device))


def _round_fp4(x: Tensor) -> Tensor:
    """Nearest e2m1 value of every element, ties to the even code."""
    groups, scale = _scaled_groups(x.to(torch.bfloat16), FP4_GROUP, FP4_MAX, _FP4_FLOOR)
    size = groups.abs().clamp(max=FP4_MAX)
    # The codes are even multiples of their spacing where they are even, as `round` has it.
    spacing = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0))
    rounded = torch.copysign(torch.round(size / spacing) * spacing, groups)
    return (rounded * scale).flatten(-2)[..., : x.shape[-1]].to(x.dtype)


def _round_rows(rows: Tensor, rope_dim: int) -> Tensor:
    """Nearest e4m3 value of the dims that are not rotated, bfloat16 for the others."""
    nope_dim = rows.shape[-1] - rope_dim
    short = rows.to(torch.bfloat16)
    groups, scale = _scaled_groups(short[..., :nope_dim], FP8_GROUP, FP8_MAX, _FP8_FLOOR)
    rounded = groups.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).float()
    nope = (rounded * scale).flatten(-2)[..., :nope_dim]
    return torch.cat((nope.to(rows.dtype), short[..., nope_dim:].to(rows.dtype)), dim=-1)


def _scaled_groups(x: Tensor, group: int, code_max: float, floor: float) -> tuple[Tensor, Tensor]:
    """Groups of the last dim over their scale, [..., groups, group], and the scales."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[-1] % group))
    groups = padded.reshape(*x.shape[:-1], -1, group)
    ratio = groups.abs().amax(dim=-1, keepdim=True).clamp(min=floor) / code_max
    mantissa, exponent = torch.frexp(ratio)  # ratio = mantissa * 2^exponent, mantissa in [0.5, 1)
    exponent = exponent - (mantissa == 0.5).to(exponent.dtype)
    scale = ((exponent + 127).clamp(1, 254) << 23).view(torch.float32)
    return groups / scale, scale

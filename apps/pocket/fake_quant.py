"""The shipped model's roundings inside training: values are rounded, gradients pass through.

The roundings are those of `edgedsv4.kernels.kv_quant`, the same calls that store the cache at run
time and that `export` uses for the experts, so a network trained with them is stored without loss.
Source: straight-through estimator (arXiv 1308.3432); formats as in the DeepSeek-V4 reference code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)


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


# The codes go through views of one dtype as another, which the compiler need not follow: these
# few element-wise kernels are not where the time goes.
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

    def rounding(x: Tensor) -> Tensor:
        codes = quantize_kv_rows(x.reshape(-1, x.shape[-1]), rope_dim)
        return dequantize_kv_rows(*codes, rope_dim, x.dtype).view(x.shape)

    return _pass_through(rows, rounding)


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
    n = x.shape[-1]
    return (x.float() @ hadamard(torch.eye(n, device=x.device))).to(x.dtype)


def _round_fp4(x: Tensor) -> Tensor:
    codes = quantize_index_keys(x.reshape(-1, x.shape[-1]))
    return dequantize_index_keys(*codes, x.dtype).view(x.shape)

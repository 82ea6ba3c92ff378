"""Hyper-connections: how a sublayer reads from and writes to the hc residual streams.

x = the streams of one token, flattened stream by stream; mix = (fn . x) * rsqrt(mean(x^2) +
norm_eps), split in pre [hc], post [hc] and comb [hc, hc]:

    pre  = sigmoid(mix_pre * scale_0 + base_pre) + hc_eps
    post = 2 sigmoid(mix_post * scale_1 + base_post)
    comb = sinkhorn(softmax_k(mix_comb * scale_2 + base_comb) + hc_eps)

The sublayer sees sum_j pre_j X_j and its output o makes X'_k = post_k o + sum_j comb_jk X_j: the
sum runs over the first index of comb. Sinkhorn divides by column sums (over j) first, then
`iterations - 1` times by row sums and column sums, so it ends on columns; every sum gets hc_eps.
Source: DeepSeek-V4 reference code (norm after the product).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend


@dataclass(frozen=True, slots=True)
class HyperMix:
    """What one sublayer does with the streams of T tokens; accumulator dtype."""

    pre: Tensor
    """[T, hc], weights of the read."""
    post: Tensor
    """[T, hc], weights of the write."""
    comb: Tensor
    """[T, hc, hc], source stream first."""


@dataclass(frozen=True, slots=True)
class HyperConstants:
    """The scalars of the formula."""

    iterations: int
    hc_eps: float
    norm_eps: float


def hyper_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    constants: HyperConstants,
    *,
    backend: Backend = "auto",
) -> HyperMix:
    """Coefficients of one sublayer.

    Args:
        streams: [T, hc, D], any float dtype.
        fn: [(2 + hc) * hc, hc * D] float32, rows pre, post, comb (row-major).
        base: [(2 + hc) * hc] float32.
        scale: [3] float32.
        constants: Sinkhorn iterations and epsilons.
        backend: which implementation; `auto` takes the best one.

    Raises:
        ShapeError: if the parameters do not fit the streams.
    """
    resolve_backend(backend, operation="mhc")
    hc = streams.shape[1]
    _check(streams, fn, base, scale, rows=(2 + hc) * hc, scales=3)
    return hyper_mix_reference(streams, fn, base, scale, constants)


def hyper_mix_reference(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, constants: HyperConstants
) -> HyperMix:
    """The formula of the module docstring."""
    count, hc, _ = streams.shape
    mix = _normalised_product(streams, fn, constants.norm_eps)
    base, scale = base.to(mix.dtype), scale.to(mix.dtype)
    pre = torch.sigmoid(mix[:, :hc] * scale[0] + base[:hc]) + constants.hc_eps
    post = 2 * torch.sigmoid(mix[:, hc : 2 * hc] * scale[1] + base[hc : 2 * hc])
    comb = (mix[:, 2 * hc :] * scale[2] + base[2 * hc :]).view(count, hc, hc)
    return HyperMix(pre, post, _sinkhorn(comb, constants))


def _sinkhorn(logits: Tensor, constants: HyperConstants) -> Tensor:
    eps = constants.hc_eps
    comb = torch.softmax(logits, dim=-1) + eps
    comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    for _ in range(constants.iterations - 1):
        comb = comb / (comb.sum(dim=-1, keepdim=True) + eps)
        comb = comb / (comb.sum(dim=-2, keepdim=True) + eps)
    return comb


def head_mix(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    constants: HyperConstants,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Weights with which the output head reads the streams: sigmoid(mix * scale + base) + hc_eps.

    Args:
        streams: [T, hc, D], any float dtype.
        fn: [hc, hc * D] float32.
        base: [hc] float32.
        scale: [1] float32.
        constants: epsilons (iterations are not used).
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, hc], accumulator dtype.

    Raises:
        ShapeError: if the parameters do not fit the streams.
    """
    resolve_backend(backend, operation="mhc")
    _check(streams, fn, base, scale, rows=streams.shape[1], scales=1)
    mix = _normalised_product(streams, fn, constants.norm_eps)
    return torch.sigmoid(mix * scale.to(mix.dtype) + base.to(mix.dtype)) + constants.hc_eps


def read_streams(streams: Tensor, pre: Tensor) -> Tensor:
    """sum_j pre_j X_j.

    Args:
        streams: [T, hc, D].
        pre: [T, hc].

    Returns:
        [T, D], dtype of `streams`.
    """
    wide = streams.to(pre.dtype)
    return (pre[:, :, None] * wide).sum(dim=1).to(streams.dtype)


def write_streams(streams: Tensor, output: Tensor, mix: HyperMix) -> Tensor:
    """X'_k = post_k o + sum_j comb_jk X_j.

    Args:
        streams: [T, hc, D], the input of the sublayer.
        output: [T, D], what the sublayer computed.
        mix: its coefficients.

    Returns:
        [T, hc, D], dtype of `streams`.
    """
    wide = streams.to(mix.post.dtype)
    mixed = torch.matmul(mix.comb.transpose(1, 2), wide)
    return (mix.post[:, :, None] * output.to(wide.dtype)[:, None, :] + mixed).to(streams.dtype)


def _normalised_product(streams: Tensor, fn: Tensor, norm_eps: float) -> Tensor:
    x = streams.flatten(1).to(accumulator(streams.dtype))
    norm = torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + norm_eps)
    return (x @ fn.to(x.dtype).T) * norm


def _check(
    streams: Tensor, fn: Tensor, base: Tensor, scale: Tensor, *, rows: int, scales: int
) -> None:
    width = streams.shape[1] * streams.shape[2]
    expected = ((rows, width), (rows,), (scales,))
    found = (tuple(fn.shape), tuple(base.shape), tuple(scale.shape))
    if found != expected:
        raise ShapeError(f"mhc: fn, base, scale are {found}, expected {expected}")

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
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here
from edgedsv4.kernels.precision import accumulator
from edgedsv4.kernels.quant_matmul import quant_matmul
from edgedsv4.kernels.rms_norm import rms_norm_reference

if TYPE_CHECKING:
    from edgedsv4.config import Backend
    from edgedsv4.kernels.dispatch import Implementation


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
class HyperInput:
    """What a sublayer sees of T tokens, and how it will write; made by `hyper_read`."""

    x: Tensor
    """[T, D], the normalised read."""
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


def hyper_read(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    *,
    backend: Backend = "auto",
) -> HyperInput:
    """`hyper_mix`, the read and the RMS norm of what was read, in one.

    Args:
        streams: [T, hc, D], any float dtype.
        fn: [(2 + hc) * hc, hc * D] float32.
        base: [(2 + hc) * hc] float32.
        scale: [3] float32.
        norm: [D], weight of the RMS norm.
        constants: Sinkhorn iterations and epsilons; `norm_eps` is that of both norms.
        backend: which implementation; `auto` takes the best one.

    Raises:
        ShapeError: if the parameters do not fit the streams.
    """
    hc = streams.shape[1]
    available = _available(hc, streams, fn, base, scale, norm)
    chosen = resolve_backend(backend, available, operation="mhc")
    _check(streams, fn, base, scale, rows=(2 + hc) * hc, scales=3)
    if chosen == "native":
        return _hyper_read_native(streams.contiguous(), fn, base, scale, norm, constants)
    return hyper_read_reference(streams, fn, base, scale, norm, constants)


def hyper_read_reference(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
) -> HyperInput:
    """The steps one after another."""
    mix = hyper_mix_reference(streams, fn, base, scale, constants)
    x = rms_norm_reference(read_streams(streams, mix.pre), norm, constants.norm_eps)
    return HyperInput(x, mix.post, mix.comb)


def _hyper_read_native(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
) -> HyperInput:
    lib, _ = library()
    run = run_here()
    tokens, hc, n = streams.shape
    mix = quant_matmul(streams.flatten(1), fn)
    got = HyperInput(
        streams.new_empty(tokens, n),
        streams.new_empty(tokens, hc),
        streams.new_empty(tokens, hc, hc),
    )
    parameters = (base.contiguous(), scale.contiguous(), norm.contiguous())
    status = lib.dk_hyper_read(
        run.cdata,
        *map(pointer, (got.x, got.post, got.comb, streams, mix, *parameters)),
        *(tokens, n, constants.iterations, constants.hc_eps, constants.norm_eps),
    )
    run.check(status)
    return got


def hyper_head(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """`head_mix`, the read and the RMS norm of what was read, in one.

    Args:
        streams: [T, hc, D], any float dtype.
        fn: [hc, hc * D] float32.
        base: [hc] float32.
        scale: [1] float32.
        norm: [D], weight of the RMS norm.
        constants: epsilons; `norm_eps` is that of both norms.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, D], dtype of `streams`.

    Raises:
        ShapeError: if the parameters do not fit the streams.
    """
    hc = streams.shape[1]
    available = _available(hc, streams, fn, base, scale, norm)
    chosen = resolve_backend(backend, available, operation="mhc")
    _check(streams, fn, base, scale, rows=hc, scales=1)
    if chosen == "native":
        return _hyper_head_native(streams.contiguous(), fn, base, scale, norm, constants)
    pre = head_mix(streams, fn, base, scale, constants, backend="reference")
    return rms_norm_reference(read_streams(streams, pre), norm, constants.norm_eps)


def _hyper_head_native(
    streams: Tensor,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm: Tensor,
    constants: HyperConstants,
) -> Tensor:
    lib, _ = library()
    run = run_here()
    tokens, _, n = streams.shape
    mix = quant_matmul(streams.flatten(1), fn)
    x = streams.new_empty(tokens, n)
    parameters = (base.contiguous(), scale.contiguous(), norm.contiguous())
    status = lib.dk_hyper_head(
        run.cdata,
        *map(pointer, (x, streams, mix, *parameters)),
        *(tokens, n, constants.hc_eps, constants.norm_eps),
    )
    run.check(status)
    return x


def hyper_write(
    streams: Tensor, output: Tensor, post: Tensor, comb: Tensor, *, backend: Backend = "auto"
) -> Tensor:
    """`write_streams` with the coefficients of `hyper_read`.

    Args:
        streams: [T, hc, D], the input of the sublayer.
        output: [T, D], what the sublayer computed.
        post: [T, hc].
        comb: [T, hc, hc].
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, hc, D], dtype of `streams`.
    """
    available = _available(streams.shape[1], streams, output, post, comb)
    if resolve_backend(backend, available, operation="mhc") != "native":
        return write_streams(streams, output, HyperMix(post, post, comb))
    lib, _ = library()
    run = run_here()
    tokens, _, n = streams.shape
    y = streams.new_empty(streams.shape)
    inputs = [tensor.contiguous() for tensor in (streams, output, post, comb)]
    run.check(lib.dk_hyper_write(run.cdata, *map(pointer, (y, *inputs)), tokens, n))
    return y


def _available(hc: int, *tensors: Tensor) -> tuple[Implementation, ...]:
    """The C kernels are written for four streams, which is what every released model has."""
    return available_on(*tensors) if hc == 4 else ("reference",)


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

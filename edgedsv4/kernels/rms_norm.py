"""RMS norm over the last dim: y = w * (x * rsqrt(mean(x^2) + eps)).

All in float32 with one cast at the end. With `weight=None` it is the unweighted per-head norm of
the queries. Source: DeepSeek-V4 reference code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import available_on, library, pointer, run_here
from edgedsv4.kernels.precision import accumulator

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, backend: Backend = "auto") -> Tensor:
    """Normalise the last dim of `x` to unit mean square.

    Args:
        x: [..., n], any float dtype.
        weight: [n], or None for no weight.
        eps: added to the mean square, > 0.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [..., n], dtype of `x`.

    Raises:
        ShapeError: if `weight` is not [n].
    """
    chosen = resolve_backend(backend, available_on(x, weight), operation="rms_norm")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ShapeError(f"rms_norm: weight is {list(weight.shape)}, expected [{x.shape[-1]}]")
    if chosen == "native":
        return _rms_norm_native(x.contiguous(), weight, eps)
    return rms_norm_reference(x, weight, eps)


def rms_norm_reference(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """The formula of the module docstring."""
    wide = x.to(accumulator(x.dtype))
    normed = wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
    if weight is not None:
        normed = weight.to(wide.dtype) * normed
    return normed.to(x.dtype)


def _rms_norm_native(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    lib, _ = library()
    run, n = run_here(), x.shape[-1]
    weight = None if weight is None else weight.contiguous()
    y = torch.empty_like(x)
    rows = x.numel() // n if n else 0
    run.check(lib.dk_rms_norm(run.cdata, pointer(y), pointer(x), pointer(weight), rows, n, eps))
    return y

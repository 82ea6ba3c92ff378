"""Walsh-Hadamard transform, natural (Sylvester) order, scaled by n^-0.5: its own inverse.

It spreads outliers before the FP4 rounding of index queries and keys. Source: DeepSeek-V4 reference
code.
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


def hadamard(x: Tensor, *, backend: Backend = "auto") -> Tensor:
    """Transform the last dim.

    Args:
        x: [..., n], n a power of two, any float dtype.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [..., n], dtype of `x`.

    Raises:
        ShapeError: if n is not a power of two.
    """
    chosen = resolve_backend(backend, available_on(x), operation="hadamard")
    n = x.shape[-1]
    if n < 1 or n & (n - 1):
        raise ShapeError(f"hadamard: the last dim must be a power of two, found {n}")
    if chosen == "native":
        return _hadamard_native(x)
    return hadamard_reference(x)


def hadamard_reference(x: Tensor) -> Tensor:
    """log2(n) butterfly stages, then the scale."""
    n = x.shape[-1]
    wide = x.to(accumulator(x.dtype))
    half = 1
    while half < n:
        pairs = wide.reshape(*x.shape[:-1], n // (2 * half), 2, half)
        first, second = pairs.unbind(-2)
        wide = torch.stack((first + second, first - second), dim=-2).flatten(-3)
        half *= 2
    scaled: Tensor = wide * n**-0.5
    return scaled.to(x.dtype)


def _hadamard_native(x: Tensor) -> Tensor:
    lib, _ = library()
    run, n = run_here(), x.shape[-1]
    y = x.clone(memory_format=torch.contiguous_format)
    run.check(lib.dk_hadamard(run.cdata, pointer(y), x.numel() // n, n))
    return y

"""Clamped SwiGLU: silu(min(gate, limit)) * clamp(up, -limit, limit).

The clamp comes before the silu.
Source: DeepSeek-V4 reference code (current revision: routed and shared experts alike).
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


def swiglu(gate: Tensor, up: Tensor, limit: float, *, backend: Backend = "auto") -> Tensor:
    """Combine the two halves of an expert's hidden layer.

    Args:
        gate: [..., F], any float dtype.
        up: same shape.
        limit: upper bound of the gate and bound of |up|; inf for none.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [..., F], dtype of `gate`.

    Raises:
        ShapeError: if the shapes differ.
    """
    chosen = resolve_backend(backend, available_on(gate, up), operation="swiglu")
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate is {list(gate.shape)}, up is {list(up.shape)}")
    if chosen == "native":
        return _swiglu_native(gate.contiguous(), up.contiguous(), limit)
    return swiglu_reference(gate, up, limit)


def swiglu_reference(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The formula of the module docstring."""
    wide = accumulator(gate.dtype)
    clamped = gate.to(wide).clamp(max=limit)
    return (clamped * torch.sigmoid(clamped) * up.to(wide).clamp(-limit, limit)).to(gate.dtype)


def _swiglu_native(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    lib, _ = library()
    run = run_here()
    y = torch.empty_like(gate)
    arguments = (pointer(y), pointer(gate), pointer(up), gate.numel(), limit)
    run.check(lib.dk_swiglu(run.cdata, *arguments))
    return y

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
    resolve_backend(backend, operation="swiglu")
    if gate.shape != up.shape:
        raise ShapeError(f"swiglu: gate is {list(gate.shape)}, up is {list(up.shape)}")
    return swiglu_reference(gate, up, limit)


def swiglu_reference(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """The formula of the module docstring."""
    wide = accumulator(gate.dtype)
    clamped = gate.to(wide).clamp(max=limit)
    return (clamped * torch.sigmoid(clamped) * up.to(wide).clamp(-limit, limit)).to(gate.dtype)

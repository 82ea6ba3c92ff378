"""One expert: w2 . swiglu(w1 . x, w3 . x), w1 the gate, w3 the up, w2 the down projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.quant_matmul import QuantMatrix, quant_matmul
from edgedsv4.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def expert_ffn(
    x: Tensor,
    gate: QuantMatrix,
    up: QuantMatrix,
    down: QuantMatrix,
    limit: float,
    *,
    backend: Backend = "auto",
) -> Tensor:
    """Run one expert over the tokens routed to it.

    Args:
        x: [T, D], any float dtype.
        gate: w1, [F, D] as stored.
        up: w3, [F, D] as stored.
        down: w2, [D, F] as stored.
        limit: clamp of the hidden layer; inf for none.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, D], dtype of `x`, without the routing weight.
    """
    resolve_backend(backend, operation="expert_ffn")
    hidden = swiglu(quant_matmul(x, gate), quant_matmul(x, up), limit)
    return quant_matmul(hidden, down)

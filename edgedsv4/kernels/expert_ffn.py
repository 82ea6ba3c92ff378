"""One expert: w2 . swiglu(w1 . x, w3 . x), w1 the gate, w3 the up, w2 the down projection."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import (
    available_on,
    fill_matrix,
    has_native_type,
    library,
    pointer,
    run_here,
)
from edgedsv4.kernels.quant_matmul import QuantMatrix, quant_matmul
from edgedsv4.kernels.swiglu import swiglu

if TYPE_CHECKING:
    from edgedsv4.config import Backend
    from edgedsv4.kernels.dispatch import Implementation

_ALIGNMENT = 64


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

    Raises:
        ShapeError: if the matrices do not fit each other, or `x`.
    """
    width, hidden = gate.rows, gate.columns
    fits = (up.rows, up.columns, down.rows, down.columns) == (width, hidden, hidden, width)
    if not fits or x.dim() != 2 or x.shape[1] != hidden:
        raise ShapeError(
            f"expert_ffn: x {list(x.shape)}, gate [{width}, {hidden}], up [{up.rows},"
            f" {up.columns}], down [{down.rows}, {down.columns}]"
        )
    available = _available(x, (gate, up, down))
    if resolve_backend(backend, available, operation="expert_ffn") == "native" and len(x):
        return _native(x, (gate, up, down), limit)
    return expert_ffn_reference(x, gate, up, down, limit)


def expert_ffn_reference(
    x: Tensor, gate: QuantMatrix, up: QuantMatrix, down: QuantMatrix, limit: float
) -> Tensor:
    """The formula of the module docstring."""
    gated = quant_matmul(x, gate, backend="reference")
    raised = quant_matmul(x, up, backend="reference")
    return quant_matmul(
        swiglu(gated, raised, limit, backend="reference"), down, backend="reference"
    )


def _available(x: Tensor, matrices: tuple[QuantMatrix, ...]) -> tuple[Implementation, ...]:
    if all(has_native_type(matrix.block_type.name) for matrix in matrices):
        return available_on(x)
    return ("reference",)


def _native(x: Tensor, matrices: tuple[QuantMatrix, ...], limit: float) -> Tensor:
    """The whole chunk as the only slot of the only expert."""
    lib, ffi = library()
    tokens, hidden = x.shape
    rows = x.contiguous()
    records = ffi.new("dk_matrix[3]")
    for place, matrix in enumerate(matrices):
        fill_matrix(records[place], matrix)
    experts = ffi.new("dk_experts *")
    experts.matrices = records
    experts.experts = experts.k = 1
    experts.width, experts.hidden, experts.limit = matrices[0].rows, hidden, limit
    given = ffi.new("dk_input *")
    given.x, given.stride = pointer(rows), hidden
    out = torch.empty_like(rows)
    ids, weights = torch.zeros(tokens, dtype=torch.int32), torch.ones(tokens)
    nbytes = lib.dk_experts_scratch_bytes(experts, tokens)
    memory = torch.empty(nbytes + _ALIGNMENT, dtype=torch.uint8)
    scratch = ffi.cast("void *", -(-memory.data_ptr() // _ALIGNMENT) * _ALIGNMENT)
    run = run_here()
    run.check(
        lib.dk_expert_ffn(
            run.cdata, pointer(out), given, pointer(ids), pointer(weights), experts, tokens, scratch
        )
    )
    return out

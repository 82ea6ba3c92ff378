"""First half of the output projection: each group of heads through its own low-rank matrix.

u_g = wo_a[g * Ro : (g + 1) * Ro] . o_g, where o_g are the concatenated outputs of group g's
consecutive heads; the matrix is block diagonal, so it is never applied whole. Source: DeepSeek-V4
reference code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.quant_matmul import (
    Activations,
    QuantMatrix,
    dequantize,
    has_int8_form,
    multiply_rows,
    native_products_for,
    round_activations,
)

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def grouped_output(
    outputs: Tensor,
    wo_a: QuantMatrix,
    groups: int,
    *,
    backend: Backend = "auto",
    activations: Activations = "f32",
) -> Tensor:
    """Project every group.

    Args:
        outputs: [T, H, d], attention outputs, heads in order.
        wo_a: [G * Ro, (H / G) * d] as stored.
        groups: G.
        backend: which implementation; `auto` takes the best one.
        activations: as in `quant_matmul`.

    Returns:
        [T, G * Ro], dtype of `outputs`.

    Raises:
        ShapeError: if the matrix does not fit the groups.
    """
    available = native_products_for(outputs, wo_a)
    chosen = resolve_backend(backend, available, operation="grouped_output")
    count = outputs.shape[0]
    width = outputs.shape[1] * outputs.shape[2]
    if width != groups * wo_a.columns or wo_a.rows % groups:
        raise ShapeError(
            f"grouped_output: outputs {list(outputs.shape)} in {groups} groups,"
            f" wo_a [{wo_a.rows}, {wo_a.columns}]"
        )
    rank = wo_a.rows // groups
    is_int8 = activations == "int8" and has_int8_form(wo_a)
    grouped = outputs.reshape(count, groups, wo_a.columns)
    if chosen == "native":
        ranges = [(g * rank, rank) for g in range(groups)]
        return multiply_rows(list(grouped.unbind(1)), wo_a, ranges, is_int8=is_int8)
    return grouped_output_reference(round_activations(grouped) if is_int8 else grouped, wo_a)


def grouped_output_reference(grouped: Tensor, wo_a: QuantMatrix) -> Tensor:
    """The formula of the module docstring, for outputs [T, G, (H / G) * d]."""
    groups = grouped.shape[1]
    rank = wo_a.rows // groups
    parts = [
        grouped[:, g] @ dequantize(wo_a, grouped.dtype, rows=slice(g * rank, (g + 1) * rank)).T
        for g in range(groups)
    ]
    return torch.cat(parts, dim=-1)

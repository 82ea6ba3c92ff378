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
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

if TYPE_CHECKING:
    from edgedsv4.config import Backend


def grouped_output(
    outputs: Tensor, wo_a: QuantMatrix, groups: int, *, backend: Backend = "auto"
) -> Tensor:
    """Project every group.

    Args:
        outputs: [T, H, d], attention outputs, heads in order.
        wo_a: [G * Ro, (H / G) * d] as stored.
        groups: G.
        backend: which implementation; `auto` takes the best one.

    Returns:
        [T, G * Ro], dtype of `outputs`.

    Raises:
        ShapeError: if the matrix does not fit the groups.
    """
    resolve_backend(backend, operation="grouped_output")
    count = outputs.shape[0]
    width = outputs.shape[1] * outputs.shape[2]
    if width != groups * wo_a.columns or wo_a.rows % groups:
        raise ShapeError(
            f"grouped_output: outputs {list(outputs.shape)} in {groups} groups,"
            f" wo_a [{wo_a.rows}, {wo_a.columns}]"
        )
    grouped = outputs.reshape(count, groups, wo_a.columns)
    rank = wo_a.rows // groups
    parts = [
        grouped[:, g] @ dequantize(wo_a, outputs.dtype, rows=slice(g * rank, (g + 1) * rank)).T
        for g in range(groups)
    ]
    return torch.cat(parts, dim=-1)

"""Products of tiles with a vector against the decoded matrix."""

# A kernel has no annotations.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE
from weights_of_types import random_weight

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.decode_dot import dot_parts, dot_tile
from edgedsv4.kernels.gpu.planes import device_matrix, plane_arguments
from edgedsv4.kernels.quant_matmul import dequantize


@triton.jit
def _product(
    y_ptr,
    x_ptr,
    p0,
    p1,
    p2,
    p3,
    N,
    K,
    TYPE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PARTS: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """All rows in one program."""
    row = tl.arange(0, BN).to(tl.int64)
    o_column = tl.arange(0, BK)
    acc = tl.zeros((BN, PARTS), tl.float32)
    for k0 in range(0, K, BK):
        x = tl.load(x_ptr + k0 + o_column, mask=k0 + o_column < K, other=0.0)
        acc = dot_tile(acc, p0, p1, p2, p3, row, row < N, k0, K, x, TYPE, BK, SCALE_COLS)
    tl.store(y_ptr + row, tl.sum(acc, 1), mask=row < N)


@pytest.mark.parametrize("name", ["Q4_0", "Q4_K", "MXFP4", "Q2_K", "IQ2_XXS", "Q8_0", "FP8_E4M3"])
def test_products_equal_those_of_the_decoded_matrix(name: str) -> None:
    cols = 768 if BLOCK_TYPES[name].block_elements == 256 else 544
    weight = random_weight(name, 3, cols, is_finite=True)
    x = torch.randn(cols, generator=torch.Generator().manual_seed(3))
    y = torch.full((4,), torch.nan, device=DEVICE)
    matrix = device_matrix(weight, DEVICE)
    _product[(1,)](
        y,
        x.to(DEVICE),
        *plane_arguments(matrix),
        matrix.rows,
        matrix.cols,
        TYPE=name,
        BN=4,
        BK=512,
        PARTS=dot_parts(name, 512),
        SCALE_COLS=matrix.scale_cols,
    )
    expected = dequantize(weight, torch.float64) @ x.double()
    assert y[3].isnan()
    error = (y[:3].cpu() - expected).norm() / expected.norm()
    assert error < 1e-5

"""Decoded tiles against the decoders of the reference, bit for bit."""

# A kernel has no annotations.
# mypy: disable-error-code="untyped-decorator,no-untyped-def"

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE
from weights_of_types import random_weight

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.decode import decode_tile
from edgedsv4.kernels.gpu.planes import SUPPORTED, DeviceMatrix, device_matrix, plane_arguments
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize


@triton.jit
def _decode_rows(
    out_ptr,
    p0,
    p1,
    p2,
    p3,
    row0,
    N,
    K,
    TYPE: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """out f32 [BN, K rounded up to BK]: rows row0 .. row0 + BN - 1."""
    k0 = tl.program_id(0) * BK
    i_row = row0 + tl.arange(0, BN).to(tl.int64)
    w = decode_tile(p0, p1, p2, p3, i_row, i_row < N, k0, K, TYPE, BK, SCALE_COLS)
    width = tl.num_programs(0) * BK
    column = k0 + tl.arange(0, BK)
    tl.store(out_ptr + tl.arange(0, BN)[:, None] * width + column[None, :], w)


@triton.jit
def _decode_whole(
    out_ptr,
    p0,
    p1,
    p2,
    p3,
    K: tl.constexpr,
    TYPE: tl.constexpr,
    BN: tl.constexpr,
    SCALE_COLS: tl.constexpr,
):
    """out f32 [BN, K]: rows 0 .. BN - 1, K a power of two, without a mask."""
    i_row = tl.arange(0, BN).to(tl.int64)
    w = decode_tile(p0, p1, p2, p3, i_row, None, 0, K, TYPE, K, SCALE_COLS)
    tl.store(out_ptr + tl.arange(0, BN)[:, None] * K + tl.arange(0, K)[None, :], w)


def decoded(matrix: DeviceMatrix, row0: int, bn: int, bk: int) -> Tensor:
    """Rows row0 .. of a matrix by `decode_tile`; the padding is returned too."""
    steps = -(-matrix.cols // bk)
    out = torch.full((bn, steps * bk), torch.nan, device=DEVICE)
    arguments = (*plane_arguments(matrix), row0, matrix.rows, matrix.cols)
    _decode_rows[(steps,)](
        out, *arguments, TYPE=matrix.type, BN=bn, BK=bk, SCALE_COLS=matrix.scale_cols
    )
    return out.cpu()


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_values_equal_the_reference(name: str) -> None:
    cols = 768 if BLOCK_TYPES[name].block_elements == 256 else 320
    bk = 256 if BLOCK_TYPES[name].block_elements == 256 else 64
    weight = random_weight(name, 5, cols)
    out = decoded(device_matrix(weight, DEVICE), 2, 4, bk)
    expected = torch.zeros_like(out)
    expected[:3, :cols] = dequantize(weight)[2:]
    assert_same(out, expected)


def assert_same(out: Tensor, expected: Tensor) -> None:
    """Equal numbers, and NaN in the same places."""
    assert torch.equal(out.isnan(), expected.isnan())
    assert torch.equal(out.nan_to_num(7.0), expected.nan_to_num(7.0))


def test_all_values_of_codes_and_scales() -> None:
    """Every 4-bit float with every scale, and every 8-bit float."""
    kind = BLOCK_TYPES["FP8_E4M3"]
    data = torch.arange(256, dtype=torch.uint8).repeat(2, 1)
    scale = torch.tensor([[0, 127]], dtype=torch.uint8)
    weight = QuantMatrix(kind, 2, 256, data, scale)
    assert_same(decoded(device_matrix(weight, DEVICE), 0, 2, 256), dequantize(weight))


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_a_whole_tile_needs_no_mask(name: str) -> None:
    weight = random_weight(name, 2, 256)
    matrix = device_matrix(weight, DEVICE)
    out = torch.full((2, 256), torch.nan, device=DEVICE)
    arguments = plane_arguments(matrix)
    _decode_whole[(1,)](out, *arguments, K=256, TYPE=name, BN=2, SCALE_COLS=matrix.scale_cols)
    assert_same(out.cpu(), dequantize(weight))

"""Rows of stored matrices as floats."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE
from weights_of_types import random_weight

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.gather_rows import dequantize, embed_streams
from edgedsv4.kernels.gpu.planes import device_matrix
from edgedsv4.kernels.quant_matmul import dequantize as dequantize_reference


@pytest.mark.parametrize("name", ["Q8_0", "BF16", "Q4_K", "FP8_E4M3"])
def test_every_stream_gets_the_row_of_its_token(name: str) -> None:
    weight = random_weight(name, 11, 512)
    ids = torch.tensor([10, 0, 3], device=DEVICE)
    streams = torch.full((3, 4, 512), torch.nan, device=DEVICE)
    embed_streams(streams, ids, device_matrix(weight, DEVICE))
    rows = dequantize_reference(weight)[ids.cpu()].nan_to_num(7.0)
    assert torch.equal(streams.cpu().nan_to_num(7.0), rows[:, None].expand(-1, 4, -1))


def test_a_token_outside_of_the_matrix_gives_nan() -> None:
    weight = random_weight("Q8_0", 5, 96)
    streams = torch.zeros(2, 1, 96, device=DEVICE)
    embed_streams(streams, torch.tensor([5, -1], device=DEVICE), device_matrix(weight, DEVICE))
    assert streams.isnan().all()


@pytest.mark.parametrize("name", ["Q8_0", "F32", "IQ2_XXS", "MXFP4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_block_of_rows_is_dequantized(name: str, dtype: torch.dtype) -> None:
    weight = random_weight(name, 21, 256)
    out = torch.full((18, 256), torch.nan, dtype=dtype, device=DEVICE)
    dequantize(out, device_matrix(weight, DEVICE), 2, 18)
    assert torch.equal(out.cpu(), dequantize_reference(weight)[2:20].to(dtype))


def test_rows_outside_of_the_matrix_are_refused() -> None:
    matrix = device_matrix(random_weight("Q8_0", 5, 64), DEVICE)
    with pytest.raises(ShapeError, match="rows 3 to 6"):
        dequantize(torch.empty(3, 64, device=DEVICE), matrix, 3, 3)

"""The grouped output projection is a block-diagonal matrix."""

from __future__ import annotations

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.grouped_output import grouped_output
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, round_activations
from edgedsv4.kernels.quantize import encode_blocks


def float_matrix(rows: int, columns: int) -> QuantMatrix:
    numbers = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    return QuantMatrix(BLOCK_TYPES["F32"], rows, columns, numbers)


def block_diagonal(matrix: QuantMatrix, groups: int) -> torch.Tensor:
    blocks = dequantize(matrix, torch.float64).chunk(groups)
    return torch.block_diag(*blocks)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    ("heads", "dim", "groups", "rank"), [(1, 3, 1, 1), (6, 5, 3, 7), (4, 8, 2, 5)]
)
def test_equals_the_block_diagonal_product(
    heads: int, dim: int, groups: int, rank: int, dtype: torch.dtype
) -> None:
    matrix = float_matrix(groups * rank, heads // groups * dim)
    outputs = torch.randn(9, heads, dim, generator=torch.Generator().manual_seed(1)).to(dtype)
    weights = block_diagonal(matrix, groups)
    if dtype == torch.bfloat16:
        weights = weights.to(dtype).double()
    for backend in ("reference", "native") if dtype == torch.float32 else ("reference",):
        got = grouped_output(outputs, matrix, groups, backend=backend)
        assert_close(backend, got, outputs.double().flatten(1) @ weights.T)


@pytest.mark.parametrize("tokens", [1, 3, 20])
def test_int8_activations_are_the_same_for_all_backends(tokens: int) -> None:
    numbers = torch.randn(3 * 10, 64, generator=torch.Generator().manual_seed(4))
    data = encode_blocks(numbers.view(-1, 32), BLOCK_TYPES["Q8_0"]).view(30, -1)
    matrix = QuantMatrix(BLOCK_TYPES["Q8_0"], 30, 64, data)
    outputs = torch.randn(tokens, 6, 32, generator=torch.Generator().manual_seed(5))
    rounded = round_activations(outputs.double())
    reference = rounded.flatten(1) @ block_diagonal(matrix, 3).T
    for backend in ("reference", "native"):
        got = grouped_output(outputs, matrix, 3, backend=backend, activations="int8")
        assert_close(backend, got, reference)


def test_scales_shared_by_rows_of_two_groups_are_applied() -> None:
    """A 128-row FP8 scale block covers both groups when a group has 64 rows."""
    codes = torch.randint(0, 120, (128, 128), generator=torch.Generator().manual_seed(2))
    matrix = QuantMatrix(
        BLOCK_TYPES["FP8_E4M3"],
        128,
        128,
        codes.to(torch.uint8),
        torch.tensor([[125]], dtype=torch.uint8),
    )
    outputs = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    got = grouped_output(outputs, matrix, 2)
    assert_close("projected", got, outputs.flatten(1) @ block_diagonal(matrix, 2).T)


def test_no_tokens_give_no_rows() -> None:
    assert grouped_output(torch.empty(0, 4, 8), float_matrix(6, 16), 2).shape == (0, 6)


def test_a_matrix_that_does_not_fit_the_groups_is_refused() -> None:
    with pytest.raises(ShapeError, match="grouped_output"):
        grouped_output(torch.ones(2, 4, 8), float_matrix(6, 16), 3)

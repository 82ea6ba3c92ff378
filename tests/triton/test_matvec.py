"""Products of a few tokens with stored matrices against products with the decoded matrices."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import relative_error
from stored_matrices import stored_matrix
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.planes import SUPPORTED, device_matrix
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

F32_LIMIT = 1e-5


def _products(matrices: list[QuantMatrix], tokens: int, groups: int = 1) -> None:
    """Compare one launch with float64."""
    generator = torch.Generator().manual_seed(7)
    columns = matrices[0].columns
    x = torch.randn(tokens, groups * columns, generator=generator)
    y = torch.full((tokens, sum(m.rows for m in matrices)), math.nan, device=DEVICE)
    matvec(y, x.to(DEVICE), [device_matrix(m, DEVICE) for m in matrices], groups)
    parts = [dequantize(m, torch.float32).double() for m in matrices]
    wide = x.double()
    if groups == 1:
        expected = torch.cat([wide @ part.T for part in parts], dim=1)
    else:
        blocks = zip(wide.chunk(groups, 1), parts[0].chunk(groups), strict=True)
        expected = torch.cat([piece @ part.T for piece, part in blocks], dim=1)
    assert relative_error(y, expected) < F32_LIMIT


@pytest.mark.parametrize("name", sorted(SUPPORTED - {"FP8_E4M3", "NVFP4"}))
def test_product_of_every_type(name: str) -> None:
    _products([stored_matrix(name, 5, 512, 1)], tokens=1)


@pytest.mark.parametrize("columns", [32, 96, 1024, 1120, 4128])
def test_product_of_any_width(columns: int) -> None:
    _products([stored_matrix("Q8_0", 3, columns, 2)], tokens=1)


@pytest.mark.parametrize("columns", [1, 18, 130])
def test_product_of_widths_that_are_no_multiple_of_16(columns: int) -> None:
    _products([stored_matrix("BF16", 3, columns, 3)], tokens=1)


@pytest.mark.parametrize("tokens", [2, 3, 8])
@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_product_of_several_tokens(name: str, tokens: int) -> None:
    if name in SUPPORTED:
        _products([stored_matrix(name, 3, 64, 4)], tokens=tokens)


def test_matrices_of_several_types_in_one_launch() -> None:
    names = ("Q8_0", "F32", "BF16", "F16")
    _products([stored_matrix(n, 3 + i, 64, i) for i, n in enumerate(names)], tokens=2)


@pytest.mark.parametrize(("rows", "groups"), [(8, 4), (6, 2)])
def test_each_group_of_rows_reads_its_own_columns(rows: int, groups: int) -> None:
    _products([stored_matrix("Q8_0", rows, 64, 5)], tokens=2, groups=groups)


@pytest.mark.parametrize("columns", [32, 96, 1120])
def test_product_of_one_token_on_tensor_cores(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgedsv4.kernels.gpu.matvec.GROUPED_Q8_0_ROWS", 0)
    _products([stored_matrix("Q8_0", 19, columns, 8), stored_matrix("F32", 3, columns, 9)], 1)


@pytest.mark.parametrize("name", ["Q2_K", "Q4_K", "IQ2_XXS"])
def test_product_with_blocks_that_fill_no_step(name: str) -> None:
    _products([stored_matrix(name, 17, 256, 10)], tokens=1)


@pytest.mark.parametrize(("block", "tokens"), [(2, 1), (4, 1), (4, 2), (8, 1)])
def test_more_rows_per_program(block: int, tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, rows in (("_ONE_ROW", 2), ("_TWO_ROWS", 4), ("_FOUR_ROWS", 8)):
        limit = 0 if rows <= block else 1 << 30
        monkeypatch.setattr(f"edgedsv4.kernels.gpu.matvec.{name}", limit)
    _products([stored_matrix("Q8_0", 19, 256, 6)], tokens)


@pytest.mark.parametrize("rows", [517, 1030, 4100])
def test_many_rows(rows: int) -> None:
    if DEVICE == "cpu":
        pytest.skip("hundreds of programs")
    _products([stored_matrix("Q8_0", rows, 4096, 6)], tokens=1)


def test_shapes_that_do_not_fit_are_refused() -> None:
    matrix = device_matrix(stored_matrix("Q8_0", 4, 64, 0), DEVICE)
    x = torch.zeros(1, 64, device=DEVICE)
    for shape, count, groups in (((1, 5), 1, 1), ((2, 4), 1, 1), ((1, 4), 1, 2), ((1, 20), 5, 1)):
        with pytest.raises(ShapeError):
            matvec(torch.zeros(shape, device=DEVICE), x, [matrix] * count, groups)

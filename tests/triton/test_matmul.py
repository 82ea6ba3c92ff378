"""Products of a chunk against float64, fused and through decoded rows."""

from __future__ import annotations

import math

import pytest
import torch
from matrix_samples import stored_matrix
from numeric import assert_close
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu import matmul as matmul_module
from edgedsv4.kernels.gpu.matmul import matmul, matmul_scratch_bytes
from edgedsv4.kernels.gpu.planes import device_matrix
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize


def _rounded(values: Tensor, precision: str) -> Tensor:
    return values.bfloat16().double() if precision == "bf16" else values.double()


def _reference(x: Tensor, weight: QuantMatrix, groups: int, precision: str) -> Tensor:
    """In float64, on operands rounded as the product rounds them."""
    w = _rounded(dequantize(weight), precision).unflatten(0, (groups, -1))
    grouped = _rounded(x, precision).unflatten(1, (groups, -1))
    return torch.einsum("tgk,grk->tgr", grouped, w).flatten(1)


def _run(x: Tensor, weight: QuantMatrix, groups: int, precision: str, dtype: torch.dtype) -> Tensor:
    """The product, into rows that lie apart and are poisoned."""
    matrix = device_matrix(weight, DEVICE)
    options = {"groups": groups, "precise": precision == "precise", "wide": precision == "wide"}
    device = torch.device(DEVICE)
    nbytes = matmul_scratch_bytes(len(x), matrix, device, **options)
    scratch = torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device)
    y = torch.full((len(x), weight.rows + 16), math.nan, dtype=dtype, device=device)
    matmul(y[:, : weight.rows], x.to(device), matrix, scratch=scratch, **options)
    assert y[:, weight.rows :].isnan().all()
    return y[:, : weight.rows].cpu()


def _x(tokens: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(tokens * columns)
    return torch.randn(tokens, columns, generator=generator).to(dtype)


CASES = {
    "two_tokens": (2, 64, 64, 1, "Q8_0"),
    "odd_rows": (3, 70, 96, 1, "Q8_0"),
    "odd_columns": (17, 33, 100, 1, "BF16"),
    "split_columns": (5, 48, 1024, 1, "F16"),
    "groups": (4, 2 * 24, 64, 2, "Q8_0"),
    "floats": (2, 16, 80, 1, "F32"),
    "blocks_of_256": (2, 20, 512, 1, "Q4_K"),
}


@pytest.mark.parametrize("precision", ["bf16", "wide", "precise"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "decoded"])
def test_product(
    monkeypatch: pytest.MonkeyPatch, case: str, precision: str, is_fused: bool
) -> None:
    tokens, rows, columns, groups, name = CASES[case]
    monkeypatch.setattr(matmul_module, "FUSED_TOKENS", 128 if is_fused else 0)
    x, weight = _x(tokens, groups * columns), stored_matrix(name, rows, columns, 3)
    got = _run(x, weight, groups, precision, torch.float32)
    assert_close(case, got, _reference(x, weight, groups, precision))


@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "decoded"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_bf16_on_both_sides(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, is_fused: bool
) -> None:
    monkeypatch.setattr(matmul_module, "FUSED_TOKENS", 128 if is_fused else 0)
    x, weight = _x(4, 96, torch.bfloat16), stored_matrix("Q8_0", 40, 96, 3)
    got = _run(x, weight, 1, "bf16", dtype)
    assert_close("bf16 input", got, _reference(x, weight, 1, "bf16"))


@pytest.mark.parametrize("groups", [1, 4])
def test_weights_in_pieces(monkeypatch: pytest.MonkeyPatch, groups: int) -> None:
    monkeypatch.setattr(matmul_module, "FUSED_TOKENS", 0)
    for name in ("_CHUNK_BYTES", "_SHORT_CHUNK_BYTES"):
        monkeypatch.setattr(matmul_module, name, 2 * 64 * 24)
    x, weight = _x(3, groups * 64), stored_matrix("Q8_0", 56, 64, 3)
    got = _run(x, weight, groups, "bf16", torch.float32)
    assert_close("pieces", got, _reference(x, weight, groups, "bf16"))


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("is_fused", [True, False], ids=["fused", "decoded"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_bad_numbers_show(monkeypatch: pytest.MonkeyPatch, bad: float, is_fused: bool) -> None:
    monkeypatch.setattr(matmul_module, "FUSED_TOKENS", 128 if is_fused else 0)
    x = _x(3, 64)
    x[1, 5] = bad
    got = _run(x, stored_matrix("Q8_0", 16, 64, 3), 1, "bf16", torch.float32)
    assert not got[1].isfinite().any()
    assert got[[0, 2]].isfinite().all()


def test_nothing_to_do() -> None:
    matrix = device_matrix(stored_matrix("Q8_0", 16, 64, 3), DEVICE)
    matmul(torch.empty(0, 16, device=DEVICE), torch.empty(0, 64, device=DEVICE), matrix)


def test_refuses_what_does_not_fit() -> None:
    matrix = device_matrix(stored_matrix("Q8_0", 16, 64, 3), DEVICE)
    y, x = torch.empty(2, 16, device=DEVICE), torch.empty(2, 64, device=DEVICE)
    with pytest.raises(ShapeError, match="groups"):
        matmul(y, x, matrix, groups=2)
    with pytest.raises(ShapeError, match="groups"):
        matmul(y, torch.empty(2, 96, device=DEVICE), matrix)


def test_refuses_little_scratch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul_module, "FUSED_TOKENS", 0)
    matrix = device_matrix(stored_matrix("Q8_0", 16, 64, 3), DEVICE)
    y, x = torch.empty(2, 16, device=DEVICE), torch.empty(2, 64, device=DEVICE)
    with pytest.raises(ShapeError, match="scratch"):
        matmul(y, x, matrix, scratch=torch.empty(64, dtype=torch.uint8, device=DEVICE))

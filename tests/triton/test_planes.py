"""Matrices on the device: loading, banks, sizes, random contents."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE
from weights_of_types import random_weight

from edgedsv4.errors import ShapeError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.gpu import planes
from edgedsv4.kernels.gpu.gather_rows import dequantize
from edgedsv4.kernels.gpu.planes import (
    SUPPORTED,
    DeviceMatrix,
    device_matrix,
    empty_bank,
    fill_bank,
    matrix_bytes,
    plane_arguments,
    random_matrix,
    stack_rows,
)
from edgedsv4.kernels.quant_matmul import QuantMatrix
from edgedsv4.kernels.quant_matmul import dequantize as dequantize_reference


def rows_of(matrix: DeviceMatrix, row0: int, rows: int) -> Tensor:
    """Some rows of a matrix as numbers."""
    out = torch.empty(rows, matrix.cols, device=DEVICE)
    dequantize(out, matrix, row0, rows)
    return out.cpu()


def values(matrix: DeviceMatrix) -> Tensor:
    """All numbers of a matrix."""
    return rows_of(matrix, 0, matrix.rows)


def assert_same(found: Tensor, expected: Tensor) -> None:
    """Equal numbers, and NaN in the same places."""
    assert torch.equal(found.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_planes_have_the_bytes_of_the_file(name: str) -> None:
    kind = BLOCK_TYPES[name]
    scales = {"FP8_E4M3": 6 * 4, "NVFP4": 6 * 4}.get(name, 0)
    assert matrix_bytes(name, 6, 512) == 6 * kind.row_bytes(512) + scales


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_rows_of_planes_are_whole_wide_words(name: str) -> None:
    matrix = device_matrix(random_weight(name, 3, 4096), DEVICE)
    assert all(plane.is_contiguous() for plane in matrix.planes)
    assert matrix.planes[0][0].nbytes % 16 == 0
    assert len(plane_arguments(matrix)) == 4


@pytest.mark.parametrize("name", ["IQ1_S", "Q5_1", "FP8_E5M2", "F64"])
def test_other_types_become_the_fallback_type(name: str) -> None:
    weight = random_weight(name, 2, 256, is_finite=True)
    matrix = device_matrix(weight, DEVICE)
    assert matrix.type == "BF16"
    assert_same(values(matrix), dequantize_reference(weight, torch.bfloat16).float())


@pytest.mark.parametrize("name", ["Q8_0", "IQ2_XXS", "Q2_K", "Q4_K", "FP4_E2M1", "FP8_E4M3"])
def test_slots_of_a_bank_are_filled_on_their_own(name: str) -> None:
    experts = [random_weight(name, 3, 256, seed=seed) for seed in range(2)]
    bank = empty_bank(name, 3, 3, 256, DEVICE)
    fill_bank(bank, 2, experts[0])
    fill_bank(bank, 0, experts[1])
    assert_same(rows_of(bank, 6, 3), dequantize_reference(experts[0]))
    assert_same(rows_of(bank, 0, 3), dequantize_reference(experts[1]))


def test_a_bank_takes_raw_rows_of_a_file() -> None:
    weight = random_weight("Q2_K", 2, 256)
    bank = empty_bank("Q2_K", 1, 2, 256, DEVICE)
    fill_bank(bank, 0, weight.data.to(DEVICE))
    assert_same(values(bank), dequantize_reference(weight))


def test_a_bank_refuses_what_does_not_fit() -> None:
    bank = empty_bank("Q8_0", 2, 2, 64, DEVICE)
    for weight, slot in (
        (random_weight("Q8_0", 2, 64), 2),
        (random_weight("Q8_0", 2, 64), -1),
        (random_weight("Q8_0", 2, 96), 0),
        (random_weight("Q4_0", 2, 64), 0),
        (replace(random_weight("Q8_0", 2, 64), tensor_scale=2.0), 0),
    ):
        with pytest.raises(ShapeError, match="cannot be rows"):
            fill_bank(bank, slot, weight)


def test_a_matrix_is_loaded_in_chunks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planes, "CHUNK_ELEMENTS", 700)
    for name in ("Q8_0", "FP8_E4M3", "BF16"):
        weight = random_weight(name, 5, 256)
        assert_same(values(device_matrix(weight, DEVICE)), dequantize_reference(weight))


def test_a_tensor_scale_is_not_lost() -> None:
    weight = replace(random_weight("Q8_0", 2, 64), tensor_scale=0.5)
    matrix = device_matrix(weight, DEVICE, fallback="F32")
    assert_same(values(matrix), dequantize_reference(weight))


def test_small_fp8_squares_keep_their_scales() -> None:
    weight = random_weight("FP8_E4M3", 40, 96)
    scale = torch.arange(110, 116, dtype=torch.uint8).view(2, 3)
    weight = QuantMatrix(weight.block_type, 40, 96, weight.data, scale)
    matrix = device_matrix(weight, DEVICE)
    assert matrix.scale_cols == 32
    assert_same(values(matrix), dequantize_reference(weight))


def test_matrices_are_stacked() -> None:
    weights = [random_weight("IQ2_XXS", 2, 256, seed=seed) for seed in range(3)]
    stacked = stack_rows([device_matrix(weight, DEVICE) for weight in weights])
    assert stacked.rows == 6
    assert_same(values(stacked), torch.cat([dequantize_reference(weight) for weight in weights]))
    with pytest.raises(ShapeError, match="stacked"):
        stack_rows([stacked, device_matrix(random_weight("Q8_0", 1, 256), DEVICE)])


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_random_contents_have_the_deviation_of_weights(name: str) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    matrix = random_matrix(name, 8, 1024, DEVICE, generator)
    found = values(matrix)
    assert torch.isfinite(found).all()
    assert 0.6 < found.std().item() * 32 < 1.7


def test_unknown_types_are_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="IQ1_S"):
        matrix_bytes("IQ1_S", 1, 256)

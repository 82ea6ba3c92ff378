"""FP8 rows and FP4 index keys, byte for byte against scalar encoders."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from scalar_codecs import e4m3_value, fp4_row, fp8_row

from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    fp8_scale_bytes,
    quantize_index_keys,
    quantize_kv_rows,
)

if TYPE_CHECKING:
    from edgedsv4.config import Backend


both = pytest.mark.parametrize("backend", ["native", "reference"])


def rows(count: int, width: int, seed: int) -> torch.Tensor:
    """Rows of very different sizes, in float32."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=generator)
    return x * 2.0 ** torch.randint(-30, 12, (count, 1), generator=generator)


@both
@pytest.mark.parametrize(("width", "rope_dim"), [(512, 64), (128, 32), (66, 2), (70, 68)])
def test_kv_rows_are_coded_byte_for_byte(width: int, rope_dim: int, backend: Backend) -> None:
    x = rows(9, width, seed=width)
    x[3] = 0.0
    x[4, 0] = 448.0
    data, scales = quantize_kv_rows(x, rope_dim, backend=backend)
    for row, values in enumerate(x.to(torch.bfloat16).double().tolist()):
        expected = fp8_row(values, rope_dim)
        assert (bytes(data[row].tolist()), bytes(scales[row].tolist())) == expected, f"row {row}"


def test_a_released_row_takes_584_bytes() -> None:
    data, scales = quantize_kv_rows(torch.ones(1, 512), 64)
    assert (data.shape[1], scales.shape[1]) == (576, 8)
    assert fp8_scale_bytes(448) == 8


@both
@pytest.mark.parametrize("width", [128, 64, 32, 40, 2])
def test_index_keys_are_coded_byte_for_byte(width: int, backend: Backend) -> None:
    x = rows(9, width, seed=width)
    x[2] = 0.0
    x[5, ::2] *= 0.0
    x[6, 0] = -0.0
    codes, scales = quantize_index_keys(x, backend=backend)
    for row, values in enumerate(x.to(torch.bfloat16).double().tolist()):
        assert (bytes(codes[row].tolist()), bytes(scales[row].tolist())) == fp4_row(values), (
            f"row {row}"
        )


@both
def test_fp4_ties_go_to_the_even_code(backend: Backend) -> None:
    ties = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4])
    codes, scales = quantize_index_keys(ties, backend=backend)
    assert scales.tolist() == [[127]]
    decoded = dequantize_index_keys(codes, scales, torch.float32, backend=backend)
    assert decoded[0, :8].tolist() == [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]


def test_an_index_key_of_128_takes_68_bytes() -> None:
    codes, scales = quantize_index_keys(torch.ones(1, 128))
    assert codes.shape[1] + scales.shape[1] == 68


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_decoding_returns_the_value_of_each_code(dtype: torch.dtype) -> None:
    x = rows(5, 128, seed=1)
    data, scales = quantize_kv_rows(x, 32)
    decoded = dequantize_kv_rows(data, scales, 32, dtype)
    for row in range(5):
        for column in range(96):
            exponent = int(scales[row, column // 64]) - 127
            assert float(decoded[row, column]) == e4m3_value(int(data[row, column])) * 2.0**exponent
    assert torch.equal(decoded[:, 96:], x[:, 96:].to(torch.bfloat16).to(dtype))


def test_coding_a_decoded_row_changes_nothing() -> None:
    x = rows(6, 128, seed=2)
    first = quantize_kv_rows(x, 32)
    again = quantize_kv_rows(dequantize_kv_rows(*first, 32, torch.float32), 32)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    keys = quantize_index_keys(x)
    again = quantize_index_keys(dequantize_index_keys(*keys, torch.float32))
    assert torch.equal(
        dequantize_index_keys(*keys, torch.float32), dequantize_index_keys(*again, torch.float32)
    )


def test_no_rows_give_no_bytes() -> None:
    data, scales = quantize_kv_rows(torch.empty(0, 128), 32)
    assert dequantize_kv_rows(data, scales, 32, torch.float32).shape == (0, 128)
    codes, scales = quantize_index_keys(torch.empty(0, 64))
    assert dequantize_index_keys(codes, scales, torch.float32).shape == (0, 64)

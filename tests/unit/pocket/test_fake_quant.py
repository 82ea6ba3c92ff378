"""Roundings inside training are those of the cache and of the stored experts."""

from __future__ import annotations

import pytest
import torch
from pocket.fake_quant import fp4_index, fp4_weights, fp8_rows

from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.model.row_store import Fp4Rows, Fp8Rows

CPU = torch.device("cpu")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(4)) * 3


def test_rows_are_what_the_cache_gives_back() -> None:
    rows = draw(2, 7, 128)
    codec = Fp8Rows(128, 64, torch.float32, CPU)
    stored = codec.decode(codec.encode(rows.view(-1, 128))).view_as(rows)
    assert torch.equal(fp8_rows(rows, 64), stored)


def test_index_keys_are_what_the_cache_gives_back() -> None:
    keys = draw(5, 3, 128)
    codec = Fp4Rows(128, torch.float32, CPU)
    stored = codec.decode(codec.encode(hadamard(keys).view(-1, 128))).view_as(keys)
    assert torch.equal(fp4_index(keys), stored)


def test_weights_are_what_the_stored_codes_give_back() -> None:
    weights = draw(64, 96) * torch.logspace(-30, 30, 64, base=2)[:, None]
    weights[3] = 0.0
    codes = quantize_index_keys(weights)
    assert torch.equal(fp4_weights(weights), dequantize_index_keys(*codes, torch.float32))


def test_ties_go_to_the_even_code() -> None:
    ties = torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, -2.5] + [0.0] * 23)[None]
    codes = quantize_index_keys(ties)
    assert torch.equal(fp4_weights(ties), dequantize_index_keys(*codes, torch.float32))


def test_a_last_group_may_be_shorter() -> None:
    rows = draw(5, 96 + 16)
    codes = quantize_kv_rows(rows, 16)
    stored = dequantize_kv_rows(*codes, 16, torch.float32)
    assert torch.equal(fp8_rows(rows, 16), stored)


def test_rounded_weights_round_to_themselves() -> None:
    rounded = fp4_weights(draw(4, 16, 64))
    assert torch.equal(fp4_weights(rounded), rounded)


def test_rounded_weights_survive_bfloat16() -> None:
    weights = draw(4, 16, 64)
    assert torch.equal(fp4_weights(weights.bfloat16().float()), fp4_weights(weights))
    assert torch.equal(fp4_weights(weights).bfloat16().float(), fp4_weights(weights))


@pytest.mark.parametrize(
    "rounding", [fp4_weights, lambda x: fp8_rows(x, 64)], ids=["fp4_weights", "fp8_rows"]
)
def test_gradients_pass_through(rounding: object) -> None:
    x = draw(3, 128).requires_grad_()
    factors = draw(3, 128)
    (rounding(x) * factors).sum().backward()  # type: ignore[operator]
    assert x.grad is not None
    assert torch.equal(x.grad, factors)

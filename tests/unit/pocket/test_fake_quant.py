"""Roundings inside training are those of the cache and of the stored experts."""

from __future__ import annotations

import pytest
import torch
from pocket.fake_quant import fp4_index, fp4_weights, fp8_rows

from edgedsv4.kernels.hadamard import hadamard
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

"""Rotary embedding: published values, complex multiplication as the other derivation, inverse."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_close

from edgedsv4.config import RopeScaling
from edgedsv4.errors import ShapeError
from edgedsv4.kernels.rope import apply_rope, rope_frequencies, rope_table

YARN = RopeScaling(factor=16, original_context=65536)


@pytest.mark.parametrize(
    ("pair", "value"),
    [
        (16, 0.002265625),
        (20, 2.9697778e-4),
        (24, 1.953125e-5),
        (25, 5.3723127e-6),
        (31, 5.680529e-7),
    ],
)
def test_yarn_frequencies_have_the_released_models_values(pair: int, value: float) -> None:
    frequencies = rope_frequencies(64, 160000.0, YARN)
    assert float(frequencies[pair]) == pytest.approx(value, rel=2e-6)


def test_yarn_keeps_fast_pairs_and_divides_slow_ones() -> None:
    plain = rope_frequencies(64, 160000.0, None)
    scaled = rope_frequencies(64, 160000.0, YARN)
    assert torch.equal(scaled[:16], plain[:16])
    assert_close("slow pairs", scaled[25:] * 16, plain[25:])


def test_unscaled_frequencies_are_powers_of_the_base() -> None:
    frequencies = rope_frequencies(8, 10000.0, None)
    assert_close("frequencies", frequencies, torch.tensor([1.0, 0.1, 0.01, 0.001]).double())


def test_a_degenerate_ramp_does_not_divide_by_zero() -> None:
    tiny = RopeScaling(factor=4, original_context=64, beta_fast=1, beta_slow=1)
    assert torch.isfinite(rope_frequencies(4, 1e9, tiny)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_rotates_the_last_dims_in_interleaved_pairs(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 3, 14, generator=generator, dtype=torch.float64).to(dtype)
    positions = torch.tensor([0, 1, 7, 1000, 100_003])
    frequencies = rope_frequencies(8, 10000.0, None)
    got = apply_rope(x, rope_table(positions, frequencies, dtype))
    angles = (positions.float()[:, None] * frequencies).double()
    turned = torch.view_as_complex(x[..., 6:].double().reshape(5, 3, 4, 2).contiguous())
    turned = turned * torch.polar(torch.ones_like(angles), angles)[:, None, :]
    assert_close("rotated", got[..., 6:], torch.view_as_real(turned).flatten(-2))
    assert torch.equal(got[..., :6], x[..., :6])


def test_the_angle_is_the_float32_product_in_every_dtype() -> None:
    frequencies = torch.tensor([0.1])
    position = 16_777_213
    table = rope_table(torch.tensor([position]), frequencies, torch.float64)
    product = float(torch.tensor(float(position)) * frequencies[0])
    assert float(table.cos) == pytest.approx(math.cos(product), abs=1e-12)
    assert abs(float(table.cos) - math.cos(position * 0.1)) > 1e-3


def test_inverse_undoes_the_rotation() -> None:
    x = torch.randn(4, 2, 10, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    table = rope_table(torch.arange(4) * 31, rope_frequencies(6, 10000.0, None), torch.float64)
    assert_close("round trip", apply_rope(apply_rope(x, table), table, inverse=True), x)


def test_position_zero_is_the_identity() -> None:
    x = torch.randn(1, 8, generator=torch.Generator().manual_seed(4))
    table = rope_table(torch.tensor([0]), rope_frequencies(8, 10000.0, None), torch.float32)
    assert torch.equal(apply_rope(x, table), x)


def test_a_head_narrower_than_the_table_is_refused() -> None:
    table = rope_table(torch.tensor([0]), rope_frequencies(8, 10000.0, None), torch.float32)
    with pytest.raises(ShapeError, match="rope"):
        apply_rope(torch.ones(1, 6), table)

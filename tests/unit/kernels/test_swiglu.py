"""Clamped SwiGLU: where the clamps sit, against scalar Python."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.swiglu import swiglu


def scalar(gate: float, up: float, limit: float) -> float:
    gate = min(gate, limit)
    return gate / (1 + math.exp(-gate)) * max(-limit, min(up, limit))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("limit", [1.5, 10.0, math.inf])
def test_matches_scalar_python(limit: float, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(7)
    gate = (4 * torch.randn(3, 11, generator=generator)).to(dtype)
    up = (4 * torch.randn(3, 11, generator=generator)).to(dtype)
    pairs = zip(gate.double().flatten().tolist(), up.double().flatten().tolist(), strict=True)
    expected = torch.tensor([scalar(g, u, limit) for g, u in pairs], dtype=torch.float64)
    assert_close("swiglu", swiglu(gate, up, limit), expected.view(3, 11))


def test_the_gate_has_no_lower_bound() -> None:
    deep = swiglu(torch.tensor([-3.0]), torch.tensor([1.0]), 1.5)
    assert float(deep) == pytest.approx(scalar(-3.0, 1.0, 1.5))
    assert float(deep) != pytest.approx(scalar(-1.5, 1.0, 1.5))


def test_different_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="swiglu"):
        swiglu(torch.ones(2), torch.ones(3), 1.0)

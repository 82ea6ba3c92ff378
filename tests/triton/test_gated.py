"""The gate of a hidden layer against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.gated import gated
from edgedsv4.kernels.swiglu import swiglu


@pytest.mark.parametrize("limit", [1.5, math.inf])
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (3, 300)])
def test_values(tokens: int, width: int, limit: float) -> None:
    draw = torch.Generator().manual_seed(3)
    both = 3 * torch.randn(tokens, 2 * width, generator=draw)
    out = torch.full((tokens, width), torch.nan, device=DEVICE)
    gated(out, both.to(DEVICE), limit)
    a, b = both.double().chunk(2, dim=1)
    expected = swiglu(a, b, limit, backend="reference")
    torch.testing.assert_close(out.cpu().double(), expected, rtol=1e-6, atol=1e-6)


def test_nan_is_not_swallowed() -> None:
    both = torch.zeros(1, 128, device=DEVICE)
    both[0, 3] = both[0, 64 + 5] = torch.nan
    out = torch.zeros(1, 64, device=DEVICE)
    gated(out, both, 2.0)
    assert torch.isnan(out[0]).nonzero().flatten().tolist() == [3, 5]


def test_shapes_have_to_fit() -> None:
    with pytest.raises(ShapeError):
        gated(torch.empty(1, 64, device=DEVICE), torch.empty(1, 64, device=DEVICE), 1.0)

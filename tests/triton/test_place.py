"""Position and rotations of a decoded token."""

from __future__ import annotations

import math

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.place import place


def _tables(count: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        torch.full((count, width), math.nan, device=DEVICE),
        torch.full((count, width), math.nan, device=DEVICE),
    )


@pytest.mark.parametrize("position", [0, 3, 127, 4099, 1_000_003])
def test_rotations_of_the_token_and_of_its_windows(position: int) -> None:
    ratios = torch.tensor([1, 4, 128], device=DEVICE)
    frequencies = (10_000.0 ** -(torch.arange(15) / 15)).float().expand(3, -1).contiguous()
    cos, sin = _tables(3, 15)
    at = torch.full((1,), -7, dtype=torch.int32, device=DEVICE)
    bad = torch.full((1,), 9, dtype=torch.int32, device=DEVICE)
    given = torch.tensor([5, position], device=DEVICE)
    place(at, bad, cos, sin, given=given, ratios=ratios, frequencies=frequencies.to(DEVICE))
    assert (int(at), int(bad)) == (position, 0)
    starts = torch.tensor([position, position // 4 * 4, position // 128 * 128])
    angles = (starts.float()[:, None] * frequencies).double()
    assert torch.allclose(cos.cpu().double(), angles.cos(), atol=3e-7, rtol=0)
    assert torch.allclose(sin.cpu().double(), angles.sin(), atol=3e-7, rtol=0)


def test_shapes_that_do_not_fit_are_refused() -> None:
    cos, sin = _tables(2, 8)
    one = torch.zeros(1, dtype=torch.int32, device=DEVICE)
    given, ratios = torch.zeros(2, dtype=torch.int64, device=DEVICE), one.long()
    with pytest.raises(ShapeError, match="place"):
        place(one, one, cos, sin, given=given, ratios=ratios, frequencies=cos)
    ratios = torch.ones(2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(ShapeError, match="int64"):
        place(one, one, cos, sin, given=given.int(), ratios=ratios, frequencies=cos)

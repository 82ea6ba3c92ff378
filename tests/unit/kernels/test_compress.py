"""Pooling of windows against loops over channels and slots."""

from __future__ import annotations

import math

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.compress import pool_windows


def pool(slots: list[tuple[float, float]]) -> float:
    """Softmax-weighted mean of (value, gate) pairs."""
    top = max(gate for _, gate in slots)
    total = sum(math.exp(gate - top) for _, gate in slots)
    return sum(value * math.exp(gate - top) for value, gate in slots) / total


def draw(windows: int, m: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(windows * 31 + m)
    shape = (windows, m, width)
    values = torch.randn(shape, generator=generator, dtype=torch.float64)
    return values, 3 * torch.randn(shape, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("windows", "m", "width"), [(1, 1, 1), (3, 5, 7), (2, 128, 3)])
def test_one_series_pools_each_window(windows: int, m: int, width: int, dtype: torch.dtype) -> None:
    values, gates = (part.to(dtype) for part in draw(windows, m, width))
    got = pool_windows(values, gates, has_overlap=False, previous=False)
    expected = [
        [
            pool([(float(values[w, j, c]), float(gates[w, j, c])) for j in range(m)])
            for c in range(width)
        ]
        for w in range(windows)
    ]
    assert_close("rows", got, torch.tensor(expected, dtype=torch.float64))


def overlapped(values: torch.Tensor, gates: torch.Tensor, w: int, c: int) -> float:
    width = values.shape[-1] // 2
    slots = [
        (float(v), float(g))
        for v, g in zip(values[w, :, width + c], gates[w, :, width + c], strict=True)
    ]
    if w > 0:
        slots += zip(values[w - 1, :, c].tolist(), gates[w - 1, :, c].tolist(), strict=True)
    return pool(slots)


def test_two_series_pool_the_previous_a_with_the_current_b() -> None:
    values, gates = draw(4, 4, 6)
    got = pool_windows(values, gates, has_overlap=True, previous=False)
    expected = [[overlapped(values, gates, w, c) for c in range(3)] for w in range(4)]
    assert_close("rows", got, torch.tensor(expected, dtype=torch.float64))


def test_a_given_predecessor_is_the_window_before() -> None:
    values, gates = draw(4, 4, 6)
    whole = pool_windows(values, gates, has_overlap=True, previous=False)
    later = pool_windows(values[1:], gates[1:], has_overlap=True, previous=True)
    assert torch.equal(later, whole[2:])


def test_the_first_window_is_finite_without_a_predecessor() -> None:
    values, gates = draw(1, 4, 6)
    assert torch.isfinite(pool_windows(values, gates, has_overlap=True, previous=False)).all()


@pytest.mark.parametrize(
    ("shapes", "overlap", "previous"),
    [
        (((2, 4, 6), (2, 4, 5)), False, False),
        (((2, 4, 5), (2, 4, 5)), True, False),
        (((2, 4, 6), (2, 4, 6)), False, True),
    ],
    ids=["shapes differ", "odd width", "predecessor without overlap"],
)
def test_wrong_calls_are_refused(
    shapes: tuple[tuple[int, ...], ...], overlap: bool, previous: bool
) -> None:
    values, gates = (torch.zeros(shape) for shape in shapes)
    with pytest.raises(ShapeError, match="compress"):
        pool_windows(values, gates, has_overlap=overlap, previous=previous)

"""The largest logit and the check for bad numbers, at every instruction set."""

from __future__ import annotations

import math

import pytest
import torch

from edgedsv4.kernels.native.library import library, pointer

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")


def argmax(values: torch.Tensor) -> int:
    return lib.dk_argmax(pointer(values), len(values))


def draw(n: int) -> torch.Tensor:
    return torch.randn(n, generator=torch.Generator().manual_seed(n))


@pytest.mark.parametrize("n", [1, 7, 8, 9, 100, 1031])
def test_finds_the_largest_at_every_place(n: int) -> None:
    for place in range(0, n, 5):
        values = draw(n)
        values[place] = 9.0
        assert argmax(values) == place


def test_equal_values_go_to_the_lowest_index() -> None:
    values = torch.full((29,), -3.0)
    assert argmax(values) == 0
    values[[13, 27]] = 2.0
    assert argmax(values) == 13


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("n", [3, 8, 27])
def test_a_bad_value_anywhere_gives_no_index(bad: float, n: int) -> None:
    for place in range(n):
        values = draw(n)
        values[place] = bad
        assert argmax(values) == -1


def test_masked_logits_are_passed_over() -> None:
    values = torch.full((21,), -math.inf)
    assert argmax(values) == -1
    values[20] = -1e30
    assert argmax(values) == 20


def test_nothing_has_no_largest() -> None:
    assert lib.dk_argmax(pointer(torch.empty(1)), 0) == -1


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("n", [1, 8, 19])
def test_a_value_that_is_not_finite_is_found_anywhere(bad: float, n: int) -> None:
    assert lib.dk_all_finite(pointer(draw(n)), n) == 1
    for place in range(n):
        values = draw(n)
        values[place] = bad
        assert lib.dk_all_finite(pointer(values), n) == 0


def test_large_values_are_finite() -> None:
    values = torch.full((16,), torch.finfo(torch.float32).max)
    assert lib.dk_all_finite(pointer(values), 16) == 1

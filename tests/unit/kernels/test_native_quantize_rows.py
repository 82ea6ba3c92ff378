"""Activations rounded to int8: equal to the definition bit for bit, on every instruction set."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native_products import Rounded, activations, round_rows

from edgedsv4.kernels.quant_matmul import round_activations

pytestmark = pytest.mark.usefixtures("isa")
TINIEST = np.float32(2.0**-110)


def definition(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """q int8 [tokens, columns] and scale f32 [tokens, columns / 32], in float32 steps."""
    groups = x.reshape(len(x), -1, 32)
    largest = np.abs(groups).max(axis=2)
    is_bad, is_zero = ~np.isfinite(largest), largest < TINIEST
    skipped = is_bad | is_zero
    safe = np.where(skipped, np.float32(1), largest)
    factor = np.where(skipped, np.float32(0), np.float32(127) / safe)
    scale = np.where(is_zero, np.float32(0), safe / np.float32(127))
    numbers = np.where(skipped[:, :, None], np.float32(0), groups)
    q = np.rint(numbers * factor[:, :, None]).astype(np.int8)
    return q.reshape(x.shape), np.where(is_bad, np.float32(np.nan), scale)


def assert_defined(rounded: Rounded) -> None:
    q, scale = definition(rounded.x)
    np.testing.assert_array_equal(rounded.field("q", np.int8, 1), q)
    np.testing.assert_array_equal(rounded.field("scale", np.float32, 32), scale)
    for name, group in (("sum32", 32), ("sum16", 16)):
        sums = q.reshape(len(q), -1, group).astype(np.int32).sum(axis=2).astype(np.float32)
        expected = np.repeat(scale, 32 // group, axis=1) * sums
        np.testing.assert_array_equal(rounded.field(name, np.float32, group), expected)


@pytest.mark.parametrize("columns", [32, 96, 256, 2080])
@pytest.mark.parametrize("tokens", [1, 2, 7, 33])
def test_rows_are_rounded_as_defined(tokens: int, columns: int) -> None:
    assert_defined(round_rows(activations(tokens, columns)))


def test_rows_may_be_apart_and_unaligned() -> None:
    wide = activations(5, 200)
    assert_defined(round_rows(wide[:, 3:99]))


@pytest.mark.parametrize("magnitude", [1e-45, 7e-34, 8e-34, 1e-30, 1e30, 3.4e38])
def test_every_magnitude_is_rounded_as_defined(magnitude: float) -> None:
    x = activations(3, 64) / 12
    with np.errstate(under="ignore"):
        assert_defined(round_rows((x * np.float32(magnitude)).astype(np.float32)))


def test_the_python_reference_rounds_alike() -> None:
    x = np.random.default_rng(4).standard_normal((3000, 320)).astype(np.float32)
    rounded = round_rows(x)
    scale = np.repeat(rounded.field("scale", np.float32, 32), 32, axis=1)
    expected = rounded.field("q", np.int8, 1).astype(np.float32) * scale
    np.testing.assert_array_equal(round_activations(torch.from_numpy(x)).numpy(), expected)


def test_ties_go_to_even() -> None:
    x = np.zeros((1, 32), dtype=np.float32)
    x[0, :8] = (127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5)
    got = round_rows(x).field("q", np.int8, 1)[0, :8]
    assert got.tolist() == [127, 0, 2, 2, 0, -2, -2, 126]


def test_the_largest_magnitude_becomes_127() -> None:
    generator = np.random.default_rng(3)
    x = generator.standard_normal((50, 32)).astype(np.float32)
    got = round_rows(x).field("q", np.int8, 1).astype(int)
    assert (np.abs(got).max(axis=1) == 127).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 15, 31])
def test_a_bad_number_makes_its_group_nan_and_no_other(bad: float, place: int) -> None:
    x = activations(2, 96)
    x[1, 32 + place] = bad
    rounded = round_rows(x)
    assert_defined(rounded)
    for name, group in (("scale", 32), ("sum32", 32), ("sum16", 16)):
        is_nan = np.isnan(rounded.field(name, np.float32, group))
        assert is_nan.sum() == 32 // group
        assert is_nan[1, 32 // group : 64 // group].all()


@pytest.mark.parametrize("threads", [2, 5])
def test_threads_and_neighbours_do_not_change_a_bit(threads: int) -> None:
    x = activations(40, 2048)
    whole = round_rows(x, threads=threads)
    assert_defined(whole)
    alone = round_rows(x[17:18])
    for name, dtype, group in (("q", np.int8, 1), ("scale", np.float32, 32)):
        part = whole.field(name, dtype, group)[17:18]
        np.testing.assert_array_equal(alone.field(name, dtype, group), part)


def test_no_rows_are_nothing() -> None:
    assert round_rows(np.zeros((0, 64), dtype=np.float32)).memory.size == 0

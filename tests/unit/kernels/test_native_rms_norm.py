"""The RMS norm in C against the reference in float64, at every instruction set."""

from __future__ import annotations

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_same_bits

from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.rms_norm import rms_norm, rms_norm_reference

lib, _ = library()
EPS = 1e-3
pytestmark = pytest.mark.usefixtures("isa")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def native(x: torch.Tensor, weight: torch.Tensor | None, threads: int = 1) -> torch.Tensor:
    y = Guarded(*x.shape)
    run = NativeRun(threads)
    rows, n = x.shape
    arguments = (pointer(y.tensor), pointer(x), pointer(weight), rows, n, EPS)
    run.check(lib.dk_rms_norm(run.cdata, *arguments))
    return y.check()


@pytest.mark.parametrize("n", [1, 7, 8, 9, 31, 33, 256, 1027])
def test_matches_the_reference(n: int) -> None:
    x, weight = draw(3, n), draw(n)
    assert_close("weighted", native(x, weight), rms_norm_reference(x.double(), weight, EPS), 5e-7)
    assert_close("plain", native(x, None), rms_norm_reference(x.double(), None, EPS), 5e-7)


def test_all_instruction_sets_give_the_same_bits() -> None:
    x, weight = draw(2, 77), draw(77)
    got = native(x, weight)
    lib.dk_set_isa(0)
    assert_same_bits("rows", got, native(x, weight))


def test_a_row_does_not_depend_on_others_or_on_threads() -> None:
    x, weight = draw(70, 1027), draw(1027)
    whole = native(x, weight, threads=3)
    assert_same_bits("row 41", whole[41:42], native(x[41:42], weight))


def test_output_may_be_the_input() -> None:
    x, weight = draw(2, 33), draw(33)
    expected = native(x, weight)
    run = NativeRun()
    run.check(lib.dk_rms_norm(run.cdata, pointer(x), pointer(x), pointer(weight), 2, 33, EPS))
    assert_same_bits("in place", x, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_bad_value_shows_in_its_row_alone(bad: float) -> None:
    x = draw(2, 19)
    x[0, 18] = bad
    got = native(x, None)
    assert got[0].isnan().any()
    assert got[1].isfinite().all()


def test_the_public_function_takes_strided_input() -> None:
    x, weight = draw(9, 6).T, draw(9)
    got = rms_norm(x, weight, EPS, backend="native")
    assert_close("strided", got, rms_norm_reference(x.double(), weight, EPS), 5e-7)

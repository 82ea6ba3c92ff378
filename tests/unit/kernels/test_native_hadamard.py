"""The Hadamard transform in C gives the bits of the reference at every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_same_bits

from edgedsv4.kernels.hadamard import hadamard, hadamard_reference
from edgedsv4.kernels.native.library import NativeRun, library, pointer

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16, 128, 512])
def test_equals_the_reference(n: int) -> None:
    x = draw(3, n)
    got = hadamard(x, backend="native")
    assert_same_bits("transform", got, hadamard_reference(x))
    assert_close("transform", got, hadamard_reference(x.double()), 3e-7)


def test_writes_nothing_behind_the_rows() -> None:
    for n in (4, 32):
        x = Guarded(3, n)
        x.tensor.copy_(draw(3, n))
        run = NativeRun()
        run.check(lib.dk_hadamard(run.cdata, pointer(x.tensor), 3, n))
        assert x.check().isfinite().all()


def test_rows_are_shared_out_among_threads() -> None:
    x = draw(700, 64)
    got = x.clone()
    run = NativeRun(3)
    run.check(lib.dk_hadamard(run.cdata, pointer(got), 700, 64))
    assert_same_bits("rows", got, hadamard_reference(x))


def test_a_nan_fills_its_row_alone() -> None:
    x = draw(2, 16)
    x[1, 3] = math.nan
    got = hadamard(x, backend="native")
    assert got[1].isnan().all()
    assert got[0].isfinite().all()

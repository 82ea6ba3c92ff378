"""The rotary embedding in C against the reference in float64, at every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_max_abs, assert_same_bits

from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.rope import RopeTable, apply_rope, apply_rope_reference, rope_frequencies

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")


def draw(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def table(tokens: int, half: int) -> RopeTable:
    angles = 3 * draw(tokens, half)
    return RopeTable(angles.cos(), angles.sin())


def in_double(table: RopeTable) -> RopeTable:
    return RopeTable(table.cos.double(), table.sin.double())


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("heads", "dim", "half"), [(1, 2, 1), (3, 11, 3), (2, 64, 4), (2, 40, 5), (5, 96, 32)]
)
def test_matches_the_reference(heads: int, dim: int, half: int, inverse: bool) -> None:
    x, angles = draw(3, heads, dim), table(3, half)
    got = apply_rope(x, angles, inverse=inverse, backend="native")
    expected = apply_rope_reference(x.double(), in_double(angles), inverse=inverse)
    assert_close("rotated", got, expected, 2e-7)
    untouched = dim - 2 * half
    assert_same_bits("the rest", got[..., :untouched], x[..., :untouched])


def test_writes_nothing_behind_the_rows() -> None:
    x, angles = Guarded(3, 2, 22), table(3, 5)
    x.tensor.copy_(draw(3, 2, 22))
    run = NativeRun()
    cos, sin = pointer(angles.cos), pointer(angles.sin)
    run.check(lib.dk_rope(run.cdata, pointer(x.tensor), 3, 2, 22, cos, sin, 5, 0))
    assert x.check().isfinite().all()


def test_a_token_does_not_depend_on_others_or_on_threads() -> None:
    x, angles = draw(300, 3, 130), table(300, 65)
    run = NativeRun(3)
    whole = x.clone()
    cos, sin = pointer(angles.cos), pointer(angles.sin)
    run.check(lib.dk_rope(run.cdata, pointer(whole), 300, 3, 130, cos, sin, 65, 0))
    alone = apply_rope(x[217:218], RopeTable(angles.cos[217:218], angles.sin[217:218]))
    assert_same_bits("token 217", whole[217:218], alone)


def test_all_instruction_sets_give_the_same_bits() -> None:
    x, angles = draw(2, 3, 26), table(2, 13)
    got = apply_rope(x, angles, backend="native")
    lib.dk_set_isa(0)
    assert_same_bits("rotated", got, apply_rope(x, angles, backend="native"))


def test_a_nan_stays_in_its_pair() -> None:
    x, angles = draw(1, 1, 16), table(1, 8)
    x[0, 0, 5] = math.nan
    got = apply_rope(x, angles, backend="native")[0, 0].isnan()
    assert got.nonzero().flatten().tolist() == [4, 5]


@pytest.mark.parametrize(("first", "step"), [(0, 1), (7, 4), (1_000_003, 128)])
def test_table_is_that_of_the_angle_rounded_to_float32(first: int, step: int) -> None:
    frequencies = rope_frequencies(14, 10000.0, None)
    cos, sin = Guarded(5, 7), Guarded(5, 7)
    outputs = (pointer(cos.tensor), pointer(sin.tensor))
    lib.dk_rope_table(*outputs, first, step, 5, pointer(frequencies), 7)
    positions = (first + step * torch.arange(5)).float()
    angles = (positions[:, None] * frequencies).double()
    assert_max_abs("cos", cos.check(), angles.cos(), 1e-7)
    assert_max_abs("sin", sin.check(), angles.sin(), 1e-7)

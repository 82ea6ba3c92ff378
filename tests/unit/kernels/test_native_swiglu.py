"""SwiGLU in C against the reference in float64, at every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_max_abs, assert_same_bits

from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.swiglu import swiglu, swiglu_reference

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")
ULP = 2.0**-23


def draw(*shape: int) -> torch.Tensor:
    return 4 * torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def native(gate: torch.Tensor, up: torch.Tensor, limit: float, threads: int = 1) -> torch.Tensor:
    y = Guarded(gate.numel())
    run = NativeRun(threads)
    arguments = (pointer(y.tensor), pointer(gate), pointer(up), gate.numel(), limit)
    run.check(lib.dk_swiglu(run.cdata, *arguments))
    return y.check()


@pytest.mark.parametrize("count", [1, 7, 8, 9, 127, 1029])
@pytest.mark.parametrize("limit", [1.5, math.inf])
def test_matches_the_reference(count: int, limit: float) -> None:
    gate, up = draw(count), draw(count + 1)[:-1]
    expected = swiglu_reference(gate.double(), up.double(), limit)
    assert_close("swiglu", native(gate, up, limit), expected, 3e-7)


def test_silu_is_accurate_over_its_whole_range() -> None:
    gate = torch.linspace(-87, 120, 20001)
    got = native(gate, torch.ones_like(gate), math.inf).double()
    expected = swiglu_reference(gate.double(), torch.ones_like(gate).double(), math.inf)
    worst = ((got - expected).abs() / expected.abs().clamp(min=1e-300)).max().item()
    assert worst <= 2.5 * ULP


def test_a_very_negative_gate_vanishes() -> None:
    gate = torch.tensor([-88.0, -95.0, -104.0, -200.0, -3e38])
    assert_max_abs("swiglu", native(gate, torch.ones(5), math.inf), torch.zeros(5), 1e-35)


def test_nan_and_infinity_are_what_the_reference_makes_of_them() -> None:
    values = torch.tensor([math.nan, math.inf, -math.inf, 1.0, 0.0])
    gate, up = values.repeat_interleave(5), values.repeat(5)
    for limit in (2.0, math.inf):
        expected = swiglu_reference(gate, up, limit)
        got = native(gate, up, limit)
        assert got.isnan().equal(expected.isnan())
        assert_close("the others", got.nan_to_num(), expected.nan_to_num())


def test_tasks_of_several_threads_cover_every_element() -> None:
    gate, up = draw(40_003), draw(40_004)[:-1]
    assert_same_bits("elements", native(gate, up, 3.0, threads=3), native(gate, up, 3.0))


def test_all_instruction_sets_give_the_same_bits() -> None:
    gate, up = draw(997), draw(998)[:-1]
    got = native(gate, up, 7.0)
    lib.dk_set_isa(0)
    assert_same_bits("elements", got, native(gate, up, 7.0))


def test_output_may_be_the_gate() -> None:
    gate, up = draw(21), draw(22)[:-1]
    expected = native(gate, up, 2.0)
    run = NativeRun()
    run.check(lib.dk_swiglu(run.cdata, pointer(gate), pointer(gate), pointer(up), 21, 2.0))
    assert_same_bits("in place", gate, expected)


def test_the_public_function_takes_strided_input() -> None:
    gate, up = draw(5, 6).T, draw(6, 5)
    expected = swiglu_reference(gate.double(), up.double(), 2.0)
    assert_close("strided", swiglu(gate, up, 2.0, backend="native"), expected, 3e-7)

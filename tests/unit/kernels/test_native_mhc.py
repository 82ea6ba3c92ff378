"""Hyper-connections in C against the composition in float64, at every instruction set."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from guarded import Guarded
from numeric import assert_close, assert_same_bits

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.kernels.mhc import (
    HyperConstants,
    hyper_head,
    hyper_read,
    hyper_read_reference,
    hyper_write,
)
from edgedsv4.kernels.native.library import NativeRun, library, pointer

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")
EPS = 1e-2
"""Large enough that one which is missing or misplaced shows."""
LIMIT = 2e-6


@dataclass
class Case:
    """Streams and parameters of a site; `mix` is the product that C gets."""

    streams: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm: torch.Tensor

    @property
    def parameters(self) -> tuple[torch.Tensor, ...]:
        return (self.streams, self.fn, self.base, self.scale, self.norm)

    @property
    def doubles(self) -> tuple[torch.Tensor, ...]:
        return tuple(tensor.double() for tensor in self.parameters)

    @property
    def mix(self) -> torch.Tensor:
        return (self.streams.flatten(1) @ self.fn.T).contiguous()


def draw(tokens: int, n: int, rows: int = 24, scales: int = 3, size: float = 0.1) -> Case:
    generator = torch.Generator().manual_seed(100 * tokens + n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    streams, fn = size * normal(tokens, 4, n), normal(rows, 4 * n) / 3
    return Case(streams, fn, normal(rows), 0.8 + 0.2 * normal(scales), normal(n))


def constants(iterations: int) -> HyperConstants:
    return HyperConstants(iterations, EPS, EPS)


def native_read(case: Case, iterations: int, threads: int = 1) -> list[torch.Tensor]:
    tokens, _, n = case.streams.shape
    outputs = [Guarded(tokens, n), Guarded(tokens, 4), Guarded(tokens, 4, 4)]
    inputs = (case.streams, case.mix, case.base, case.scale, case.norm)
    run = NativeRun(threads)
    status = lib.dk_hyper_read(
        run.cdata,
        *(pointer(output.tensor) for output in outputs),
        *map(pointer, inputs),
        *(tokens, n, iterations, EPS, EPS),
    )
    run.check(status)
    return [output.check() for output in outputs]


@pytest.mark.parametrize("n", [1, 7, 8, 33, 256])
@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_read_matches_the_reference(n: int, iterations: int) -> None:
    case = draw(3, n)
    x, post, comb = native_read(case, iterations)
    expected = hyper_read_reference(*case.doubles, constants(iterations))
    assert_close("x", x, expected.x, LIMIT)
    assert_close("post", post, expected.post, LIMIT)
    assert_close("comb", comb, expected.comb, LIMIT)


def test_softmax_of_far_logits_does_not_overflow() -> None:
    case = draw(1, 9)
    case.base[8:] = torch.tensor([300.0, -300.0, 0.0, 90.0] * 4)
    comb = native_read(case, 20)[2]
    expected = hyper_read_reference(*case.doubles, constants(20))
    assert_close("comb", comb, expected.comb, LIMIT)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_stream_shows_in_its_token_alone(bad: float) -> None:
    case = draw(2, 12)
    case.streams[0, 2, 11] = bad
    x, post, comb = native_read(case, 2)
    assert x[0].isnan().any()
    assert post[0].isnan().all()
    assert comb[0].isnan().all()
    assert x[1].isfinite().all()
    assert comb[1].isfinite().all()


def test_a_token_does_not_depend_on_others_or_on_threads() -> None:
    case = draw(40, 601)
    whole = native_read(case, 3, threads=3)
    single = Case(case.streams[29:30], case.fn, case.base, case.scale, case.norm)
    mix = case.mix[29:30]
    tokens = [Guarded(1, 601), Guarded(1, 4), Guarded(1, 4, 4)]
    run = NativeRun()
    inputs = (single.streams, mix, case.base, case.scale, case.norm)
    outputs = (pointer(token.tensor) for token in tokens)
    run.check(lib.dk_hyper_read(run.cdata, *outputs, *map(pointer, inputs), 1, 601, 3, EPS, EPS))
    for name, all_tokens, alone in zip(("x", "post", "comb"), whole, tokens, strict=True):
        assert_same_bits(name, all_tokens[29:30], alone.check())


def test_all_instruction_sets_give_the_same_bits() -> None:
    case = draw(2, 45)
    got = native_read(case, 20)
    lib.dk_set_isa(0)
    for one, other in zip(got, native_read(case, 20), strict=True):
        assert_same_bits("output", one, other)


@pytest.mark.parametrize("n", [1, 8, 37])
def test_head_matches_the_reference(n: int) -> None:
    case = draw(3, n, rows=4, scales=1)
    got = hyper_head(*case.parameters, constants(0), backend="native")
    expected = hyper_head(*case.doubles, constants(0), backend="reference")
    assert_close("head", got, expected, LIMIT)


@pytest.mark.parametrize("n", [1, 8, 37])
@pytest.mark.parametrize("in_place", [False, True])
def test_write_matches_the_reference(n: int, in_place: bool) -> None:
    streams, output = draw(3, n).streams, draw(4, n).streams[:3, 0].contiguous()
    post, comb = draw(3, 1).streams[..., 0].contiguous(), draw(3, 4).streams
    doubles = (tensor.double() for tensor in (streams, output, post, comb))
    expected = hyper_write(*doubles, backend="reference")
    y = Guarded(3, 4, n)
    y.tensor.copy_(streams)
    source = y.tensor if in_place else streams
    run = NativeRun()
    arguments = map(pointer, (y.tensor, source, output, post, comb))
    run.check(lib.dk_hyper_write(run.cdata, *arguments, 3, n))
    assert_close("streams", y.check(), expected, LIMIT)


def test_public_functions_equal_their_references() -> None:
    case = draw(2, 24)
    got = hyper_read(*case.parameters, constants(3), backend="native")
    expected = hyper_read_reference(*case.doubles, constants(3))
    assert_close("x", got.x, expected.x, LIMIT)
    written = hyper_write(case.streams, got.x, got.post, got.comb, backend="native")
    doubles = (t.double() for t in (case.streams, got.x, got.post, got.comb))
    assert_close("streams", written, hyper_write(*doubles, backend="reference"), LIMIT)


def test_another_number_of_streams_is_left_to_the_reference() -> None:
    streams, output = torch.ones(1, 2, 3), torch.ones(1, 3)
    with pytest.raises(BackendUnavailableError):
        hyper_write(streams, output, torch.ones(1, 2), torch.ones(1, 2, 2), backend="native")
    got = hyper_write(streams, output, torch.ones(1, 2), torch.ones(1, 2, 2))
    assert got.eq(3).all()

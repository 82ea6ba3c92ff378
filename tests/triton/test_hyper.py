"""Hyper-connection launches against the definition in float64."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from numeric import relative_error
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.hyper import FEW_TOKENS, head_step, hyper_step, hyper_work_floats
from edgedsv4.kernels.mhc import (
    HyperConstants,
    HyperMix,
    head_mix,
    hyper_read_reference,
    read_streams,
    write_streams,
)
from edgedsv4.kernels.rms_norm import rms_norm_reference

HC = 4
# Exponentials and three-part products of a GPU are good to a few units in the last place.
LIMIT = 3e-6 if DEVICE == "cpu" else 1e-5
CONSTANTS = HyperConstants(iterations=4, hc_eps=1e-6, norm_eps=1e-6)
# Epsilons that show: at the released ones a missing one changes nothing.
COARSE = HyperConstants(iterations=2, hc_eps=1e-2, norm_eps=1e-2)
# Widths: one block, not a multiple of one, several programs.
SIZES = [(1, 128), (1, 200), (1, 36), (2, 64), (FEW_TOKENS + 3, 96), (18, 32)]
if DEVICE != "cpu":
    SIZES += [(1, 4096), (8, 4096), (1, 7168), (300, 4096), (2049, 4096), (70, 7168)]


@dataclass
class Case:
    """Inputs of a step, float32."""

    streams: Tensor
    o: Tensor
    post: Tensor
    comb: Tensor
    fn: Tensor
    base: Tensor
    scale: Tensor
    norm: Tensor

    def parameters(self) -> dict[str, Tensor]:
        return {"fn": self.fn, "base": self.base, "scale": self.scale, "norm": self.norm}

    def wide(self) -> dict[str, Tensor]:
        return {name: getattr(self, name).double() for name in self.__slots__}


def draw(tokens: int, hidden: int, rows: int = 24, seed: int = 3) -> Case:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return Case(
        streams=(0.3 * normal(tokens, HC, hidden) + normal(tokens, 1, hidden)).to(DEVICE),
        o=normal(tokens, hidden).to(DEVICE),
        post=(1 + 0.5 * normal(tokens, HC)).to(DEVICE),
        comb=(torch.eye(HC) * 0.5 + 0.2 * normal(tokens, HC, HC)).to(DEVICE),
        fn=(normal(rows, HC * hidden) / hidden**0.5).to(DEVICE),
        base=normal(rows).to(DEVICE),
        scale=(0.8 + 0.2 * normal(3 if rows > HC else 1)).to(DEVICE),
        norm=(1 + 0.1 * normal(hidden)).to(DEVICE),
    )


def work(tokens: int, hidden: int) -> Tensor:
    return torch.full((hyper_work_floats(tokens, hidden),), torch.nan, device=DEVICE)


def written(case: Case) -> Tensor:
    mix = HyperMix(case.post.double(), case.post.double(), case.comb.double())
    return write_streams(case.streams.double(), case.o.double(), mix)


def read(case: Case, streams: Tensor, constants: HyperConstants) -> tuple[Tensor, Tensor, Tensor]:
    parameters = [t.double() for t in (case.fn, case.base, case.scale, case.norm)]
    got = hyper_read_reference(streams.double(), *parameters, constants)
    return got.x, got.post, got.comb


@pytest.mark.parametrize("constants", [CONSTANTS, COARSE], ids=["released", "coarse"])
@pytest.mark.parametrize("has_output", [True, False])
@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
def test_step_is_write_mix_read_and_norm(
    tokens: int, hidden: int, has_output: bool, constants: HyperConstants
) -> None:
    case = draw(tokens, hidden)
    streams = written(case) if has_output else case.streams.double()
    expected = (streams, *read(case, streams, constants))
    x = torch.full((tokens, hidden), torch.nan, device=DEVICE)
    got = (case.streams, x, case.post, case.comb)
    if not has_output:
        case.post.fill_(torch.nan)
        case.comb.fill_(torch.nan)
    hyper_step(
        *(x, case.post, case.comb, case.streams, case.o if has_output else None),
        **case.parameters(),
        constants=constants,
        work=work(tokens, hidden),
    )
    for found, right in zip(got, expected, strict=True):
        assert relative_error(found, right) < LIMIT


@pytest.mark.parametrize("tokens", [1, 12])
def test_streams_that_cancel_in_the_read_lose_no_digits(tokens: int) -> None:
    case = draw(tokens, 160)
    case.fn.zero_()
    case.base.zero_()  # equal weights of all streams
    case.streams[:, 1] = 1e-3 * case.streams[:, 1] - case.streams[:, 0]
    case.streams[:, 3] = 1e-3 * case.streams[:, 3] - case.streams[:, 2]
    expected = read(case, case.streams, CONSTANTS)[0]
    x = torch.full((tokens, 160), torch.nan, device=DEVICE)
    hyper_step(
        *(x, case.post, case.comb, case.streams, None),
        **case.parameters(),
        constants=CONSTANTS,
        work=work(tokens, 160),
    )
    # The sum itself has lost three digits; what must not happen is that the norm loses six.
    assert relative_error(x, expected) < 1e-4


@pytest.mark.parametrize(("tokens", "hidden"), SIZES)
@pytest.mark.parametrize("rows", ["all", "last", "none"])
@pytest.mark.parametrize("has_output", [True, False])
def test_head_step_writes_all_tokens_and_reads_the_last(
    tokens: int, hidden: int, rows: str, has_output: bool
) -> None:
    case = draw(tokens, hidden, rows=HC)
    wanted = {"all": tokens, "last": 1, "none": 0}[rows]
    streams = written(case) if has_output else case.streams.double()
    parameters = [t.double() for t in (case.fn, case.base, case.scale)]
    pre = head_mix(streams, *parameters, CONSTANTS)
    y = read_streams(streams, pre)
    expected = rms_norm_reference(y, case.norm.double(), CONSTANTS.norm_eps)[tokens - wanted :]
    got = torch.full((wanted, hidden), torch.nan, device=DEVICE)
    head_step(
        *(got, case.streams, case.o if has_output else None, case.post, case.comb),
        **case.parameters(),
        constants=CONSTANTS,
        work=work(tokens, hidden),
    )
    assert relative_error(case.streams, streams) < 1e-6
    if wanted:
        assert relative_error(got, expected) < LIMIT


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
@pytest.mark.parametrize("tokens", [1, 12])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_reaches_the_streams_and_the_read(tokens: int, bad: float) -> None:
    case = draw(tokens, 64)
    case.o[-1, 5] = bad
    x = torch.zeros(tokens, 64, device=DEVICE)
    hyper_step(
        *(x, case.post, case.comb, case.streams, case.o),
        **case.parameters(),
        constants=CONSTANTS,
        work=work(tokens, 64),
    )
    assert not torch.isfinite(case.streams[-1]).all()
    assert not torch.isfinite(x[-1]).all()
    assert torch.isfinite(x[: tokens - 1]).all()


def test_work_for_many_tokens_is_enough_for_fewer() -> None:
    sizes = [hyper_work_floats(tokens, 4096) for tokens in (1, 2, 8, 9, 64, 4096, 10000)]
    assert sizes == sorted(sizes)


def test_work_that_is_too_small_is_refused() -> None:
    case = draw(1, 64)
    x = torch.empty(1, 64, device=DEVICE)
    with pytest.raises(ShapeError, match="work"):
        hyper_step(
            *(x, case.post, case.comb, case.streams, case.o),
            **case.parameters(),
            constants=CONSTANTS,
            work=torch.empty(3, device=DEVICE),
        )


@pytest.mark.parametrize("tokens", [1, 2])
def test_additions_are_added_to_the_output_in_order(tokens: int) -> None:
    case = draw(tokens, 64)
    generator = torch.Generator().manual_seed(9)
    extra, other = (torch.randn(tokens, 64, generator=generator) for _ in range(2))

    def run(o: Tensor, **additions: Tensor) -> tuple[Tensor, ...]:
        x = torch.full((tokens, 64), torch.nan, device=DEVICE)
        state = [t.to(DEVICE).clone() for t in (case.post, case.comb, case.streams)]
        hyper_step(
            *(x, *state, o.to(DEVICE)),
            **{name: value.to(DEVICE) for name, value in case.parameters().items()},
            constants=CONSTANTS,
            work=torch.full((hyper_work_floats(tokens, 64),), torch.nan, device=DEVICE),
            **{name: value.to(DEVICE) for name, value in additions.items()},
        )
        return x, *state

    expected = run(case.o.cpu() + extra + other)
    for found, wanted in zip(run(case.o, extra=extra, other=other), expected, strict=True):
        assert torch.equal(found, wanted)

"""Choosing tokens on the device against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.sample import (
    UNDECIDED,
    SamplingWork,
    TokenCounts,
    argmax,
    argmax_work_ints,
    options_of,
    sample,
)
from edgedsv4.kernels.sample import SamplingRules, SeenTokens, sample_reference

NAN, INFINITY = float("nan"), float("inf")


def largest(logits: Tensor) -> list[int]:
    tokens, vocab_size = logits.shape
    ids = torch.full((tokens,), -9, dtype=torch.int32, device=DEVICE)
    work = torch.full((argmax_work_ints(tokens, vocab_size),), 0x7FFFFFFF, dtype=torch.int32)
    argmax(ids, logits.to(DEVICE), work.to(DEVICE))
    found: list[int] = ids.tolist()
    return found


@pytest.mark.parametrize("vocab_size", [1, 77, 1024, 3000])
@pytest.mark.parametrize("tokens", [1, 3])
def test_argmax_is_the_first_of_the_largest(tokens: int, vocab_size: int) -> None:
    generator = torch.Generator().manual_seed(4)
    logits = torch.randint(-40, 5, (tokens, vocab_size), generator=generator).float() / 4
    assert largest(logits) == [int(np.argmax(row)) for row in logits.numpy()]


def test_argmax_takes_zero_for_zero_of_either_sign() -> None:
    assert largest(torch.tensor([[-1.0, -0.0, 0.0], [-1.0, 0.0, -0.0]])) == [1, 1]


def test_argmax_refuses_what_is_not_finite() -> None:
    rows = torch.full((5, 2000), -1.0)
    rows[0, 1500] = NAN
    rows[1, 3] = INFINITY
    rows[2, :] = -INFINITY
    rows[3, :1999] = -INFINITY
    rows[4, 0] = -torch.finfo(torch.float32).max
    rows[4, 1:] = -INFINITY
    assert largest(rows) == [UNDECIDED, UNDECIDED, UNDECIDED, 1999, 0]


class Sampling:
    """One set of options and tokens seen, drawn from on the device and by the definition."""

    def __init__(self, vocab_size: int, options: dict[str, Any], seed: int = 5) -> None:
        rng = np.random.default_rng(seed)
        self.rules = SamplingRules(SamplingOptions(**options), vocab_size)
        self.seen = SeenTokens.none(vocab_size)
        self.seen.flags[rng.integers(vocab_size, size=vocab_size // 3)] = True
        used = rng.integers(vocab_size, size=vocab_size // 5)
        self.seen.flags[used] = True
        np.add.at(self.seen.generated, used, 1)
        bias = torch.zeros(vocab_size, dtype=torch.float64)
        bias[torch.from_numpy(self.rules.bias_ids)] = torch.from_numpy(self.rules.bias)
        self.counts = TokenCounts(
            torch.from_numpy(self.seen.flags).to(DEVICE),
            torch.from_numpy(self.seen.generated).to(DEVICE),
            bias.to(DEVICE),
        )
        self.work = SamplingWork.allocate(vocab_size, DEVICE)
        for name in SamplingWork.__slots__:
            buffer = getattr(self.work, name)
            buffer.fill_(NAN if buffer.is_floating_point() else -3)

    def on_device(self, logits: Tensor, u: float) -> int:
        ids = torch.full((1,), -9, dtype=torch.int32, device=DEVICE)
        self.work.options.copy_(torch.tensor(options_of(self.rules, u), dtype=torch.float64))
        sample(ids, logits.to(DEVICE), self.work, self.counts, self.rules)
        return int(ids)

    def defined(self, logits: Tensor, u: float) -> int:
        return sample_reference(logits.numpy(), self.rules, self.seen, u)


def draw(vocab_size: int, seed: int = 8, spread: float = 2.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return spread * torch.randn(vocab_size, generator=generator)


V = 1100 if DEVICE == "cpu" else 129280
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.21}
BIAS = {"logit_bias": {3: 4.5, 700: -INFINITY, 1050: 2.25}}
OPTIONS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 3.0, "min_p": 0.02},
    {"temperature": 0.7, **PENALTIES},
    {**BIAS, "temperature": 1.4},
    {"top_k": 7},
    {"top_p": 0.9},
    {"temperature": 1.5, "top_p": 0.999, "min_p": 1e-3},
    {"top_k": 40, "top_p": 0.8, **PENALTIES, **BIAS},
    {"temperature": 0.0, **PENALTIES},
    {"temperature": 0.0, **BIAS},
    {"temperature": 0.0},
]


@pytest.mark.parametrize("options", OPTIONS, ids=lambda options: "-".join(options) or "plain")
def test_the_token_is_the_one_of_the_definition(options: dict[str, Any]) -> None:
    sampling, logits = Sampling(V, options), draw(V)
    # A filter is many launches, and the interpreter is slow.
    few = (0.83,) if "top_k" in options or "top_p" in options else (0.03, 0.52, 0.97)
    for u in few if DEVICE == "cpu" else np.linspace(0.001, 0.999, 200):
        assert sampling.on_device(logits, float(u)) == sampling.defined(logits, float(u))


@pytest.mark.parametrize("filters", [{"top_k": 5}, {"top_p": 0.42}], ids=["top_k", "top_p"])
def test_of_equal_scores_the_lower_ids_are_kept(filters: dict[str, Any]) -> None:
    logits = torch.full((1100,), -1.25)
    logits[[40, 1030]] = 0.5
    sampling = Sampling(1100, filters)
    # Near 1 the last one that is kept comes, which tells how many there are.
    assert sampling.on_device(logits, 0.9999) == sampling.defined(logits, 0.9999)


def test_banned_tokens_never_come() -> None:
    logits = torch.full((1030,), -INFINITY)
    logits[[7, 1026]] = torch.tensor([1.0, 1.5])
    assert [Sampling(1030, {}).on_device(logits, u) for u in (0.1, 0.9)] == [7, 1026]
    assert Sampling(1030, {"top_k": 4}).on_device(logits, 0.9) == 1026
    assert Sampling(1030, {"top_p": 0.99}).on_device(logits, 0.1) == 7


def test_a_choice_on_the_edge_is_left_to_the_definition() -> None:
    logits = torch.zeros(8)
    assert Sampling(8, {}).on_device(logits, 0.25) == UNDECIDED
    assert Sampling(8, {}).on_device(logits, 0.0) == UNDECIDED
    assert Sampling(8, {"top_p": 0.5}).on_device(logits, 0.3) == UNDECIDED
    assert Sampling(8, {"top_p": 0.55}).on_device(logits, 0.3) == 1


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, **PENALTIES}, {"top_p": 0.9}])
@pytest.mark.parametrize("bad", [NAN, INFINITY])
def test_logits_that_are_not_fit_are_left_to_the_definition(
    bad: float, options: dict[str, Any]
) -> None:
    logits = draw(40)
    logits[17] = bad
    assert Sampling(40, options).on_device(logits, 0.5) == UNDECIDED
    assert Sampling(40, options).on_device(torch.full((40,), -INFINITY), 0.5) == UNDECIDED


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's, of numpy
def test_scores_at_the_end_of_the_range_are_clipped() -> None:
    logits = draw(40)
    options = {"logit_bias": {3: 1e308, 4: -1e308}, "repetition_penalty": 1e-3}
    sampling = Sampling(40, options)
    assert sampling.on_device(logits, 0.5) == sampling.defined(logits, 0.5)


def test_missing_counts_are_refused() -> None:
    sampling = Sampling(40, PENALTIES)
    sampling.counts = TokenCounts(None, None, None)
    with pytest.raises(ShapeError, match="counts"):
        sampling.on_device(draw(40), 0.5)

"""Hyper-connections against a derivation in plain Python floats, with epsilons large enough to be
seen.

At the released epsilon of 1e-6 no logits test notices an epsilon that is missing or misplaced, so
both are 1e-2 here, the streams are small and Sinkhorn runs two or three iterations.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from numeric import assert_close, relative_error

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.mhc import (
    HyperConstants,
    HyperMix,
    head_mix,
    hyper_mix,
    read_streams,
    write_streams,
)

HC = 4
WIDTH = 6
EPS = 1e-2
SITES = ("mean_square", "pre", "softmax", "columns", "rows")


@dataclass
class Case:
    """Inputs of one token: streams [4][6] and the parameters, float64 tensors."""

    streams: torch.Tensor
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor


def draw(rows: int, scales: int, seed: int = 5, tokens: int = 3) -> Case:
    """Streams of mean square near EPS, so that an epsilon beside it changes the result."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Case(
        streams=0.1 * normal(tokens, HC, WIDTH),
        fn=normal(rows, HC * WIDTH) / 3,
        base=normal(rows),
        scale=0.8 + 0.2 * normal(scales),
    )


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def mixes(case: Case, token: int, eps: float) -> list[float]:
    """(fn . x) / sqrt(mean(x^2) + eps), one value per row of fn."""
    x = [float(v) for stream in case.streams[token] for v in stream]
    norm = 1 / math.sqrt(sum(v * v for v in x) / len(x) + eps)
    return [sum(float(w) * v for w, v in zip(row, x, strict=True)) * norm for row in case.fn]


def derive(
    case: Case, token: int, iterations: int, sites: tuple[str, ...] = SITES
) -> tuple[list[float], list[float], list[list[float]]]:
    """(pre, post, comb[j][k]) of one token; epsilons only at the named sites."""

    def eps(site: str) -> float:
        return EPS if site in sites else 0.0

    mix = mixes(case, token, eps("mean_square"))
    base = [float(v) for v in case.base]
    s_pre, s_post, s_comb = (float(v) for v in case.scale)
    pre = [sigmoid(mix[j] * s_pre + base[j]) + eps("pre") for j in range(4)]
    post = [2 * sigmoid(mix[4 + j] * s_post + base[4 + j]) for j in range(4)]
    comb = []
    for j in range(4):
        row = [mix[8 + 4 * j + k] * s_comb + base[8 + 4 * j + k] for k in range(4)]
        powers = [math.exp(v - max(row)) for v in row]
        comb.append([p / sum(powers) + eps("softmax") for p in powers])
    for step in range(iterations):
        if step > 0:
            for j in range(4):
                total = sum(comb[j]) + eps("rows")
                comb[j] = [v / total for v in comb[j]]
        for k in range(4):
            total = sum(comb[j][k] for j in range(4)) + eps("columns")
            for j in range(4):
                comb[j][k] /= total
    return pre, post, comb


def derive_all(case: Case, iterations: int, sites: tuple[str, ...] = SITES) -> HyperMix:
    """`derive` for every token, as tensors."""
    tokens = [derive(case, t, iterations, sites) for t in range(len(case.streams))]
    pre, post, comb = (
        torch.tensor(part, dtype=torch.float64) for part in zip(*tokens, strict=True)
    )
    return HyperMix(pre, post, comb)


def constants(iterations: int) -> HyperConstants:
    return HyperConstants(iterations=iterations, hc_eps=EPS, norm_eps=EPS)


@pytest.mark.parametrize("iterations", [1, 2, 3, 20])
def test_mix_equals_the_scalar_derivation(iterations: int) -> None:
    case = draw(24, 3)
    got = hyper_mix(case.streams, case.fn, case.base, case.scale, constants(iterations))
    ref = derive_all(case, iterations)
    assert_close("pre", got.pre, ref.pre)
    assert_close("post", got.post, ref.post)
    assert_close("comb", got.comb, ref.comb)


@pytest.mark.parametrize("site", SITES)
def test_derivation_notices_an_epsilon_missing_at(site: str) -> None:
    case = draw(24, 3)
    without = derive_all(case, 2, tuple(s for s in SITES if s != site))
    whole = derive_all(case, 2)
    moved = max(
        relative_error(getattr(without, part), getattr(whole, part)) for part in ("pre", "comb")
    )
    assert moved > 1e-4


@pytest.mark.parametrize("other", [1, 3])
def test_derivation_notices_another_number_of_iterations(other: int) -> None:
    case = draw(24, 3)
    assert relative_error(derive_all(case, other).comb, derive_all(case, 2).comb) > 1e-4


def test_columns_are_normalised_last() -> None:
    case = draw(24, 3)
    exact = HyperConstants(iterations=2, hc_eps=1e-12, norm_eps=EPS)
    comb = hyper_mix(case.streams, case.fn, case.base, case.scale, exact).comb
    assert_close("column sums", comb.sum(1), torch.ones(3, HC, dtype=torch.float64), 1e-9)
    assert (comb.sum(2) - 1).abs().max() > 1e-4


def test_mix_in_float32_stays_within_the_limit() -> None:
    case = draw(24, 3)
    single = [t.float() for t in (case.streams, case.fn, case.base, case.scale)]
    got = hyper_mix(*single, constants(20))
    wide = Case(*(t.double() for t in single))
    assert_close("comb", got.comb, derive_all(wide, 20).comb)


def test_mix_of_bfloat16_streams_is_computed_in_float32() -> None:
    case = draw(24, 3)
    streams = case.streams.bfloat16()
    parameters = [t.float() for t in (case.fn, case.base, case.scale)]
    got = hyper_mix(streams, *parameters, constants(3))
    wide = Case(streams.double(), *(t.double() for t in parameters))
    assert got.comb.dtype == torch.float32
    assert_close("comb", got.comb, derive_all(wide, 3).comb)


def test_head_mix_equals_the_scalar_derivation() -> None:
    case = draw(4, 1)
    got = head_mix(case.streams, case.fn, case.base, case.scale, constants(2))
    ref = [
        [
            sigmoid(mix * float(case.scale[0]) + float(base)) + EPS
            for mix, base in zip(mixes(case, token, EPS), case.base, strict=True)
        ]
        for token in range(3)
    ]
    assert_close("head weights", got, torch.tensor(ref, dtype=torch.float64))


def test_read_is_the_weighted_sum_of_streams() -> None:
    case = draw(24, 3)
    pre = derive_all(case, 2).pre
    ref = [
        [sum(float(pre[t, j] * case.streams[t, j, i]) for j in range(HC)) for i in range(WIDTH)]
        for t in range(3)
    ]
    assert_close("input", read_streams(case.streams, pre), torch.tensor(ref, dtype=torch.float64))


def test_write_sums_over_the_first_index_of_comb() -> None:
    case = draw(24, 3)
    mix = derive_all(case, 2)
    output = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ref = torch.zeros(3, HC, WIDTH, dtype=torch.float64)
    for t in range(3):
        for k in range(HC):
            for i in range(WIDTH):
                ref[t, k, i] = mix.post[t, k] * output[t, i]
                for j in range(HC):
                    ref[t, k, i] += mix.comb[t, j, k] * case.streams[t, j, i]
    assert_close("streams", write_streams(case.streams, output, mix), ref)


def test_write_keeps_the_dtype_of_the_streams() -> None:
    case = draw(24, 3)
    mix = derive_all(case, 2)
    mix = HyperMix(mix.pre.float(), mix.post.float(), mix.comb.float())
    output = torch.zeros(3, WIDTH, dtype=torch.bfloat16)
    assert write_streams(case.streams.bfloat16(), output, mix).dtype == torch.bfloat16


def test_no_tokens_give_empty_results() -> None:
    case = draw(24, 3, tokens=0)
    got = hyper_mix(case.streams, case.fn, case.base, case.scale, constants(2))
    assert got.comb.shape == (0, HC, HC)


def test_parameters_of_another_width_are_refused() -> None:
    case = draw(24, 3)
    with pytest.raises(ShapeError, match="mhc"):
        hyper_mix(case.streams[:, :, :5], case.fn, case.base, case.scale, constants(2))

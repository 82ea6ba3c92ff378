"""The token chosen in C against the definition in numpy, at every instruction set: bit for bit."""

from __future__ import annotations

import itertools
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from guarded import Guarded

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import BackendUnavailableError, ConfigError, NumericError
from edgedsv4.kernels.native.library import library, pointer
from edgedsv4.kernels.sample import (
    SamplingRules,
    SeenTokens,
    exponential,
    running_sum,
    sample,
    sample_reference,
    weights,
)

lib, ffi = library()
pytestmark = pytest.mark.usefixtures("isa")
SIZES = [1, 7, 63, 64, 65, 200, 1031]
PENALTIES = {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2}
DRAWS = (0.0, 0.1, 0.5, 0.9, 1 - 2**-53)


def logits_of(size: int, *, is_coarse: bool = False) -> npt.NDArray[np.float32]:
    rng = np.random.default_rng(size)
    values = rng.normal(0, 3, size).astype(np.float32)
    if is_coarse:
        values = np.rint(values)
    values[rng.random(size) < 0.1] = -math.inf
    values[rng.integers(size)] = 1.0
    return values


def seen_of(size: int) -> SeenTokens:
    rng = np.random.default_rng(size + 1)
    seen = SeenTokens.none(size)
    seen.flags[rng.random(size) < 0.3] = True
    seen.generated[seen.flags] = rng.integers(0, 4, int(seen.flags.sum()))
    return seen


def check(values: npt.NDArray[np.float32], seen: SeenTokens, **options: object) -> None:
    """Same weights, and same tokens over the whole range of random numbers."""
    rules = SamplingRules(SamplingOptions(**options), values.size)
    expected = weights(values, rules, seen, backend="reference")
    np.testing.assert_array_equal(weights(values, rules, seen, backend="native"), expected)
    sums = running_sum(expected)
    places = sums[np.flatnonzero(expected)[:6]] / sums[-1]
    for u in (*DRAWS, *np.minimum(places, DRAWS[-1]), *np.nextafter(places, 0)):
        found = sample(values, rules, seen, float(u), backend="native")
        assert found == sample_reference(values, rules, seen, float(u)), u


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("is_coarse", [False, True])
def test_every_set_of_filters_keeps_what_the_definition_keeps(size: int, is_coarse: bool) -> None:
    values, seen = logits_of(size, is_coarse=is_coarse), seen_of(size)
    for top_k, top_p, min_p in itertools.product((0, 1, 5, 64, 500), (1.0, 0.9, 0.3), (0.0, 0.05)):
        check(values, seen, temperature=0.7, top_k=top_k, top_p=top_p, min_p=min_p)


@pytest.mark.parametrize("size", SIZES)
def test_bias_and_penalties_change_scores_as_the_definition_does(size: int) -> None:
    values, seen = logits_of(size, is_coarse=True), seen_of(size)
    bias = {i: [2.0, -3.0, -math.inf][i % 3] for i in range(0, size - 1, 5)}
    for changes in (PENALTIES, {"logit_bias": bias}, {**PENALTIES, "logit_bias": bias}):
        check(values, seen, **changes)
        check(values, seen, top_k=40, top_p=0.95, min_p=0.05, **changes)
        check(values, seen, temperature=0.0, **changes)


@pytest.mark.parametrize("temperature", [5e-324, 1e-310, 1e-300, 1e-3, 100.0])
def test_extreme_temperatures_agree(temperature: float) -> None:
    for size in SIZES:
        for top_p in (1.0, 0.9):
            check(logits_of(size), seen_of(size), temperature=temperature, top_p=top_p)


def test_scores_beyond_every_range_agree() -> None:
    values = np.array([3e38, -3e38, 1e-45, -1e-45, 0.0, -0.0, 1.0, -math.inf] * 20, np.float32)
    seen = seen_of(values.size)
    bias = {0: 1e308, 1: -1e308, 2: 1e308, 3: -math.inf, 9: -1.7e308}
    for repetition in (1e-3, 1.0, 100.0):
        for top_k, top_p in ((0, 1.0), (9, 0.5), (0, 0.7)):
            filters = {"top_k": top_k, "top_p": top_p, "repetition_penalty": repetition}
            check(values, seen, **filters)
            check(values, seen, logit_bias=bias, **filters)


@pytest.mark.parametrize("top_p", [1 - 2**-53, 0.999999, 0.5, 1e-300])
def test_a_flat_row_keeps_the_lowest_ids(top_p: float) -> None:
    values = np.full(1000, -2.5, np.float32)
    check(values, SeenTokens.none(1000), top_p=top_p)
    check(values, SeenTokens.none(1000), top_p=top_p, top_k=700)


def test_top_k_and_top_p_of_a_large_vocabulary_agree() -> None:
    values = np.random.default_rng(5).normal(0, 2.5, 20_000).astype(np.float32)
    for top_k, top_p in ((40, 0.95), (0, 0.95), (3000, 1.0), (0, 0.1), (19_999, 0.999)):
        check(values, SeenTokens.none(values.size), top_k=top_k, top_p=top_p)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_logit_anywhere_gives_no_token(bad: float) -> None:
    rules = SamplingRules(SamplingOptions(), 130)
    for place in (0, 63, 64, 127, 128, 129):
        values = logits_of(130)
        values[place] = bad
        with pytest.raises(NumericError, match=f"token {place} "):
            sample(values, rules, seen_of(130), 0.5)


def test_nothing_left_gives_no_token() -> None:
    values, seen = np.full(70, -math.inf, np.float32), SeenTokens.none(70)
    with pytest.raises(NumericError, match="every logit"):
        sample(values, SamplingRules(SamplingOptions(), 70), seen, 0.5)
    values[3] = 0.0
    banning = SamplingRules(SamplingOptions(logit_bias={3: -math.inf}), 70)
    with pytest.raises(ConfigError, match="bans every token"):
        sample(values, banning, seen, 0.5)


def test_native_takes_float32_only() -> None:
    rules, seen = SamplingRules(SamplingOptions(), 70), SeenTokens.none(70)
    values = logits_of(70)
    with pytest.raises(BackendUnavailableError, match="sample"):
        sample(values.astype(np.float64), rules, seen, 0.5, backend="native")
    strided = np.repeat(values, 2)[::2]
    assert sample(strided, rules, seen, 0.5) == sample(values, rules, seen, 0.5)
    assert sample(values.astype(np.float64), rules, seen, 0.5) == sample(values, rules, seen, 0.5)


@pytest.mark.parametrize("size", SIZES)
def test_nothing_is_written_behind_weights_and_scratch(size: int) -> None:
    values, seen = torch.from_numpy(logits_of(size)), seen_of(size)
    rules = SamplingRules(SamplingOptions(top_p=0.9, top_k=500), size)
    record = rules.native()
    record.seen = ffi.from_buffer("uint8_t[]", seen.flags)
    record.generated = ffi.from_buffer("int32_t[]", seen.generated)
    made = Guarded(size, dtype=torch.float64)
    scratch = Guarded(lib.dk_sample_scratch_bytes(size), dtype=torch.uint8)
    start = ffi.cast("double *", made.tensor.data_ptr())
    memory = ffi.cast("void *", scratch.tensor.data_ptr())
    assert lib.dk_sample(start, pointer(values), size, record, 0.5, memory) >= 0
    scratch.check()
    assert made.check().isfinite().all()


def test_exponentials_are_close_to_exact() -> None:
    x = np.concatenate((np.linspace(-699, 0, 5001), -np.geomspace(1e-300, 1, 500)))
    np.testing.assert_allclose(exponential(x), np.exp(x), rtol=5e-16)
    np.testing.assert_array_equal(exponential(np.array([0.0, -700.5, -math.inf])), [1, 0, 0])

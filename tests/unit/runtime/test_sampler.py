"""Sampler: each step against values worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import ConfigError, NumericError
from edgedsv4.runtime.sampler import Sampler, uniform

# The same seed must give the same text in a later version: these values may never change.
PINNED = [0.011546754286, 0.502379604274, 0.87207345482, 0.852809547354]
LOGITS = np.log(np.array([0.5, 0.25, 0.125, 0.125], dtype=np.float32))


def sampler(**options: object) -> Sampler:
    return Sampler(SamplingOptions(**{"seed": 1, **options}), len(LOGITS))


def kept(**options: object) -> list[int]:
    return np.flatnonzero(sampler(**options).probabilities(LOGITS)).tolist()


def test_temperature_one_is_softmax() -> None:
    np.testing.assert_allclose(
        sampler().probabilities(LOGITS), [0.5, 0.25, 0.125, 0.125], rtol=1e-6
    )


def test_temperature_divides_logits() -> None:
    got = sampler(temperature=0.5).probabilities(LOGITS)
    squares = np.array([0.25, 0.0625, 0.015625, 0.015625])
    np.testing.assert_allclose(got, squares / squares.sum(), rtol=1e-6)


def test_tiny_temperature_is_greedy_without_overflow() -> None:
    np.testing.assert_array_equal(
        sampler(temperature=1e-300).probabilities(LOGITS), [1.0, 0.0, 0.0, 0.0]
    )


def test_greedy_tie_takes_lowest_id() -> None:
    logits = np.array([0.0, 3.0, -0.0, 3.0], dtype=np.float32)
    assert sampler(temperature=0).sample(logits) == 1


def test_negative_zero_ties_with_zero() -> None:
    logits = np.array([-0.0, 0.0, -1.0, -1.0], dtype=np.float32)
    assert sampler(temperature=0).sample(logits) == 0


@pytest.mark.parametrize("size", [1, 7, 16, 33, 1000])
def test_greedy_finds_the_first_of_the_largest_wherever_it_stands(size: int) -> None:
    rng = np.random.default_rng(size)
    sampler = Sampler(SamplingOptions(temperature=0), size)
    for _ in range(50):
        logits = rng.integers(-4, 4, size).astype(np.float32)
        logits[rng.random(size) < 0.2] = -np.inf
        logits[rng.integers(size)] = 0.0
        assert sampler.sample(logits) == int(np.argmax(logits))
        assert sampler.sample(logits.astype(np.float64)) == int(np.argmax(logits))


def test_greedy_probabilities_are_one_hot() -> None:
    np.testing.assert_array_equal(sampler(temperature=0).probabilities(LOGITS), [1, 0, 0, 0])


def test_bias_and_penalty_beyond_float64_keep_their_order() -> None:
    chooser = sampler(logit_bias={0: -1e308, 1: -math.inf, 2: 1e308}, repetition_penalty=1e-3)
    chooser.observe([0, 1, 2])
    np.testing.assert_array_equal(chooser.probabilities(LOGITS), [0, 0, 1, 0])
    lowered = sampler(logit_bias=dict.fromkeys(range(3), -1e308), repetition_penalty=100)
    lowered.observe([0, 1, 2])
    np.testing.assert_array_equal(lowered.probabilities(LOGITS), [0, 0, 0, 1])


def test_only_token_left_is_chosen_however_low_it_is_pushed() -> None:
    banned = dict.fromkeys((0, 1, 2), -math.inf)
    chooser = sampler(logit_bias={**banned, 3: -1e308}, repetition_penalty=100)
    chooser.observe([3])
    assert chooser.sample(LOGITS) == 3


def test_bias_of_an_id_beyond_every_integer_type_is_refused() -> None:
    with pytest.raises(ConfigError, match="below 4, found 100000000000000000000"):
        sampler(logit_bias={10**20: 1.0})


def test_top_k_keeps_exactly_k_and_lower_ids_on_ties() -> None:
    assert kept(top_k=3) == [0, 1, 2]


def test_top_k_of_one_equals_greedy() -> None:
    assert sampler(top_k=1).sample(LOGITS) == 0


def test_top_k_above_vocabulary_keeps_all() -> None:
    assert kept(top_k=99) == [0, 1, 2, 3]


def test_top_k_with_banned_tokens_keeps_only_allowed_ones() -> None:
    logits = np.array([1.0, -math.inf, -math.inf, -math.inf], dtype=np.float32)
    assert np.flatnonzero(sampler(top_k=2).probabilities(logits)).tolist() == [0]


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    assert kept(top_p=0.6) == [0, 1]


def test_top_p_includes_the_token_that_crosses() -> None:
    assert kept(top_p=0.76) == [0, 1, 2]


def test_top_p_always_keeps_the_likeliest() -> None:
    assert kept(top_p=1e-12) == [0]


def test_top_p_applies_to_what_top_k_left() -> None:
    # After top-k 2 the first token has 2/3 of the mass, more than 0.6.
    assert kept(top_k=2, top_p=0.6) == [0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    assert kept(min_p=0.4) == [0, 1]


def test_min_p_of_one_keeps_only_ties_with_the_likeliest() -> None:
    logits = np.array([2.0, 2.0, 1.0, 0.0], dtype=np.float32)
    assert np.flatnonzero(sampler(min_p=1.0).probabilities(logits)).tolist() == [0, 1]


def test_logit_bias_is_added() -> None:
    assert sampler(temperature=0, logit_bias={3: 5.0}).sample(LOGITS) == 3


def test_minus_infinity_bias_bans() -> None:
    got = sampler(logit_bias={0: -math.inf}).probabilities(LOGITS)
    np.testing.assert_allclose(got, [0, 0.5, 0.25, 0.25], rtol=1e-6)


def test_bias_on_unknown_token_is_refused() -> None:
    with pytest.raises(ConfigError, match="below 4, found 4"):
        sampler(logit_bias={4: 1.0})


def test_banning_every_token_is_refused() -> None:
    bans = dict.fromkeys(range(4), -math.inf)
    with pytest.raises(ConfigError, match="bans every token"):
        sampler(logit_bias=bans).sample(LOGITS)


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_non_finite_logit_is_an_error_not_a_choice(value: float, temperature: float) -> None:
    logits = LOGITS.copy()
    logits[2] = value
    with pytest.raises(NumericError, match="token 2"):
        sampler(temperature=temperature).sample(logits)


def test_all_logits_minus_infinity_is_an_error() -> None:
    with pytest.raises(NumericError, match="every logit"):
        sampler().sample(np.full(4, -np.inf, dtype=np.float32))


def test_wrong_logit_count_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[4\], found \[3\]"):
        sampler().sample(LOGITS[:3])


def test_repetition_penalty_divides_positive_and_multiplies_negative() -> None:
    one = sampler(repetition_penalty=2.0)
    one.observe([0, 1])
    got = one.probabilities(np.array([4.0, -1.0, 0.0, 0.0], dtype=np.float32))
    expected = np.exp([2.0, -2.0, 0.0, 0.0])
    np.testing.assert_allclose(got, expected / expected.sum())


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    one = sampler(presence_penalty=0.5, frequency_penalty=0.25)
    one.observe([3, 3])
    one.accept(1)
    one.accept(1)
    got = one.probabilities(np.zeros(4, dtype=np.float32))
    expected = np.exp([0.0, -1.0, 0.0, 0.0])
    np.testing.assert_allclose(got, expected / expected.sum())


def test_same_seed_gives_same_tokens() -> None:
    def draw() -> list[int]:
        one = sampler(seed=77)
        ids = []
        for _ in range(50):
            ids.append(one.sample(LOGITS))
            one.accept(ids[-1])
        return ids

    assert draw() == draw()


def test_sample_without_accept_repeats_itself() -> None:
    one = sampler()
    assert len({one.sample(LOGITS) for _ in range(20)}) == 1


def test_missing_seed_draws_one_that_replays() -> None:
    first = sampler(seed=None)
    second = sampler(seed=first.seed)
    assert first.sample(LOGITS) == second.sample(LOGITS)


def test_uniform_numbers_are_pinned() -> None:
    draws = ((0, 0), (0, 1), (7, 0), (2**63 - 1, 5))
    assert [round(uniform(seed, index), 12) for seed, index in draws] == PINNED


@pytest.mark.parametrize("token_id", [-1, 4])
def test_unknown_token_is_refused(token_id: int) -> None:
    with pytest.raises(ConfigError, match="found"):
        sampler().accept(token_id)
    with pytest.raises(ConfigError, match="found"):
        sampler().observe([token_id])

"""Sampler properties over drawn logits and options, against a slow second derivation."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedsv4.config import SamplingOptions
from edgedsv4.runtime.sampler import Sampler

# A coarse grid makes equal logits frequent.
GRID = st.integers(-12, 12).map(lambda n: n / 4)
LOGITS = st.lists(GRID, min_size=1, max_size=24)
OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.sampled_from([0.25, 0.7, 1.0, 3.0]),
    top_k=st.integers(0, 26),
    top_p=st.sampled_from([1.0, 0.97, 0.9, 0.5, 0.1]),
    min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
    seed=st.integers(0, 2**63 - 1),
)


def slow_distribution(logits: list[float], options: SamplingOptions) -> list[float]:
    """The documented order, written with Python lists and exact sums."""
    ranked = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    if options.top_k:
        ranked = ranked[: options.top_k]
    best = logits[ranked[0]]
    weight = {i: math.exp((logits[i] - best) / options.temperature) for i in ranked}
    total = math.fsum(weight.values())
    if options.top_p < 1:
        count = next(
            (
                n
                for n in range(1, len(ranked) + 1)
                if math.fsum(weight[i] for i in ranked[:n]) >= options.top_p * total
            ),
            len(ranked),
        )
        ranked = ranked[:count]
    ranked = [i for i in ranked if weight[i] >= options.min_p]
    total = math.fsum(weight[i] for i in ranked)
    return [weight[i] / total if i in ranked else 0.0 for i in range(len(logits))]


def as_array(logits: list[float]) -> npt.NDArray[np.float32]:
    return np.array(logits, dtype=np.float32)


@given(LOGITS, OPTIONS)
def test_probabilities_equal_slow_derivation(logits: list[float], options: SamplingOptions) -> None:
    got = Sampler(options, len(logits)).probabilities(as_array(logits))
    np.testing.assert_allclose(got, slow_distribution(logits, options), rtol=1e-9, atol=1e-15)


@given(LOGITS, OPTIONS)
def test_sample_has_positive_probability(logits: list[float], options: SamplingOptions) -> None:
    sampler = Sampler(options, len(logits))
    assert sampler.probabilities(as_array(logits))[sampler.sample(as_array(logits))] > 0


@given(LOGITS, st.integers(0, 2**63 - 1))
def test_greedy_is_first_maximum(logits: list[float], seed: int) -> None:
    sampler = Sampler(SamplingOptions(temperature=0, seed=seed), len(logits))
    assert sampler.sample(as_array(logits)) == logits.index(max(logits))


@given(LOGITS, OPTIONS, st.floats(-3, 3))
def test_shifting_all_logits_changes_nothing(
    logits: list[float], options: SamplingOptions, shift: float
) -> None:
    moved = np.array(logits, dtype=np.float64) + np.float64(round(shift * 4) / 4)
    one = Sampler(options, len(logits))
    np.testing.assert_array_equal(
        one.probabilities(as_array(logits)), one.probabilities(moved.astype(np.float32))
    )


@pytest.mark.parametrize("seed", [0, 1, 2**63 - 1])
def test_frequencies_follow_probabilities(seed: int) -> None:
    logits = as_array([1.0, 0.0, -1.0, 2.0, -4.0])
    sampler = Sampler(SamplingOptions(top_p=0.95, seed=seed), 5)
    expected = sampler.probabilities(logits)
    counts = np.zeros(5)
    for _ in range(2000):
        token_id = sampler.sample(logits)
        sampler.accept(token_id)
        counts[token_id] += 1
    deviation = np.sqrt(2000 * expected * (1 - expected))
    assert (np.abs(counts - 2000 * expected) <= 4 * deviation).all()

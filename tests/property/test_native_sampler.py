"""Tokens chosen in C are those of the definition, over drawn rows, options and histories."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import given
from hypothesis import strategies as st

from edgedsv4.config import SamplingOptions
from edgedsv4.kernels.sample import SamplingRules, SeenTokens, sample, weights
from edgedsv4.runtime.sampler import Sampler

SIZE = st.sampled_from([1, 2, 63, 64, 65, 128, 150, 333])
RARE = np.array([3.4e38, -3.4e38, 1e-45, -0.0, 0.0, 88.0, -math.inf], np.float32)


@st.composite
def rows(draw: st.DrawFn) -> npt.NDArray[np.float32]:
    """Logits [V]: smooth, or so coarse that many are equal, some of them extreme."""
    size, seed = draw(SIZE), draw(st.integers(0, 2**32 - 1))
    rng = np.random.default_rng(seed)
    values = rng.normal(0, draw(st.sampled_from([0.0, 0.5, 3.0, 30.0])), size)
    if draw(st.booleans()):
        values = np.rint(values)
    is_rare = rng.random(size) < draw(st.sampled_from([0.0, 0.1, 0.9]))
    values = np.where(is_rare, rng.choice(RARE, size), values).astype(np.float32)
    values[rng.integers(size)] = 1.0
    return values


@st.composite
def cases(draw: st.DrawFn) -> tuple[npt.NDArray[np.float32], dict[str, Any], list[int]]:
    """Logits, options and the tokens generated so far."""
    values = draw(rows())
    ids = st.integers(0, values.size - 1)
    bias = st.one_of(st.floats(-5, 5), st.sampled_from([-math.inf, 1e308, -1e308]))
    options = {
        "temperature": draw(st.one_of(st.floats(0, 3), st.sampled_from([0.0, 1e-310, 100.0]))),
        "top_k": draw(st.one_of(st.just(0), st.integers(1, values.size + 1))),
        "top_p": draw(st.one_of(st.just(1.0), st.floats(1e-9, 1.0))),
        "min_p": draw(st.one_of(st.just(0.0), st.floats(0.0, 1.0))),
        "repetition_penalty": draw(st.one_of(st.just(1.0), st.floats(1e-3, 100.0))),
        "presence_penalty": draw(st.one_of(st.just(0.0), st.floats(-100, 100))),
        "frequency_penalty": draw(st.one_of(st.just(0.0), st.floats(-100, 100))),
        "logit_bias": draw(st.dictionaries(ids, bias, max_size=6)),
        "seed": draw(st.integers(0, 2**63 - 1)),
    }
    if len(options["logit_bias"]) == values.size:
        options["logit_bias"].popitem()
    for id_ in np.flatnonzero(np.isneginf(values)) if values.size < 3 else ():
        values[id_] = 0.0
    return values, options, draw(st.lists(ids, max_size=20))


@given(cases(), st.floats(0, 1, exclude_max=True))
def test_weights_and_tokens_are_the_same_in_c(
    case: tuple[npt.NDArray[np.float32], dict[str, Any], list[int]], u: float
) -> None:
    values, options, history = case
    options["logit_bias"] = {
        i: b for i, b in options["logit_bias"].items() if b > -math.inf or values[i] != 1.0
    }
    rules, seen = (
        SamplingRules(SamplingOptions(**options), values.size),
        SeenTokens.none(values.size),
    )
    for token_id in history:
        seen.flags[token_id] = True
        seen.generated[token_id] += 1
    np.testing.assert_array_equal(
        weights(values, rules, seen, backend="native"),
        weights(values, rules, seen, backend="reference"),
    )
    assert sample(values, rules, seen, u, backend="native") == sample(
        values, rules, seen, u, backend="reference"
    )


@given(cases())
def test_a_reply_is_the_same_with_either_backend(
    case: tuple[npt.NDArray[np.float32], dict[str, Any], list[int]],
) -> None:
    values, options, prompt = case
    values = np.where(np.isneginf(values), np.float32(-1), values)
    options["logit_bias"] = {i: b for i, b in options["logit_bias"].items() if b > -math.inf}
    replies = []
    for backend in ("native", "reference"):
        sampler = Sampler(SamplingOptions(**options), values.size, backend=backend)
        sampler.observe(prompt)
        reply = []
        for _ in range(8):
            reply.append(sampler.sample(values))
            sampler.accept(reply[-1])
        replies.append(reply)
    assert replies[0] == replies[1]

"""Sampling options as text: what is shown can be typed again."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dsv4_chat.sampling_text import SAMPLING_KEYS, option_help, option_text, with_option
from edgedsv4 import ConfigError, SamplingOptions

OPTIONS = st.builds(
    SamplingOptions,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1 << 24),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(
        st.integers(0, 200_000), st.floats(-1e6, 1e6) | st.just(-math.inf), max_size=5
    ),
    seed=st.none() | st.integers(0, (1 << 63) - 1),
    max_tokens=st.none() | st.integers(1, 1000),
)


@given(OPTIONS)
def test_text_gives_the_options_back(options: SamplingOptions) -> None:
    again = SamplingOptions()
    for key in SAMPLING_KEYS:
        again = with_option(again, key, option_text(options, key))
    assert again == options


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("temperature", "0.7"),
        ("temperature", "0"),
        ("top_k", "40"),
        ("seed", ""),
        ("logit_bias", "3=-1.5, 4=-inf"),
        ("logit_bias", ""),
    ],
)
def test_text_is_short(key: str, text: str) -> None:
    assert option_text(with_option(SamplingOptions(), key, text), key) == text


@pytest.mark.parametrize("key", SAMPLING_KEYS)
def test_every_option_is_explained(key: str) -> None:
    assert len(option_help(key)) > 20


def test_help_is_that_of_the_option() -> None:
    assert option_help("top_k") == "Keep the k likeliest tokens; 0 keeps all."


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("temperature", ""),
        ("temperature", "nan"),
        ("top_k", "1.5"),
        ("top_k", "-1"),
        ("top_p", "0"),
        ("logit_bias", "a=1"),
        ("logit_bias", "3"),
        ("logit_bias", "3=inf"),
        ("logit_bias", "-3=1"),
        ("seed", "-1"),
        ("max_tokens", "0"),
        ("heat", "1"),
    ],
)
def test_wrong_text_is_a_config_error(key: str, text: str) -> None:
    with pytest.raises(ConfigError):
        with_option(SamplingOptions(), key, text)

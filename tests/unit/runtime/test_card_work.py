"""Launches, activations and products of attention of a model's shape, counted by hand."""

from __future__ import annotations

import dataclasses

import pytest

from edgedsv4.runtime.card_work import (
    activation_bytes,
    attention_products,
    chunk_launches,
    token_launches,
)
from edgedsv4.runtime.synthetic_network import synthetic_config

FLASH = synthetic_config("flash")
ONE = dataclasses.replace(synthetic_config("flash", 1), compress_ratios=(0,))


def test_layers_that_select_launch_more() -> None:
    near, far = token_launches(FLASH, 2046), token_launches(FLASH, 2051)
    assert near == 43 * 14 + 6
    assert far == near + 21 * 4


def test_launches_of_a_chunk_are_in_proportion_to_layers() -> None:
    assert chunk_launches(FLASH) == 43 * chunk_launches(ONE)


def test_activations_of_a_token() -> None:
    floats = 6 * 4 * 4096 + 6 * 64 * 512
    assert activation_bytes(ONE) == 4 * floats + 2 * 2 * 6 * (4096 + 2048)


@pytest.mark.parametrize(
    ("ratio", "tokens", "rows", "scored"),
    [
        (0, 100, 50, 0),  # fewer than the window
        (0, 256, 128 - 32, 0),
        (128, 256, 96 + 1, 0),
        (4, 256, 96 + 32, 32),
        (4, 4096, 128 - 2 + 512 - 128, 512),  # half of them select 512 of up to 1,024
    ],
)
def test_attention_multiplies_with_what_a_token_sees(
    ratio: int, tokens: int, rows: float, scored: float
) -> None:
    config = dataclasses.replace(ONE, compress_ratios=(ratio,))
    expected = 2 * rows * 64 * 512 + scored * 64 * 128
    assert attention_products(config, tokens) == pytest.approx(tokens * expected)

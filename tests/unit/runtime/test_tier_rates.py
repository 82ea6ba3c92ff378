"""Rates that a model meets: types that are mixed, calls, and what nobody measured."""

from __future__ import annotations

import dataclasses

import pytest
from link_samples import CARD, expert_rate, links

from edgedsv4.runtime.tier_rates import speeds_of


def test_pieces_of_a_cards_step_are_medians() -> None:
    found = speeds_of(links(), {"MXFP4": 1}, None, has_card=True)
    assert (found.launch_seconds, found.overlapped_launch_seconds) == (3e-6, 2e-6)
    assert found.card_experts == pytest.approx(0.5 * 2000e9)
    assert found.card_chunk == ((100.0, 1 / 800e9),)
    assert found.calls == ((1e6, pytest.approx(30e-6)), (6e6, pytest.approx(80e-6)))


def test_where_launches_cannot_overlap_all_cost_the_same() -> None:
    card = dataclasses.replace(CARD, overlapped_launch_seconds=())
    found = speeds_of(links(card=card), {"MXFP4": 1}, None, has_card=True)
    assert found.overlapped_launch_seconds == 3e-6


def test_without_a_card_nothing_of_one_is_told() -> None:
    found = speeds_of(links(), {"MXFP4": 1}, None, has_card=False)
    assert (found.launch_seconds, found.card_experts, found.calls, found.card_chunk) == (
        0,
        0,
        (),
        (),
    )
    assert found.cpu_chunk == ((1.0, 1 / 120e9), (4.0, 1 / 100e9), (16.0, 1 / 50e9))


def test_calls_of_mixed_types_take_their_shares_of_the_time() -> None:
    (call, *_) = (rate for rate in links().calls if rate.experts == 1)
    both = (call, dataclasses.replace(call, block_type="Q4_K", runs=(90e-6,)))
    only = dataclasses.replace(call, experts=6)
    found = speeds_of(links(calls=(*both, only)), {"MXFP4": 2, "Q4_K": 1}, None, has_card=True)
    assert found.calls == ((pytest.approx(1e6), pytest.approx((2 * 30e-6 + 90e-6) / 3)),)


def test_only_numbers_of_tokens_that_all_types_have_are_points() -> None:
    rates = (
        expert_rate("A", 8, 1, 40e9),
        expert_rate("A", 8, 4, 40e9),
        expert_rate("B", 8, 1, 10e9),
    )
    found = speeds_of(links(experts=rates), {"A": 1, "B": 1}, None, has_card=False)
    assert found.cpu_chunk == ((1.0, pytest.approx((1 / 40e9 + 1 / 10e9) / 2)),)


def test_products_are_those_with_the_most_tokens() -> None:
    rates = (expert_rate("A", 8, 16, 2e9), expert_rate("A", 8, 64, 1e9))
    assert speeds_of(links(experts=rates), {"A": 1}, None, has_card=False).products == (
        pytest.approx(64e9)
    )


def test_dense_weights_are_multiplied_at_the_rates_of_their_types() -> None:
    rates = (
        expert_rate("A", 8, 64, 2e9),
        expert_rate("Q8_0", 8, 64, 1e9),
        expert_rate("BF16", 8, 64, 0.25e9),
    )
    types = {"Q8_0": 3, "BF16": 1, "Q3_K": 4}
    found = speeds_of(links(experts=rates), {"A": 1}, None, has_card=False, dense_types=types)
    # A type that nobody measured counts as the experts' do.
    seconds = 3 / 1e9 + 1 / 0.25e9 + 4 / 2e9
    assert found.dense_products == pytest.approx(64 * 8 / seconds)
    assert found.float_products == pytest.approx(64 * 0.25e9)
    without = speeds_of(links(experts=rates[:1]), {"A": 1}, None, has_card=False)
    assert (without.dense_products, without.float_products) == (0, 0)

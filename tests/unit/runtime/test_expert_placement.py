"""Which experts live on a card, by bytes and counts alone."""

from __future__ import annotations

import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.expert_placement import LayerExperts, place_experts, staging_bytes
from edgedsv4.runtime.expert_rates import ExpertRates, few_tokens
from edgedsv4.runtime.synthetic_network import synthetic_config

ONE_KIND = (LayerExperts(("a",), 10, 12),) * 3
TWO_KINDS = (
    LayerExperts(("a",), 10, 12),
    LayerExperts(("b",), 20, 25),
    LayerExperts(("a",), 10, 12),
)


def test_layers_share_evenly() -> None:
    chosen = place_experts(ONE_KIND, 8, 10_000, least_staged=2)
    assert chosen.resident == chosen.total == 24
    room = staging_bytes(ONE_KIND, 2) + 7 * 10 + 9
    chosen = place_experts(ONE_KIND, 8, room, least_staged=2)
    assert chosen.placement.resident == ((0, 1, 2), (0, 1), (0, 1))
    assert chosen.resident_bytes == 70


@pytest.mark.parametrize("layers", [ONE_KIND, TWO_KINDS], ids=["one kind", "two kinds"])
@pytest.mark.parametrize("budget", [0, 100, 300, 450, 900])
def test_a_budget_is_kept_and_used(layers: tuple[LayerExperts, ...], budget: int) -> None:
    chosen = place_experts(layers, 8, budget, least_staged=2)
    least = staging_bytes(layers, 2)
    assert chosen.staging_bytes >= least
    taken = chosen.resident_bytes + chosen.staging_bytes
    assert taken <= max(budget, least)
    ids = chosen.placement.resident
    assert chosen.resident_bytes == sum(
        len(own) * layer.card_bytes for own, layer in zip(ids, layers, strict=True)
    )
    is_full = all(len(own) == 8 for own in ids)
    assert is_full or budget - taken < max(layer.card_bytes for layer in layers) or budget < least


def test_every_kind_has_slots_for_passing_experts() -> None:
    assert staging_bytes(ONE_KIND, 3) == 2 * 3 * (10 + 12)
    assert staging_bytes(TWO_KINDS, 3) == 2 * 3 * (10 + 20 + 25)


def test_counts_choose_what_is_worth_most_per_byte() -> None:
    counts = [[9, 1, 1, 8], [30, 1, 1, 12], [1, 9, 1, 1]]
    room = staging_bytes(TWO_KINDS, 1) + 10 * 3 + 20
    chosen = place_experts(TWO_KINDS, 4, room, least_staged=1, counts=counts)
    assert chosen.placement.resident == ((0, 3), (0,), (1,))


def test_counts_of_another_shape_are_refused() -> None:
    with pytest.raises(ConfigError, match="counts of 3 layers with 4 experts"):
        place_experts(ONE_KIND, 4, 1000, least_staged=1, counts=[[1] * 4, [1] * 3, [1] * 4])


def test_few_tokens_are_the_cpus_and_many_the_cards() -> None:
    config = synthetic_config("flash")
    rates = ExpertRates(read=100e9, operations=5e12, link=50e9)
    chosen = [rates.prefers_cpu(config, 7_077_888, tokens) for tokens in (1, 8, 64, 512, 2048)]
    assert chosen == [True, True, True, True, False]
    assert not ExpertRates(40e9, 5e12, 50e9).prefers_cpu(config, 7_077_888, 1)


@pytest.mark.parametrize(
    ("instructions", "has_int8", "most"),
    [("avx512-vnni", True, 167), ("amx", True, 167), ("avx2", True, 68), ("amx", False, 68)],
)
def test_with_on_a_chunk_alone_decides_who_computes_it(
    instructions: str, has_int8: bool, most: int
) -> None:
    config = synthetic_config("flash")
    chosen = [few_tokens(config, instructions, n, has_int8=has_int8) for n in range(1, 1000)]
    assert chosen == [n <= most for n in range(1, 1000)]

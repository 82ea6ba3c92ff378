"""The rates that a model meets on a machine, from what was measured of its links.

Experts of mixed block types take the time of each type, weighted by the elements of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from edgedsv4.runtime.rate_curves import seconds_per_weight
from edgedsv4.runtime.tier_speed import EXCHANGE_SECONDS, Speeds

if TYPE_CHECKING:
    from edgedsv4.runtime.links import DriveRate, ExpertRate, Links

Rates = Callable[[str], "tuple[ExpertRate, ...]"]


def speeds_of(
    links: Links,
    block_types: Mapping[str, int],
    drive: DriveRate | None,
    *,
    has_card: bool,
    dense_types: Mapping[str, int] | None = None,
) -> Speeds:
    """The rates that a model meets on a machine.

    Args:
        links: what was measured.
        block_types: elements of its experts by storage type.
        drive: that holds it; None leaves that rate unknown.
        has_card: whether a card computes.
        dense_types: elements of its dense weights by storage type; types that were not measured
            count as the experts' do.
    """
    chunk = _points(links.expert_rates, block_types)
    one, many = (_seconds(links.expert_rates, block_types, count) for count in (1, _MOST))
    per_weight = _bytes_per_weight(links, block_types)
    card = links.card if has_card else None
    on_card = _points(links.card_rates, block_types) if has_card else ()
    plain = 0.0 if card is None else _median(card.launch_seconds)
    return Speeds(
        memory=links.dram_rate,
        experts=per_weight / one if one else 0.0,
        products=_MOST / many if many else 0.0,
        dense_products=_dense_products(links, dense_types or {}, many),
        float_products=_MOST / floats if (floats := _seconds_of_floats(links)) else 0.0,
        drive=0.0 if drive is None else drive.best.median,
        vram=0.0 if card is None else _median(card.read or card.copy),
        to_card=0.0 if card is None else _median(card.to_card),
        card_products=0.0 if card is None else _median(card.products),
        exchange_seconds=(
            EXCHANGE_SECONDS if card is None else _median(card.exchange_seconds) or EXCHANGE_SECONDS
        ),
        launch_seconds=plain,
        overlapped_launch_seconds=(
            0.0 if card is None else _median(card.overlapped_launch_seconds) or plain
        ),
        card_experts=per_weight / on_card[0][1] if on_card and on_card[0][0] == 1 else 0.0,
        calls=_calls(links, block_types) if has_card else (),
        cpu_chunk=chunk,
        card_chunk=on_card[1:] if on_card and on_card[0][0] == 1 else on_card,
    )


FLOAT_TYPE = "BF16"
"""Its products have float32 activations, as those with rows of the cache."""
_MOST = 1 << 20
"""Tokens of an expert at which nothing but its products takes time."""


def _median(runs: Sequence[float]) -> float:
    return median(runs) if runs else 0.0


def _seconds(rates: Rates, block_types: Mapping[str, int], tokens: int) -> float | None:
    """Seconds of a stored weight with so many tokens; None when a type was not measured."""
    seconds = 0.0
    for name, elements in block_types.items():
        each = seconds_per_weight(rates(name), tokens)
        if each is None:
            return None
        seconds += elements * each
    return seconds / max(1, sum(block_types.values()))


def _dense_products(links: Links, dense_types: Mapping[str, int], usual: float | None) -> float:
    """Multiplications with an addition per second with dense weights; 0 is unknown."""
    seconds = 0.0
    for name, elements in dense_types.items():
        each = seconds_per_weight(links.expert_rates(name), _MOST) or usual
        if each is None:
            return 0.0
        seconds += elements * each
    return _MOST * sum(dense_types.values()) / seconds if seconds else 0.0


def _seconds_of_floats(links: Links) -> float | None:
    """Of a weight with very many tokens, of the type that is multiplied as cached rows are."""
    return seconds_per_weight(links.expert_rates(FLOAT_TYPE), _MOST)


def _points(rates: Rates, block_types: Mapping[str, int]) -> tuple[tuple[float, float], ...]:
    """(tokens, seconds of a stored weight) by tokens, of those that all types were measured at."""
    measured = [{rate.tokens for rate in rates(name)} for name in block_types]
    common = set.intersection(*measured) if measured else set()
    found = ((float(count), _seconds(rates, block_types, count)) for count in sorted(common))
    return tuple((count, seconds) for count, seconds in found if seconds)


def _bytes_per_weight(links: Links, block_types: Mapping[str, int]) -> float:
    nbytes = 0.0
    for name, elements in block_types.items():
        rates = links.expert_rates(name) or links.card_rates(name)
        nbytes += elements * (rates[0].bytes_per_weight if rates else 0.0)
    return nbytes / max(1, sum(block_types.values()))


def _calls(links: Links, block_types: Mapping[str, int]) -> tuple[tuple[float, float], ...]:
    """(weights, seconds) of calls of the CPU, with as many experts as all types were measured."""
    total = max(1, sum(block_types.values()))
    found: dict[int, tuple[float, float, int]] = {}
    for name, elements in block_types.items():
        for rate in links.call_rates(name):
            weights, seconds, types = found.get(rate.experts, (0.0, 0.0, 0))
            share = elements / total
            found[rate.experts] = (
                weights + share * rate.experts * rate.expert_weights,
                seconds + share * rate.median,
                types + 1,
            )
    whole = (entry for entry in found.values() if entry[2] == len(block_types))
    return tuple(sorted((weights, seconds) for weights, seconds, _ in whole))

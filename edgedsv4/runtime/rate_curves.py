"""Times between and beyond those that were measured: straight lines through the nearest."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from edgedsv4.runtime.links import ExpertRate


def seconds_per_weight(rates: Iterable[ExpertRate], tokens: float) -> float | None:
    """Seconds that the CPU needs for one stored weight with so many tokens at once.

    Between measured numbers of tokens along a straight line; above the largest, time grows with the
    products. Fewer than the smallest take as long as the smallest.

    Args:
        rates: of one block type and number of threads, by tokens ascending.
        tokens: tokens that share the weight.

    Returns:
        Seconds, or None without any rate.
    """
    known = tuple((float(rate.tokens), 1 / rate.median) for rate in rates)
    return seconds_between(known, tokens) if known else None


def seconds_between(known: Sequence[tuple[float, float]], tokens: float) -> float:
    """As `seconds_per_weight`, of at least one pair of tokens and seconds, by tokens ascending."""
    if tokens <= known[0][0]:
        return known[0][1]
    for (low, short), (high, long) in itertools.pairwise(known):
        if tokens <= high:
            return short + (long - short) * (tokens - low) / (high - low)
    most, longest = known[-1]
    return longest * tokens / most


def seconds_of_call(known: Sequence[tuple[float, float]], weights: float) -> float:
    """Seconds of a call that computes so many weights, from measured pairs by weights ascending.

    Below the fewest and above the most on the line through the two nearest, but never less than in
    proportion to the nearest.
    """
    least, most = known[0], known[-1]
    if len(known) < 2 or not least[0] < most[0]:
        return least[1] * weights / least[0]
    pair = next((two for two in itertools.pairwise(known) if weights <= two[1][0]), known[-2:])
    (low, short), (high, long) = pair
    slope = max(0.0, (long - short) / (high - low))
    edge = least if weights < least[0] else most
    if least[0] <= weights <= most[0]:
        return short + (long - short) * (weights - low) / (high - low)
    return max(edge[1] + slope * (weights - edge[0]), min(edge[1], edge[1] * weights / edge[0]))

"""How far a share counted on a few items may lie from the true one: binomial bounds.

A test that runs 20 items must not fail by bad luck, and must fail when the model got worse. So the
true rate is first bounded by what a larger measurement saw, and the number of successes is then
bounded by what 20 items of that rate can give.
"""

from __future__ import annotations

import math


def interval(successes: float, count: int, *, z: float = 1.96) -> tuple[float, float]:
    """Wilson's score interval of a rate.

    Args:
        successes: out of `count`; a sum of scores of 0..1 is taken as one.
        count: items, at least 1.
        z: half width in standard deviations; 1.96 covers 95 %.
    """
    rate, square = successes / count, z * z / count
    middle = (rate + square / 2) / (1 + square)
    spread = z / (1 + square) * math.sqrt(rate * (1 - rate) / count + square / count / 4)
    # Rounding must not put the rate itself outside.
    return max(0.0, min(rate, middle - spread)), min(1.0, max(rate, middle + spread))


def least_successes(count: int, rate: float, *, risk: float = 1e-3) -> int:
    """The smallest number of successes that is no surprise.

    Args:
        count: items.
        rate: probability of a success.
        risk: probability of fewer successes, at most.
    """
    below = 0.0
    for successes in range(count + 1):
        below += _probability(successes, count, rate)
        if below > risk:
            return successes
    return count


def most_successes(count: int, rate: float, *, risk: float = 1e-3) -> int:
    """The largest number of successes that is no surprise; the mirror of `least_successes`."""
    return count - least_successes(count, 1 - rate, risk=risk)


def band(measured: tuple[float, int], count: int, *, risk: float = 1e-3) -> tuple[int, int]:
    """Successes to expect of `count` new items, lowest and highest.

    Args:
        measured: successes and items of the measurement that the band is made from.
        count: items of the new one.
        risk: probability, at each side, of leaving the band although the rate lies inside the
            measurement's 95 % interval.
    """
    low, high = interval(*measured)
    return least_successes(count, low, risk=risk), most_successes(count, high, risk=risk)


def _probability(successes: int, count: int, rate: float) -> float:
    ways = math.comb(count, successes)
    return float(ways * rate**successes * (1 - rate) ** (count - successes))

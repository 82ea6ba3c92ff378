"""Random choices that know their price: the nats of everything drawn add up to an entropy floor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import TypeVar

T = TypeVar("T")

_LOG = [0.0, *(math.log(n) for n in range(1, 4096))]


class Draw:
    """A seeded random source; `nats` is minus the log probability of its draws so far.

    The sum is the exact entropy floor of a text when different draws give different texts.
    """

    __slots__ = ("nats", "rng")

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.nats = 0.0

    def pick(self, options: Sequence[T]) -> T:
        """One of the options, each equally likely."""
        n = len(options)
        self.nats += _LOG[n] if n < 4096 else math.log(n)
        return options[int(self.rng.random() * n)]

    def integer(self, low: int, high: int) -> int:
        """An integer of low..high, each equally likely."""
        n = high - low + 1
        self.nats += math.log(n)
        return low + int(self.rng.random() * n)

    def chance(self, probability: float) -> bool:
        """True with this probability, which lies strictly between 0 and 1."""
        is_hit = self.rng.random() < probability
        self.nats -= math.log(probability if is_hit else 1 - probability)
        return is_hit

    def sample(self, options: Sequence[T], count: int) -> list[T]:
        """Some of the options in random order, each at most once."""
        n = len(options)
        self.nats += sum(math.log(n - i) for i in range(count))
        return self.rng.sample(options, count)

    def weighted(self, options: Sequence[T], weights: Sequence[float]) -> T:
        """One of the options, with these relative weights."""
        i = self.rng.choices(range(len(options)), weights)[0]
        self.nats -= math.log(weights[i] / sum(weights))
        return options[i]

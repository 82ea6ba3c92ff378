"""Which expert has to go when another needs its slot: the policies that exist.

`AgedFrequency` (`runtime/aged_frequency.py`) is what the program uses. The others are what it is
compared with: LRU, the never ageing counters of SGLang's Expert Pack, and Belady's policy, which
knows the future and therefore serves replay alone.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, get_args

from edgedsv4.config import ReplayPolicy
from edgedsv4.errors import ConfigError
from edgedsv4.runtime.aged_frequency import AgedFrequency, Doubles

if TYPE_CHECKING:
    from edgedsv4.runtime.expert_cache import CachePolicy

_MAX_COUNT = 255
_NEVER = 1 << 62


class LeastRecentlyUsed:
    """The expert whose last selection is longest ago goes."""

    def __init__(self) -> None:
        self._order: dict[int, None] = {}  # oldest use first

    def used(self, keys: Sequence[int], weight: float) -> None:  # noqa: ARG002  # of the protocol
        """Make experts of the cache the newest."""
        order = self._order
        for key in keys:
            if key in order:
                del order[key]
                order[key] = None

    def inserted(self, key: int) -> None:
        """A new expert is the newest."""
        self._order[key] = None

    def removed(self, key: int) -> None:
        """Forget an expert."""
        del self._order[key]

    def make_room(
        self,
        newcomer: int,  # noqa: ARG002  # of the protocol
        is_protected: Callable[[int], bool],
        *,
        may_refuse: bool,  # noqa: ARG002
    ) -> int | None:
        """The oldest expert that is not protected."""
        for key in self._order:
            if not is_protected(key):
                del self._order[key]
                return key
        return None

    def end_step(self, tokens: int) -> None:
        """Age is an order here, not a time."""


class ReuseCounts:
    """SGLang's `reuse-lfu-lru-v2`: the smallest count of uses goes, of equals the oldest.

    A count stops at 255, survives eviction and never decays. In prefill the newest of equals goes.
    """

    def __init__(self) -> None:
        self._counts: defaultdict[int, int] = defaultdict(int)
        # Experts of the cache by count, oldest use first.
        self._groups: tuple[dict[int, None], ...] = tuple({} for _ in range(_MAX_COUNT + 1))
        self._is_prefill = False

    def used(self, keys: Sequence[int], weight: float) -> None:
        """Count; a weight below 1 means prefill."""
        self._is_prefill = weight < 1.0
        for key in keys:
            count = self._counts[key]
            after = self._counts[key] = min(count + 1, _MAX_COUNT)
            if key in self._groups[count]:
                del self._groups[count][key]
                self._groups[after][key] = None

    def inserted(self, key: int) -> None:
        """A new expert joins those of its count."""
        self._groups[self._counts[key]][key] = None

    def removed(self, key: int) -> None:
        """An expert goes, its count stays."""
        del self._groups[self._counts[key]][key]

    def make_room(
        self,
        newcomer: int,  # noqa: ARG002  # of the protocol
        is_protected: Callable[[int], bool],
        *,
        may_refuse: bool,  # noqa: ARG002
    ) -> int | None:
        """The expert with the smallest count that is not protected."""
        for group in self._groups:
            for key in reversed(group) if self._is_prefill else group:
                if not is_protected(key):
                    del group[key]
                    return key
        return None

    def end_step(self, tokens: int) -> None:
        """Nothing ages."""


class Belady:
    """The expert that is not needed for the longest time goes: no policy has fewer misses.

    Args:
        future: the keys of every call of `used` that will follow, in order.
    """

    def __init__(self, future: Iterable[Sequence[int]]) -> None:
        self._calls: defaultdict[int, list[int]] = defaultdict(list)
        for call, keys in enumerate(future):
            for key in dict.fromkeys(keys):
                self._calls[key].append(call)
        for calls in self._calls.values():
            calls.reverse()
        self._next: dict[int, int] = {}  # of experts in the cache
        self._heap: list[tuple[int, int]] = []  # (-next call, key), some of them outdated

    def used(self, keys: Sequence[int], weight: float) -> None:  # noqa: ARG002  # of the protocol
        """A call that was foreseen has come."""
        for key in dict.fromkeys(keys):
            self._calls[key].pop()
            if key in self._next:
                self.inserted(key)

    def inserted(self, key: int) -> None:
        """Note when an expert of the cache is needed next."""
        self._next[key] = self._next_call(key)
        heapq.heappush(self._heap, (-self._next[key], key))

    def removed(self, key: int) -> None:
        """Forget an expert."""
        del self._next[key]

    def make_room(
        self, newcomer: int, is_protected: Callable[[int], bool], *, may_refuse: bool
    ) -> int | None:
        """The expert whose next use is farthest away; refuses who is needed even later."""
        heap, passed = self._heap, []
        found = None
        while heap and found is None:
            entry = heapq.heappop(heap)
            if self._next.get(entry[1]) != -entry[0]:
                continue
            if is_protected(entry[1]):
                passed.append(entry)
            else:
                found = entry
        for entry in passed:
            heapq.heappush(heap, entry)
        if found is None:
            return None
        if may_refuse and self._next_call(newcomer) >= -found[0]:
            heapq.heappush(heap, found)
            return None
        del self._next[found[1]]
        return found[1]

    def end_step(self, tokens: int) -> None:
        """The future is counted in calls."""

    def _next_call(self, key: int) -> int:
        calls = self._calls[key]
        return calls[-1] if calls else _NEVER


def make_policy(
    name: str,
    layers: int,
    experts: int,
    *,
    prior: Doubles | None = None,
    future: Iterable[Sequence[int]] = (),
) -> CachePolicy:
    """A policy by its name.

    Args:
        name: which one.
        layers: of the model.
        experts: routed experts per layer.
        prior: [layers, experts], uses per token in a corpus, for `aged`.
        future: every call of `used` that will follow, for `belady`.

    Raises:
        ConfigError: no policy has this name.
    """
    match name:
        case "aged":
            return AgedFrequency(layers, experts, prior)
        case "lru":
            return LeastRecentlyUsed()
        case "lfu":
            return ReuseCounts()
        case "belady":
            return Belady(future)
    names = ", ".join(get_args(ReplayPolicy))
    raise ConfigError(f"policy must be one of {names}, found {name!r}", name="policy")

"""The books of an expert store: which slot holds what, who uses it, what is being read into it.

Two kinds of slots: those of the cache, where a policy decides who stays, and a few for staging,
where an expert stays only until it was used. Nothing here reads or waits, and callers hold a lock.
An expert is *published* when its bytes are in; a read that fails leaves its slot empty.

A claim keeps an expert that somebody asked for: published ones can then not be evicted, and one
that is still being read is kept as soon as it is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.runtime.expert_cache import ExpertCache

if TYPE_CHECKING:
    from edgedsv4.runtime.expert_cache import CachePolicy

Key = tuple[int, int]
"""(layer, expert)."""


@dataclass(slots=True)
class Reading:
    """A read that is under way."""

    key: Key
    slot: int
    is_staged: bool
    is_prefetch: bool
    """Nobody had asked for it when it began."""
    job: int = 0
    claims: int = 0


class SlotBooks:
    """Slots of one bank.

    Args:
        slots: physical slots by number: those of the cache first, then those for staging.
        cached: how many of them the cache gets, at least one.
        policy: of the cache.
        on_gone: told of every expert that leaves the cache, before its slot is used again.
    """

    def __init__(
        self,
        slots: Iterable[int],
        cached: int,
        policy: CachePolicy,
        on_gone: Callable[[Key], None] | None = None,
    ) -> None:
        places = list(slots)
        self.cache = ExpertCache(cached, policy)
        self.readings: dict[Key, Reading] = {}
        self.unused_prefetch: set[Key] = set()
        """Published experts that were read ahead and not asked for yet."""
        self.prefetch_wasted = 0
        """Experts that were read ahead and went unused."""
        self._places = places[:cached]
        self._free_staging = places[cached:]
        self._staged: dict[Key, int] = {}
        self._claims: dict[Key, int] = {}
        self._owners: dict[int, Key] = {}
        self._on_gone = on_gone

    @property
    def free_staging(self) -> int:
        """Staging slots that hold nothing."""
        return len(self._free_staging)

    def cached(self) -> list[tuple[Key, int]]:
        """Published experts of the cache, each with its physical slot."""
        return [(key, slot) for slot, key in self._owners.items()]

    def find(self, key: Key) -> int | None:
        """Physical slot of a published expert."""
        place = self.cache.find(*key)
        return self._staged.get(key) if place is None else self._places[place]

    def claim(self, key: Key) -> None:
        """Keep a published expert, or one that is being read."""
        reading = self.readings.get(key)
        if reading is not None:
            reading.claims += 1
        else:
            self._claims[key] = self._claims.get(key, 0) + 1
            self.unused_prefetch.discard(key)

    def release(self, key: Key) -> None:
        """Take a claim back; a staged expert that nobody claims any more is gone."""
        reading = self.readings.get(key)
        if reading is not None:
            reading.claims -= 1
            return
        left = self._claims.pop(key, 0) - 1
        if left > 0:
            self._claims[key] = left
        elif key in self._staged:
            self._free_staging.append(self._staged.pop(key))

    def begin(
        self, key: Key, is_kept: Callable[[int, int], bool], *, is_prefetch: bool = False
    ) -> Reading | None:
        """Find a slot for an expert that is neither published nor being read.

        Args:
            key: the expert.
            is_kept: whether a (layer, expert) must not go for it; those that are claimed never do.
            is_prefetch: nobody waits for it.

        Returns:
            The read to begin; None when there is no slot at the moment.
        """
        claims = self._claims
        place = self.cache.take(
            *key,
            protected=lambda layer, expert: (layer, expert) in claims or is_kept(layer, expert),
            # What the policy would not keep can still pass through.
            may_refuse=bool(self._free_staging),
        )
        slot = None
        if place is not None:
            slot = self._places[place]
            self._forget_owner(slot)
        elif self._free_staging:
            slot = self._free_staging.pop()
        if slot is None:
            return None
        reading = Reading(key, slot, place is None, is_prefetch)
        self.readings[key] = reading
        return reading

    def publish(self, key: Key) -> None:
        """The bytes of a read are in."""
        reading = self.readings.pop(key)
        if reading.is_staged:
            self._staged[key] = reading.slot
        else:
            self.cache.publish(*key)
            self._owners[reading.slot] = key
        if reading.claims:
            self._claims[key] = reading.claims
        elif reading.is_prefetch:
            self.unused_prefetch.add(key)
        elif reading.is_staged:
            self._free_staging.append(self._staged.pop(key))

    def give_up(self, key: Key) -> None:
        """The bytes of a read did not come; its claims are void."""
        reading = self.readings.pop(key)
        if reading.is_staged:
            self._free_staging.append(reading.slot)
        else:
            self.cache.give_up(*key)

    def drop_staged(self, is_wanted: Callable[[int, int], bool]) -> None:
        """Empty staging slots that nobody claims and `is_wanted` does not name."""
        if not self._staged:
            return
        for key in [k for k in self._staged if k not in self._claims and not is_wanted(*k)]:
            self._free_staging.append(self._staged.pop(key))
            self._count_waste(key)

    def add_staging(self, slot: int) -> None:
        """A slot that was out of the books is free for staging."""
        self._free_staging.append(slot)

    def _forget_owner(self, slot: int) -> None:
        key = self._owners.pop(slot, None)
        if key is not None:
            if self._on_gone is not None:
                self._on_gone(key)
            self._count_waste(key)

    def _count_waste(self, key: Key) -> None:
        if key in self.unused_prefetch:
            self.unused_prefetch.discard(key)
            self.prefetch_wasted += 1

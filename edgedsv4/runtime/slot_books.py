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
from typing import TYPE_CHECKING, Protocol

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


class SlotWatcher(Protocol):
    """Somebody who knows what the cache holds, without asking."""

    def came(self, key: Key, slot: int) -> None:
        """An expert stays in a physical slot."""

    def gone(self, key: Key) -> None:
        """An expert leaves; its slot will be used for another one."""


class SlotBooks:
    """Slots of one bank.

    Args:
        slots: physical slots by number: those of the cache first, then those for staging.
        cached: how many of them the cache gets, at least one.
        policy: of the cache.
        watcher: told of every expert that enters or leaves the cache.
    """

    def __init__(
        self,
        slots: Iterable[int],
        cached: int,
        policy: CachePolicy,
        watcher: SlotWatcher | None = None,
    ) -> None:
        places = list(slots)
        self.cache = ExpertCache(cached, policy)
        self.readings: dict[Key, Reading] = {}
        self.unused_prefetch: set[Key] = set()
        """Published experts that were read ahead and not asked for yet."""
        self.prefetch_wasted = 0
        """Experts that were read ahead, wholly or in part, and went unused."""
        self._places = places[:cached]
        self._free_staging = places[cached:]
        self._staged: dict[Key, int] = {}
        self._claims: dict[Key, int] = {}
        self._owners: dict[int, Key] = {}
        self._watcher = watcher
        self._counts: dict[int, int] = {}

    @property
    def free_staging(self) -> int:
        """Staging slots that hold nothing."""
        return len(self._free_staging)

    def cached(self) -> list[tuple[Key, int]]:
        """Published experts of the cache, each with its physical slot."""
        return [(key, slot) for slot, key in self._owners.items()]

    def count_of(self, layer: int) -> int:
        """Experts of a layer that the cache holds."""
        return self._counts.get(layer, 0)

    def has_demanded_reading(self) -> bool:
        """Whether something is being read that is or was asked for."""
        return any(reading.claims or not reading.is_prefetch for reading in self.readings.values())

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
        self,
        key: Key,
        is_kept: Callable[[int, int], bool],
        *,
        is_prefetch: bool = False,
        spare: int | None = None,
    ) -> Reading | None:
        """Find a slot for an expert that is neither published nor being read.

        Args:
            key: the expert.
            is_kept: whether a (layer, expert) must not go for it; those that are claimed never do.
            is_prefetch: nobody waits for it.
            spare: staging slots that it leaves free, and the policy may refuse it; None for what
                is sure to be used.

        Returns:
            The read to begin; None when there is no slot at the moment.
        """
        # What the policy would not keep can still pass through.
        may_refuse = spare is not None or bool(self._free_staging)
        place = self._take(key, is_kept, may_refuse=may_refuse)
        slot = None
        if place is not None:
            slot = self._places[place]
            self._forget_owner(slot)
        elif len(self._free_staging) > (spare or 0):
            slot = self._free_staging.pop()
        elif not is_prefetch:
            slot = self._take_staged(is_kept)
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
            self._own(key, reading.slot)
        if reading.claims:
            self._claims[key] = reading.claims
        elif reading.is_prefetch:
            self.unused_prefetch.add(key)
        elif reading.is_staged:
            self._free_staging.append(self._staged.pop(key))

    def give_up(self, key: Key) -> None:
        """The bytes of a read did not come; its claims are void."""
        reading = self.readings.pop(key)
        self.prefetch_wasted += reading.is_prefetch and not reading.claims
        if reading.is_staged:
            self._free_staging.append(reading.slot)
        else:
            self.cache.give_up(*key)

    def admit(self, key: Key, is_kept: Callable[[int, int], bool]) -> None:
        """Let a staged expert that was read ahead stay, if the policy finds it worth a place now.

        Its slot becomes that place's, and the victim's is free for staging. When the read began the
        policy did not know that the expert would be used.

        Args:
            key: a published expert.
            is_kept: whether a (layer, expert) must not go for it; those that are claimed never do.
        """
        if key not in self._staged:
            return
        place = self._take(key, is_kept, may_refuse=True)
        if place is None:
            return
        freed, slot = self._places[place], self._staged.pop(key)
        self._forget_owner(freed)
        self._places[place] = slot
        self._own(key, slot)
        self._free_staging.append(freed)

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

    def unwatch(self) -> None:
        """Tell nobody any more, and refer to nobody."""
        self._watcher = None

    def _take(
        self, key: Key, is_kept: Callable[[int, int], bool], *, may_refuse: bool
    ) -> int | None:
        """Reserve a place of the cache."""
        claims = self._claims
        return self.cache.take(
            *key,
            protected=lambda layer, expert: (layer, expert) in claims or is_kept(layer, expert),
            may_refuse=may_refuse,
        )

    def _take_staged(self, is_kept: Callable[[int, int], bool]) -> int | None:
        """The slot of a staged expert that nobody claims: what was only expected makes way."""
        for key, slot in self._staged.items():
            if key not in self._claims and not is_kept(*key):
                del self._staged[key]
                self._count_waste(key)
                return slot
        return None

    def _own(self, key: Key, slot: int) -> None:
        """An expert is in the cache."""
        self.cache.publish(*key)
        self._owners[slot] = key
        self._counts[key[0]] = self._counts.get(key[0], 0) + 1
        if self._watcher is not None:
            self._watcher.came(key, slot)

    def _forget_owner(self, slot: int) -> None:
        key = self._owners.pop(slot, None)
        if key is not None:
            self._counts[key[0]] -= 1
            if self._watcher is not None:
                self._watcher.gone(key)
            self._count_waste(key)

    def _count_waste(self, key: Key) -> None:
        if key in self.unused_prefetch:
            self.unused_prefetch.discard(key)
            self.prefetch_wasted += 1

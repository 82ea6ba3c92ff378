"""Which experts lie in which slots: the bookkeeping of one tier, without bytes and without threads.

An expert is *absent*, *being filled* (`take` reserved a slot, its bytes are on their way) or
*published* (`publish`: they are in). Only published experts are found, and only they can become
victims, so a read that fails leaves an empty slot and never a wrong one. Which expert has to go is
a `CachePolicy`'s decision; policies are in `runtime/cache_policies.py`. Callers hold a lock.

Inside, an expert is one whole number, its key (`key_of`), because numbers hash faster than pairs: a
token of V4-Flash asks for 258 experts and misses some sixty.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from typing import Protocol

from edgedsv4.errors import ConfigError

EXPERT_BITS = 16
"""Bits of a key that hold the expert id; the layer is above them."""
_EXPERT_MASK = (1 << EXPERT_BITS) - 1

Protected = Callable[[int, int], bool] | Container[tuple[int, int]]
"""Who must not become a victim: asked with (layer, expert), or a container of such pairs."""


def key_of(layer: int, expert: int) -> int:
    """The key of an expert: layer above, expert id in the lowest `EXPERT_BITS` bits."""
    return layer << EXPERT_BITS | expert


def expert_of(key: int) -> tuple[int, int]:
    """(layer, expert) of a key."""
    return key >> EXPERT_BITS, key & _EXPERT_MASK


class CachePolicy(Protocol):
    """Decides who has to go. Knows the published experts of one cache by their keys.

    One policy serves one cache. Its methods cost O(log n) at most, on average over many calls.
    """

    def used(self, keys: Sequence[int], weight: float) -> None:
        """Experts were selected, in the cache or not.

        Args:
            keys: of the experts, as often as they were selected.
            weight: how much each selection counts: 1 in decode, 1/T in a chunk of T tokens.
        """

    def inserted(self, key: int) -> None:
        """An expert was published; from now on it may be named as a victim."""

    def removed(self, key: int) -> None:
        """A published expert is gone without having been named as a victim."""

    def make_room(
        self, newcomer: int, is_protected: Callable[[int], bool], *, may_refuse: bool
    ) -> int | None:
        """Name a victim and forget that it was in the cache.

        Args:
            newcomer: who needs the room.
            is_protected: whether an expert must stay.
            may_refuse: whether None may also mean that the newcomer deserves the room less than
                whoever has it.

        Returns:
            The victim's key; None when all are protected.
        """

    def end_step(self, tokens: int) -> None:
        """Time went on by so many tokens."""


class ExpertCache:
    """Slots of one tier and the experts in them.

    Args:
        slots: that exist, at least one.
        policy: of this cache alone.

    Raises:
        ConfigError: no slots.
    """

    def __init__(self, slots: int, policy: CachePolicy) -> None:
        if slots < 1:
            raise ConfigError(f"an expert cache needs at least 1 slot, found {slots}")
        self.slots = slots
        self.evictions = 0
        """Published experts that had to go so far."""
        self._policy = policy
        self._published: dict[int, int] = {}  # key -> slot
        self._filling: dict[int, int] = {}
        self._empty = list(range(slots - 1, -1, -1))

    def __len__(self) -> int:
        """Published experts."""
        return len(self._published)

    @property
    def filling(self) -> int:
        """Slots whose bytes are on their way."""
        return len(self._filling)

    @property
    def empty(self) -> int:
        """Slots without an expert."""
        return len(self._empty)

    def resident(self) -> Iterator[tuple[int, int, int]]:
        """(layer, expert, slot) of every published expert, in no order; not while it changes."""
        for key, slot in self._published.items():
            layer, expert = expert_of(key)
            yield layer, expert, slot

    def find(self, layer: int, expert: int) -> int | None:
        """Slot of an expert whose bytes are in; None while it is absent or being filled."""
        return self._published.get(layer << EXPERT_BITS | expert)

    def is_filling(self, layer: int, expert: int) -> bool:
        """Whether the bytes of an expert are on their way."""
        return layer << EXPERT_BITS | expert in self._filling

    def use(self, layer: int, experts: Sequence[int], weight: float = 1.0) -> None:
        """Count that a layer selected experts, hits and misses alike.

        Args:
            layer: that selected.
            experts: ids; one that is named more than once counts as often as it is named.
            weight: of each selection: 1 in decode, 1/T in a chunk of T tokens.
        """
        base = layer << EXPERT_BITS
        self._policy.used([base | expert for expert in experts], weight)

    def take(
        self, layer: int, expert: int, *, protected: Protected = (), may_refuse: bool = False
    ) -> int | None:
        """Reserve a slot for an expert whose bytes will be read.

        An empty slot, else the victim's, which is gone at once. `publish` or `give_up` has to
        follow.

        Args:
            layer: of the expert.
            expert: id of an absent expert.
            protected: experts that must stay, such as those in use.
            may_refuse: the caller can do without a slot, so the policy may find that the expert is
                not worth one.

        Returns:
            The slot; None when every other is protected or being filled, or the policy refused.

        Raises:
            ValueError: the expert is published or being filled.
        """
        key = layer << EXPERT_BITS | expert
        if key in self._published or key in self._filling:
            raise ValueError(f"expert {expert} of layer {layer} has a slot already")
        if self._empty:
            slot = self._empty.pop()
        else:
            test = _key_test(protected)
            victim = self._policy.make_room(key, test, may_refuse=may_refuse)
            if victim is None:
                return None
            slot = self._published.pop(victim)
            self.evictions += 1
        self._filling[key] = slot
        return slot

    def publish(self, layer: int, expert: int) -> None:
        """The bytes of an expert are in its slot; from now on it is found.

        Raises:
            ValueError: it was not being filled.
        """
        key = layer << EXPERT_BITS | expert
        self._published[key] = self._reserved(key)
        self._policy.inserted(key)

    def give_up(self, layer: int, expert: int) -> None:
        """The bytes of an expert did not come; its slot is empty again.

        Raises:
            ValueError: it was not being filled.
        """
        self._empty.append(self._reserved(layer << EXPERT_BITS | expert))

    def drop(self, layer: int, expert: int) -> None:
        """Empty the slot of a published expert, for one that has moved to another tier.

        Raises:
            ValueError: it is not published.
        """
        key = layer << EXPERT_BITS | expert
        slot = self._published.pop(key, None)
        if slot is None:
            raise ValueError(f"expert {expert} of layer {layer} is not in the cache")
        self._policy.removed(key)
        self._empty.append(slot)

    def end_step(self, tokens: int) -> None:
        """A step of so many tokens is over; counters age by that."""
        self._policy.end_step(tokens)

    def _reserved(self, key: int) -> int:
        slot = self._filling.pop(key, None)
        if slot is None:
            layer, expert = expert_of(key)
            raise ValueError(f"expert {expert} of layer {layer} is not being filled")
        return slot


def _key_test(protected: Protected) -> Callable[[int], bool]:
    """`protected` as a question about keys."""
    if callable(protected):
        ask = protected
        return lambda key: ask(key >> EXPERT_BITS, key & _EXPERT_MASK)
    pairs = protected
    return lambda key: (key >> EXPERT_BITS, key & _EXPERT_MASK) in pairs

"""The bookkeeping of one tier: what is found, who goes, and what a failed read leaves behind."""

from __future__ import annotations

import pytest

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.cache_policies import LeastRecentlyUsed
from edgedsv4.runtime.expert_cache import ExpertCache, expert_of, key_of


def make(slots: int) -> ExpertCache:
    return ExpertCache(slots, LeastRecentlyUsed())


def fill(cache: ExpertCache, *experts: tuple[int, int]) -> list[int]:
    slots = []
    for layer, expert in experts:
        slot = cache.take(layer, expert)
        assert slot is not None
        cache.publish(layer, expert)
        slots.append(slot)
    return slots


@pytest.mark.parametrize("pair", [(0, 0), (42, 255), (60, 383), (511, 4095)])
def test_key_holds_layer_and_expert(pair: tuple[int, int]) -> None:
    assert expert_of(key_of(*pair)) == pair


def test_cache_without_slots_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1 slot, found 0"):
        make(0)


def test_published_expert_is_found_in_its_slot() -> None:
    cache = make(2)
    assert cache.find(1, 3) is None
    slot = cache.take(1, 3)
    assert cache.find(1, 3) is None  # its bytes are not in
    assert cache.is_filling(1, 3)
    cache.publish(1, 3)
    assert cache.find(1, 3) == slot
    assert not cache.is_filling(1, 3)
    assert cache.find(3, 1) is None


def test_every_slot_is_given_once() -> None:
    assert sorted(fill(make(3), (0, 0), (0, 1), (5, 0))) == [0, 1, 2]


def test_victim_is_gone_before_the_bytes_come() -> None:
    cache = make(2)
    first, second = fill(cache, (0, 0), (0, 1))
    assert cache.take(0, 2) == first
    assert cache.find(0, 0) is None
    assert cache.find(0, 1) == second
    assert (len(cache), cache.filling, cache.evictions) == (1, 1, 1)


def test_failed_read_leaves_an_empty_slot() -> None:
    cache = make(1)
    (slot,) = fill(cache, (0, 0))
    assert cache.take(0, 1) == slot
    cache.give_up(0, 1)
    assert (len(cache), cache.filling, cache.empty) == (0, 0, 1)
    assert cache.find(0, 0) is None
    assert cache.find(0, 1) is None
    assert cache.take(0, 1) == slot


def test_slot_that_is_being_filled_is_no_victim() -> None:
    cache = make(1)
    cache.take(0, 0)
    assert cache.take(0, 1) is None
    cache.publish(0, 0)
    assert cache.take(0, 1) == 0


def test_protected_experts_stay() -> None:
    cache = make(2)
    _, second = fill(cache, (0, 0), (0, 1))
    assert cache.take(0, 2, protected={(0, 0), (0, 1)}) is None
    assert cache.take(0, 2, protected={(0, 0)}) == second
    cache.publish(0, 2)
    assert cache.take(0, 3, protected=lambda layer, expert: (layer, expert) == (0, 0)) == second
    assert cache.find(0, 0) == 0


def test_dropped_expert_leaves_its_slot_to_the_next() -> None:
    cache = make(2)
    _, second = fill(cache, (0, 0), (0, 1))
    cache.drop(0, 1)
    assert cache.find(0, 1) is None
    assert cache.take(0, 2) == second
    assert cache.evictions == 0


def test_resident_experts_are_listed_with_their_slots() -> None:
    cache = make(3)
    slots = fill(cache, (0, 7), (2, 1))
    cache.take(1, 1)
    assert sorted(cache.resident()) == [(0, 7, slots[0]), (2, 1, slots[1])]


@pytest.mark.parametrize("state", ["published", "filling"])
def test_expert_with_a_slot_gets_no_second_one(state: str) -> None:
    cache = make(2)
    cache.take(0, 5)
    if state == "published":
        cache.publish(0, 5)
    with pytest.raises(ValueError, match="expert 5 of layer 0 has a slot already"):
        cache.take(0, 5)


@pytest.mark.parametrize("call", ["publish", "give_up", "drop"])
def test_expert_without_a_slot_cannot_be(call: str) -> None:
    with pytest.raises(ValueError, match="expert 5 of layer 1 is not"):
        getattr(make(2), call)(1, 5)


def test_use_decides_who_goes() -> None:
    cache = make(2)
    first, second = fill(cache, (0, 0), (0, 1))
    cache.use(0, [0])
    assert cache.take(0, 2) == second
    assert cache.find(0, 0) == first

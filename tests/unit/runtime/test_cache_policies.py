"""Who has to go, by each policy, on cases small enough to see it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from edgedsv4.errors import ConfigError, ShapeError
from edgedsv4.runtime.aged_frequency import AgedFrequency
from edgedsv4.runtime.cache_policies import Belady, LeastRecentlyUsed, ReuseCounts, make_policy
from edgedsv4.runtime.expert_cache import CachePolicy, ExpertCache

EXPERTS = 8


def cache_of(policy: CachePolicy, slots: int, experts: Sequence[int]) -> ExpertCache:
    """A cache of one layer that holds these experts, used once in this order."""
    cache = ExpertCache(slots, policy)
    for expert in experts:
        use(cache, expert)
        assert cache.take(0, expert) is not None
        cache.publish(0, expert)
    return cache


def use(cache: ExpertCache, *experts: int, weight: float = 1.0, tokens: int = 1) -> None:
    cache.use(0, experts, weight)
    cache.end_step(tokens)


def held(cache: ExpertCache) -> set[int]:
    return {expert for _, expert, _ in cache.resident()}


def replace_one(cache: ExpertCache, newcomer: int, protected: Sequence[int] = ()) -> int | None:
    """Who had to go for `newcomer`; None for nobody."""
    before = held(cache)
    if cache.take(0, newcomer, protected={(0, expert) for expert in protected}) is None:
        return None
    cache.publish(0, newcomer)
    (gone,) = before - held(cache)
    return gone


# ---- LRU ----


def test_lru_evicts_the_oldest_use() -> None:
    cache = cache_of(LeastRecentlyUsed(), 3, [0, 1, 2])
    use(cache, 0)
    assert [replace_one(cache, expert) for expert in (3, 4, 5)] == [1, 2, 0]


def test_lru_skips_protected_experts() -> None:
    cache = cache_of(LeastRecentlyUsed(), 2, [0, 1])
    assert replace_one(cache, 2, protected=[0]) == 1


# ---- SGLang's counts ----


def test_counts_evict_the_smallest_count_and_of_equals_the_oldest() -> None:
    cache = cache_of(ReuseCounts(), 4, [0, 1, 2, 3])
    use(cache, 0)
    use(cache, 3)
    use(cache, 2)
    use(cache, 1)
    use(cache, 1)
    assert [replace_one(cache, expert) for expert in (4, 5)] == [0, 4]


def test_counts_evict_the_newest_of_equals_in_prefill() -> None:
    cache = cache_of(ReuseCounts(), 3, [0, 1, 2])
    use(cache, 7, weight=0.5, tokens=2)
    assert replace_one(cache, 7) == 2


def test_counts_survive_eviction() -> None:
    cache = cache_of(ReuseCounts(), 2, [0, 1])
    for _ in range(3):
        use(cache, 0)
        use(cache, 1)
    use(cache, 1)
    assert replace_one(cache, 2) == 0
    assert replace_one(cache, 0) == 2  # used once, 0 four times
    assert held(cache) == {0, 1}


def test_counts_stop_at_255() -> None:
    cache = cache_of(ReuseCounts(), 2, [0, 1])
    for _ in range(300):
        use(cache, 0)
    for _ in range(254):
        use(cache, 1)
    use(cache, 2)
    assert replace_one(cache, 2) == 0  # both stand at 255, and 1 was used later


# ---- Belady ----


def test_belady_evicts_who_is_needed_last() -> None:
    calls = [[0], [1], [2], [3], [0], [2], [1]]
    policy = Belady(calls)
    cache = ExpertCache(3, policy)
    for (expert,) in calls[:3]:
        cache.use(0, [expert])
        cache.take(0, expert)
        cache.publish(0, expert)
    cache.use(0, [3])
    assert replace_one(cache, 3) == 1


def test_belady_refuses_who_is_needed_later_than_all() -> None:
    cache = ExpertCache(1, Belady([[0], [1], [0], [1]]))
    cache.use(0, [0])
    cache.take(0, 0)
    cache.publish(0, 0)
    cache.use(0, [1])
    assert cache.take(0, 1, may_refuse=True) is None
    assert cache.take(0, 1) == 0


# ---- expected use ----


def test_expected_use_keeps_what_is_used_often() -> None:
    cache = cache_of(AgedFrequency(1, EXPERTS), 3, [0, 1, 2])
    for _ in range(50):
        use(cache, 0, 2)
    use(cache, 1)
    assert replace_one(cache, 3) == 1


def test_expected_use_of_equals_forgets_the_oldest() -> None:
    cache = cache_of(AgedFrequency(1, EXPERTS), 3, [2, 0, 1])
    assert replace_one(cache, 3) == 2


def test_expected_use_follows_a_change_of_subject() -> None:
    rng = np.random.default_rng(0)
    cache = ExpertCache(4, AgedFrequency(1, 32))
    for first in (0, 8, 16, 24, 4):
        for _ in range(200):
            ids = (first + rng.choice(4, size=2, replace=False)).tolist()
            cache.use(0, ids)
            for expert in ids:
                if cache.find(0, expert) is None:
                    cache.take(0, expert, protected={(0, i) for i in ids})
                    cache.publish(0, expert)
            cache.end_step(1)
        assert held(cache) == set(range(first, first + 4))


def test_one_off_is_refused_where_it_may_be() -> None:
    cache = cache_of(AgedFrequency(1, EXPERTS), 2, [0, 1])
    for _ in range(100):
        use(cache, 0, 1)
    cache.use(0, [5])
    assert cache.take(0, 5, may_refuse=True) is None
    assert held(cache) == {0, 1}
    assert cache.take(0, 5) is not None


def test_refused_expert_is_taken_once_it_is_worth_more() -> None:
    cache = cache_of(AgedFrequency(1, EXPERTS), 2, [0, 1])
    for _ in range(20):
        use(cache, 0, 1)
    refusals = 0
    for _ in range(60):
        cache.use(0, [0, 5])
        if cache.take(0, 5, protected={(0, 0)}, may_refuse=True) is not None:
            cache.publish(0, 5)
            break
        refusals += 1
        cache.end_step(1)
    assert held(cache) == {0, 5}
    assert refusals > 0


def test_prefill_chunk_counts_as_one_token() -> None:
    policy = AgedFrequency(1, EXPERTS)
    cache = cache_of(policy, 2, [0, 1])
    for _ in range(100):
        use(cache, 0, 1)
    use(cache, *([5] * 512), weight=1 / 512, tokens=512)
    assert cache.take(0, 5, may_refuse=True) is None
    assert list(policy.best(2)) == [(0, 0), (0, 1)]


def test_step_without_selections_ages_nothing() -> None:
    policy = AgedFrequency(1, EXPERTS)
    cache = cache_of(policy, 2, [3, 4])
    use(cache, 3)
    before = list(policy.best(EXPERTS))
    for _ in range(10):
        cache.end_step(1)
    assert list(policy.best(EXPERTS)) == before


def test_frequency_file_says_what_to_read_first() -> None:
    prior = np.array([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]])
    policy = AgedFrequency(2, 3, prior)
    assert list(policy.best(3)) == [(0, 1), (1, 0), (1, 2)]


def test_without_a_file_the_first_experts_are_even_over_the_layers() -> None:
    assert list(AgedFrequency(2, 3).best(4)) == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_frequencies_of_another_shape_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[2, 3\], expected \[3, 2\]"):
        AgedFrequency(3, 2, np.ones((2, 3)))
    with pytest.raises(ShapeError, match=r"\[4, 2\], expected \[3, 2\]"):
        AgedFrequency(3, 2, np.ones((4, 2)))


def test_layer_that_the_file_leaves_out_gets_the_average() -> None:
    policy = AgedFrequency(2, 3, np.array([[0.1, 0.9, 0.2]]))
    assert list(policy.best(6)) == [(0, 1), (1, 0), (1, 1), (1, 2), (0, 2), (0, 0)]


def test_dropped_expert_is_no_victim() -> None:
    cache = cache_of(AgedFrequency(1, EXPERTS), 2, [0, 1])
    cache.drop(0, 0)
    assert cache.take(0, 2) is not None
    cache.publish(0, 2)
    assert replace_one(cache, 3) in (1, 2)


@pytest.mark.parametrize("name", ["aged", "lru", "lfu"])
def test_victims_are_found_until_all_are_protected(name: str) -> None:
    cache = cache_of(make_policy(name, 1, 512), 300, range(300))
    protected = {(0, expert) for expert in range(300)}
    assert cache.take(0, 400, protected=protected) is None
    for newcomer in range(300, 400):
        assert cache.take(0, newcomer, protected=protected - {(0, newcomer - 300)}) is not None
        cache.publish(0, newcomer)
        protected.add((0, newcomer))
    assert held(cache) == set(range(100, 400))


def test_unknown_policy_is_named() -> None:
    with pytest.raises(ConfigError, match="policy must be one of aged, lru, lfu, belady"):
        make_policy("mru", 1, 1)

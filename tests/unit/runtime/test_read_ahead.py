"""Guesses are read when nothing else is, make way for what is asked for, and leave nothing."""

from __future__ import annotations

import errno
import linecache
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from expert_store_samples import opened_store, same_expert
from line_interrupt import Interrupt
from tiny_model import random_tensors, tiny_config, write_gguf

from edgedsv4.errors import CancelledError, ConfigError, ExpertReadError
from edgedsv4.formats.next_pairs import NextPairs
from edgedsv4.runtime.aged_frequency import AgedFrequency

if TYPE_CHECKING:
    from edgedsv4.model.weights import RoutedExperts
    from edgedsv4.runtime.ram_store import ExpertStore

CONFIG = tiny_config(compress_ratios=(0, 4, 128), num_hash_layers=1, num_experts=16)
ALL = range(16)
FILES = ("ram_store.py", "read_ahead.py", "slot_books.py", "slot_filler.py", "expert_cache.py")
SLOW = {"times": 10_000, "nbytes": 1 << 30, "delay_ms": 20}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ahead") / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3), types="a")
    return path


def go_on() -> None:
    """Never stop."""


def layer_of(
    store: ExpertStore,
    experts: RoutedExperts,
    layer: int,
    ids: Sequence[int],
    guesses: Sequence[int] = (),
) -> None:
    """Stream a layer as the model does, with guesses at the next one after the first batch."""
    found = []
    for place, batch in enumerate(store.stream(layer, ids, 1, go_on)):
        if place == 0 and guesses and store.guesses_wanted(layer + 1, 1):
            store.guess(layer + 1, guesses)
        for expert_id, weights in batch:
            assert same_expert(weights, experts.expert(layer, expert_id))
            found.append(expert_id)
    assert sorted(found) == sorted(ids)


def settle(store: ExpertStore) -> None:
    """Wait until no read is under way."""
    end = time.monotonic() + 20
    list(store.stream(0, [], 1, go_on))  # books that are half changed are made anew
    while store._books.readings:
        assert time.monotonic() < end
        time.sleep(0.001)
        list(store.stream(0, [], 1, go_on))
    store.end_forward(0)


def assert_nothing_leaks(store: ExpertStore) -> None:
    """Every slot is free or holds a published expert, and nobody claims any."""
    settle(store)
    books = store._books
    assert not books._claims
    assert not books._staged
    assert books.free_staging == store.options.staging
    assert books.cache.empty + len(books.cache) == store.options.slots
    assert books.cache.filling == 0
    counts = [sum(key[0] == layer for key in books._owners.values()) for layer in range(3)]
    assert [books.count_of(layer) for layer in range(3)] == counts
    assert {books.find(key) for key in books._owners.values()} == set(books._owners)


def test_a_guess_that_comes_true_is_no_read_to_wait_for(path: Path) -> None:
    with opened_store(path, 8, layers=3, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1, 2])
        layer_of(store, experts, 1, [1, 2], guesses=[3, 4])
        layer_of(store, experts, 2, [3, 5])
        stats = store.stats()
        assert (stats.prefetched, stats.prefetch_hits, stats.disk_reads) == (2, 1, 3)
        assert (stats.guess_misses, stats.guess_hits) == (2, 1)
        assert stats.guess_recall == 0.5
        store.end_forward(1)
        assert_nothing_leaks(store)


def test_guesses_wait_for_what_was_asked_for(path: Path) -> None:
    with opened_store(path, 8, layers=3, prefetch="gate") as (store, _):
        store.reader.disturb(**SLOW)
        batches = store.stream(1, [1, 2], 1, go_on)
        assert next(batches) == []
        store.guess(2, [3, 4])
        assert store.stats().prefetched == 0
        handed = 0
        for batch in batches:
            handed += len(batch)
            assert (store.stats().prefetched > 0) == (handed == 2)
        assert handed == 2


def test_guesses_wait_for_what_another_thread_asked_for(path: Path) -> None:
    with opened_store(path, 8, layers=3, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1])
        store.reader.disturb(**SLOW)
        has_asked, may_end = threading.Event(), threading.Event()

        def other() -> None:
            batches = store.stream(0, [7], 1, go_on)
            next(batches)
            has_asked.set()
            may_end.wait(20)
            list(batches)
            store.end_forward(1)

        thread = threading.Thread(target=other)
        thread.start()
        has_asked.wait(20)
        layer_of(store, experts, 1, [1], guesses=[3])
        assert store.stats().prefetched == 0
        may_end.set()
        thread.join()


def test_what_a_layer_does_not_name_is_read_no_further(path: Path) -> None:
    with opened_store(path, 8, layers=3, staging=8, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1, 2])
        store.reader.disturb(**SLOW)
        layer_of(store, experts, 1, [1, 2], guesses=[3, 4, 5, 6])
        begun = store.stats().prefetched
        assert begun == 4
        layer_of(store, experts, 2, [6, 7])
        store.reader.disturb(times=0)
        settle(store)
        stats = store.stats()
        assert (stats.prefetch_hits, stats.prefetch_late, stats.disk_reads) == (1, 1, 3)
        assert stats.prefetch_wasted == 3
        own = sum(e.nbytes for n in (1, 2, 6, 7) for e in experts.extents(2, n))
        assert stats.read_bytes < 1.5 * own  # nothing of the rest, or little
        assert_nothing_leaks(store)


def test_an_expert_guessed_right_goes_before_all_guesses(path: Path) -> None:
    with opened_store(path, 12, layers=3, staging=8, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1])
        store.reader.disturb(**SLOW)
        layer_of(store, experts, 1, [1], guesses=[3, 4, 5, 6])
        begin = time.monotonic()
        layer_of(store, experts, 2, [6])
        # Three extents of its own, behind no more than what was being read.
        assert time.monotonic() - begin < 0.2


@pytest.mark.parametrize("slots", [2, 4])
def test_guesses_evict_neither_this_layer_nor_the_next(path: Path, slots: int) -> None:
    with opened_store(path, slots, layers=3, prefetch="gate") as (store, experts):
        for layer in (1, 2):
            layer_of(store, experts, layer, range(slots // 2))
        before = store.reader.counts().reads
        layer_of(store, experts, 1, range(slots // 2), guesses=[8, 9, 10, 11])
        settle(store)
        assert all(store._books.find((2, n)) is not None for n in range(slots // 2))
        assert store.reader.counts().reads <= before + 3  # one, in one of the two staging slots
        store.end_forward(1)
        assert_nothing_leaks(store)


def test_guesses_do_not_push_out_what_is_used_more(path: Path) -> None:
    def policy() -> AgedFrequency:
        return AgedFrequency(3, 16)

    with opened_store(path, 6, layers=3, prefetch="gate", policy=policy) as (store, experts):
        for _ in range(20):
            layer_of(store, experts, 0, [1, 2, 3])
            layer_of(store, experts, 1, [4, 5, 6])
            store.end_forward(1)
        layer_of(store, experts, 1, [4, 5, 6], guesses=[8, 9])
        settle(store)
        assert store.stats().prefetched > 0
        used = [(0, n) for n in (1, 2, 3)] + [(1, n) for n in (4, 5, 6)]
        assert all(store._books.find(key) is not None for key in used)


def test_a_staged_guess_that_is_used_enough_stays(path: Path) -> None:
    def policy() -> AgedFrequency:
        return AgedFrequency(3, 16)

    with opened_store(path, 4, layers=3, prefetch="gate", policy=policy) as (store, experts):
        layer_of(store, experts, 0, [1, 2, 3, 4])
        store.end_forward(1)
        for _ in range(40):
            layer_of(store, experts, 1, [], guesses=[7])
            layer_of(store, experts, 2, [7])
            store.end_forward(1)
        assert store._books.find((2, 7)) is not None
        assert store.stats().prefetched < 40
        assert_nothing_leaks(store)


def test_guesses_leave_half_of_the_staging_slots(path: Path) -> None:
    with opened_store(path, 2, layers=3, staging=6, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [0, 1])
        layer_of(store, experts, 1, [0, 1], guesses=[8, 9, 10, 11, 12])
        assert store.stats().prefetched == 3
        assert store._books.free_staging == 3


@pytest.mark.parametrize("prefetch", ["off", "hash"])
def test_guesses_are_wanted_only_where_they_were_asked_for(path: Path, prefetch: str) -> None:
    with opened_store(path, 8, layers=3, prefetch=prefetch) as (store, _):
        assert store.guesses_wanted(2, 1) == 0


def test_guesses_are_wanted_where_something_may_be_absent(path: Path) -> None:
    tables = {1: torch.tensor([[1, 2]])}
    with opened_store(path, 16, layers=3, prefetch="gate", tables=tables) as (store, experts):
        assert [store.guesses_wanted(layer, 1) for layer in (1, 2, 3)] == [0, 4, 0]
        assert [store.guesses_wanted(2, tokens) for tokens in (16, 17)] == [4, 0]
        layer_of(store, experts, 2, ALL)
        assert store.guesses_wanted(2, 1) == 0


@pytest.mark.parametrize("guesses", [0, 65])
def test_absurd_numbers_of_guesses_are_refused(path: Path, guesses: int) -> None:
    with (
        pytest.raises(ConfigError, match=r"guesses must be 1\.\.64"),
        opened_store(path, 8, prefetch="gate", guesses=guesses),
    ):
        pass


def test_a_guess_that_cannot_be_read_is_an_error_only_for_who_asks(path: Path) -> None:
    with opened_store(path, 8, layers=3, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1])
        store.reader.disturb(times=10_000, error=errno.EIO)
        layer_of(store, experts, 1, [1], guesses=[3, 4])
        settle(store)
        layer_of(store, experts, 1, [1], guesses=[3, 4])
        with pytest.raises(ExpertReadError, match="expert 3 of layer 2 cannot be read"):
            layer_of(store, experts, 2, [3])
        store.end_forward(0)
        assert_nothing_leaks(store)
        store.reader.disturb(times=0)
        layer_of(store, experts, 2, ALL)
        store.end_forward(1)
        assert_nothing_leaks(store)


def test_a_cancelled_forward_takes_its_guesses_back(path: Path) -> None:
    def stop() -> None:
        raise CancelledError("stopped")

    with opened_store(path, 8, layers=3, staging=8, prefetch="gate") as (store, experts):
        layer_of(store, experts, 1, [1])
        store.reader.disturb(**SLOW)
        layer_of(store, experts, 1, [1], guesses=[3, 4, 5, 6])
        with pytest.raises(CancelledError):
            list(store.stream(2, [9], 1, stop))
        store.end_forward(0)
        store.reader.disturb(times=0)
        assert_nothing_leaks(store)
        layer_of(store, experts, 2, ALL)
        assert_nothing_leaks(store)


def test_pairs_of_a_corpus_are_read_like_guesses(path: Path) -> None:
    experts = np.tile(np.array([3, 4], dtype=np.int32), (2, 16, 1))
    counts = np.full((2, 16, 2), 5, dtype=np.uint64)
    pairs = NextPairs(experts, counts, np.full((2, 16), 10, dtype=np.uint64))
    with opened_store(path, 8, layers=3, prefetch="pairs", pairs=pairs) as (store, found):
        assert store.guesses_wanted(2, 1) == 0  # no router has to run
        layer_of(store, found, 1, [1, 2])
        layer_of(store, found, 2, [3, 5])
        stats = store.stats()
        assert (stats.prefetched, stats.prefetch_hits) == (2, 1)
        assert (stats.guess_misses, stats.guess_hits) == (2, 1)
        assert_nothing_leaks(store)


@pytest.mark.parametrize("slots", [2, 3, 20])
def test_threads_that_guess_share_a_store(path: Path, slots: int) -> None:
    failures: list[BaseException] = []

    def work(seed: int, store: ExpertStore, experts: RoutedExperts) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                for layer in range(3):
                    ids, guesses = (sorted(rng.choice(16, n, replace=False)) for n in (2, 4))
                    layer_of(store, experts, layer, [*map(int, ids)], [*map(int, guesses)])
                store.end_forward(1)
        except BaseException as error:  # noqa: BLE001  # shown by the test's own thread
            failures.append(error)

    with opened_store(path, slots, layers=3, prefetch="gate") as (store, experts):
        threads = [threading.Thread(target=work, args=(i, store, experts)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert store.stats().prefetched > 0
        assert_nothing_leaks(store)


def _forward(store: ExpertStore, experts: RoutedExperts) -> None:
    try:
        layer_of(store, experts, 1, [1, 2], guesses=[3, 4, 5])
        layer_of(store, experts, 2, [3, 9])
    finally:
        store.end_forward(1)


class _CtrlC(Interrupt):
    """Not on the way out of a lock: that is one step for a signal, and two for a trace function."""

    def _line(self, frame: FrameType, event: str, value: Any) -> Any:
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if "with self._lock" in line:
            return self._line
        return super()._line(frame, event, value)


def _interrupted(store: ExpertStore, experts: RoutedExperts, interrupt: Interrupt) -> None:
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        _forward(store, experts)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)


def test_an_interrupt_between_any_two_lines_leaves_a_store_that_works(path: Path) -> None:
    with opened_store(path, 4, layers=3, staging=4, prefetch="gate") as (store, experts):
        _forward(store, experts)
        counter = _CtrlC(FILES)
        _interrupted(store, experts, counter)
        assert counter.count > 300
        for at in range(1, counter.count + 1):
            _interrupted(store, experts, _CtrlC(FILES, at))
            store.end_forward(0)
            if at % 7 == 0:
                assert_nothing_leaks(store)
            _forward(store, experts)
        layer_of(store, experts, 2, ALL)
        assert_nothing_leaks(store)
        assert len(store.fetch(0, range(4))) == 4

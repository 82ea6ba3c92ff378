"""The expert store: right bytes, bounded slots, faults that name the expert and leave it usable."""

from __future__ import annotations

import errno
import hashlib
import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from expert_store_samples import opened_store, same_expert
from tiny_model import random_tensors, tiny_config, write_gguf, write_official

from edgedsv4.errors import (
    CancelledError,
    CapacityError,
    ConfigError,
    ExpertReadError,
    FormatError,
)
from edgedsv4.runtime.slot_filler import Verification

if TYPE_CHECKING:
    from edgedsv4.model.weights import RoutedExperts
    from edgedsv4.runtime.ram_store import ExpertStore

CONFIG = tiny_config(compress_ratios=(0, 4, 128), num_hash_layers=1, num_experts=16)
ALL = range(16)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3), types="a")
    return path


def go_on() -> None:
    """Never stop."""


def streamed(
    store: ExpertStore, experts: RoutedExperts, layer: int, ids: range | list[int], tokens: int = 1
) -> list[int]:
    """Ids in the order they came, each compared with the mapping while it was there."""
    found = []
    for batch in store.stream(layer, ids, tokens, go_on):
        for expert_id, weights in batch:
            assert same_expert(weights, experts.expert(layer, expert_id))
            found.append(expert_id)
    return found


@pytest.mark.parametrize("slots", [1, 3, 16, 48])
@pytest.mark.parametrize("has_ring", [True, False], ids=["ring", "threads"])
@pytest.mark.parametrize("io", ["direct", "buffered"])
@pytest.mark.parametrize("tokens", [1, 100])
def test_every_expert_comes_once_with_its_bytes(
    path: Path, slots: int, has_ring: bool, io: str, tokens: int
) -> None:
    with opened_store(path, slots, has_ring=has_ring, io=io) as (store, experts):
        for _ in range(2):
            for layer in range(3):
                assert sorted(streamed(store, experts, layer, ALL, tokens)) == list(ALL)
        store.end_forward(tokens)
        assert store.resident() <= slots
        assert store.stats().asked == 96


def test_separate_scales_are_read_too(tmp_path: Path) -> None:
    config = tiny_config(compress_ratios=(0,), num_hash_layers=0, hidden_size=128)
    write_official(tmp_path, config, random_tensors(config, seed=4), quantised=True)
    with opened_store(tmp_path, 3) as (store, experts):
        assert sorted(streamed(store, experts, 0, range(8))) == list(range(8))


def test_what_is_in_memory_is_not_read_again(path: Path) -> None:
    with opened_store(path, 8) as (store, experts):
        streamed(store, experts, 0, [1, 2, 3])
        before = store.reader.counts().reads
        assert streamed(store, experts, 0, [3, 1]) == [1, 3]
        assert store.reader.counts().reads == before
        assert (store.stats().ram_hits, store.stats().disk_reads) == (2, 3)


def test_hits_come_first(path: Path) -> None:
    with opened_store(path, 8) as (store, experts):
        streamed(store, experts, 0, [5, 6])
        store.reader.disturb(times=1000, nbytes=1 << 30, delay_ms=5)
        batches = store.stream(0, [1, 5, 6, 7], 1, go_on)
        assert [expert_id for expert_id, _ in next(batches)] == [5, 6]
        assert sorted(expert_id for batch in batches for expert_id, _ in batch) == [1, 7]


def test_read_bytes_are_those_of_the_misses(path: Path) -> None:
    with opened_store(path, 4) as (store, experts):
        streamed(store, experts, 0, ALL)
        own = sum(extent.nbytes for e in ALL for extent in experts.extents(0, e))
        read = store.stats().read_bytes
        assert read == store.reader.counts().nbytes
        # Three extents, each widened by two blocks at most.
        assert own <= read <= own + 16 * 3 * 2 * 4096


def test_fetch_hands_out_all_at_once(path: Path) -> None:
    with opened_store(path, 4) as (store, experts):
        found = store.fetch(1, [7, 2, 7, 9])
        for weights, expert_id in zip(found, (7, 2, 7, 9), strict=True):
            assert same_expert(weights, experts.expert(1, expert_id))
        with pytest.raises(CapacityError, match="5 experts at once"):
            store.fetch(1, range(5))


def test_store_without_slots_is_refused(path: Path) -> None:
    with pytest.raises(ConfigError, match="at least 1 slot"), opened_store(path, 0):
        pass


@pytest.mark.parametrize(("layer", "expert_id"), [(0, 16), (0, -1)])
def test_unknown_expert_is_named(path: Path, layer: int, expert_id: int) -> None:
    with opened_store(path, 4) as (store, experts):
        with pytest.raises(ExpertReadError, match=f"expert {expert_id} of layer {layer}"):
            list(store.stream(layer, [expert_id], 1, go_on))
        assert sorted(streamed(store, experts, 0, ALL)) == list(ALL)


@pytest.mark.parametrize("fault", ["eio", "short"])
def test_a_read_that_fails_for_good_names_the_expert_and_is_tried_anew(
    path: Path, fault: str
) -> None:
    with opened_store(path, 8) as (store, experts):
        if fault == "eio":
            store.reader.disturb(times=10_000, error=errno.EIO)
        else:
            store.reader.disturb(times=10_000, nbytes=1)
        with pytest.raises(ExpertReadError, match=r"expert 4 of layer 1 cannot be read at byte"):
            list(store.stream(1, [4], 1, go_on))
        store.end_forward(0)
        assert store.resident() == 0
        store.reader.disturb(times=0)
        assert streamed(store, experts, 1, [4]) == [4]


@pytest.mark.parametrize("error", [errno.EIO, errno.EINTR, errno.EAGAIN])
def test_faults_that_pass_are_not_noticed(path: Path, error: int) -> None:
    with opened_store(path, 4) as (store, experts):
        for skip in range(0, 40, 7):
            store.reader.disturb(skip=skip, times=3, error=error)
            assert sorted(streamed(store, experts, 2, ALL)) == list(ALL)


def test_changed_file_is_an_error_and_never_wrong_bytes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3))
    with opened_store(path, 4) as (store, experts):
        streamed(store, experts, 0, [1])
        os.utime(path, ns=(1, 1))
        with pytest.raises(FormatError, match="changed while open"):
            list(store.stream(0, [2], 1, go_on))


def test_file_cut_while_running_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3))
    with opened_store(path, 4) as (store, experts):
        streamed(store, experts, 0, [1])
        os.truncate(path, path.stat().st_size // 2)
        with pytest.raises(FormatError, match="changed while open"):
            list(store.stream(2, [2], 1, go_on))


def test_stopping_in_the_middle_of_a_read_leaves_the_store_usable(path: Path) -> None:
    def stop() -> None:
        raise CancelledError("stopped")

    with opened_store(path, 4) as (store, experts):
        for has_ended in (True, False):
            store.reader.disturb(times=1000, nbytes=1 << 30, delay_ms=20)
            with pytest.raises(CancelledError):
                list(store.stream(0, ALL, 1, stop))
            if has_ended:
                store.end_forward(0)
            store.reader.disturb(times=0)
            assert sorted(streamed(store, experts, 1, ALL)) == list(ALL)
            store.end_forward(1)


def test_what_was_being_read_when_a_forward_ended_is_there_later(path: Path) -> None:
    with opened_store(path, 4) as (store, experts):
        next(iter(store.stream(0, [1, 2], 1, go_on)))
        store.end_forward(0)
        streamed(store, experts, 1, [0])
        before = store.stats().disk_reads
        assert sorted(streamed(store, experts, 0, [1, 2])) == [1, 2]
        assert store.stats().disk_reads == before


@pytest.mark.parametrize("slots", [2, 3, 20])
def test_two_threads_share_a_store(path: Path, slots: int) -> None:
    failures: list[BaseException] = []

    def work(seed: int, store: ExpertStore, experts: RoutedExperts) -> None:
        rng = np.random.default_rng(seed)
        try:
            for _ in range(40):
                store.begin_forward([seed])
                for layer in range(3):
                    ids = sorted(rng.choice(16, 2, replace=False).tolist())
                    assert sorted(streamed(store, experts, layer, ids)) == ids
                store.end_forward(1)
        except BaseException as error:  # noqa: BLE001  # shown by the test's own thread
            failures.append(error)

    with opened_store(path, slots) as (store, experts):
        threads = [threading.Thread(target=work, args=(i, store, experts)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures


def test_checksums_are_compared(path: Path) -> None:
    digests: dict[tuple[int, int], list[bytes]] = {}

    def look_up(layer: int, expert: int) -> list[bytes]:
        return digests[layer, expert]

    with opened_store(path, 4, verification=Verification(look_up, share=1.0)) as (store, experts):
        for expert in (1, 2):
            digests[0, expert] = [
                hashlib.sha256(e.file.view(e.offset, e.nbytes).data).digest()
                for e in experts.extents(0, expert)
            ]
        assert streamed(store, experts, 0, [1]) == [1]
        digests[0, 2][1] = hashlib.sha256(b"another").digest()
        with pytest.raises(ExpertReadError, match=r"expert 2 of layer 0.*the file is damaged"):
            list(store.stream(0, [2], 1, go_on))
        store.end_forward(0)
        assert store.resident() == 1


def test_damage_that_a_sample_found_is_found_again(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: int) -> list[bytes]:
        return [hashlib.sha256(b"another").digest()] * 3

    monkeypatch.setattr("random.Random.random", lambda _self: next(draws))
    draws = iter([0.0, 0.9, 0.9])
    with opened_store(path, 4, verification=Verification(look_up, share=0.01)) as (store, experts):
        for _ in range(2):
            with pytest.raises(ExpertReadError, match=r"expert 2 of layer 0.*the file is damaged"):
                list(store.stream(0, [2], 1, go_on))
            store.end_forward(0)
        assert streamed(store, experts, 0, [1]) == [1]  # not drawn, not known to be damaged


def test_experts_of_hash_layers_are_read_when_the_token_is_known(path: Path) -> None:
    table = np.array([[1, 2], [3, 4]])
    import torch  # the table of a model is a tensor

    tables = {0: torch.from_numpy(table)}
    with opened_store(path, 8, tables=tables) as (store, experts):
        store.begin_forward([1])
        assert streamed(store, experts, 0, [3, 4]) == [3, 4]
        stats = store.stats()
        assert (stats.prefetched, stats.prefetch_hits, stats.disk_reads) == (2, 2, 0)
        assert stats.prefetch_wasted == 0


def test_no_prefetch_reads_nothing_ahead(path: Path) -> None:
    import torch  # as above

    tables = {0: torch.tensor([[1, 2]])}
    with opened_store(path, 8, tables=tables, prefetch="off") as (store, experts):
        store.begin_forward([0])
        streamed(store, experts, 0, ALL, tokens=100)
        assert store.stats().prefetched == 0


def test_prefill_reads_the_next_layer_ahead(path: Path) -> None:
    with opened_store(path, 16, staging=8, layers=3) as (store, experts):
        assert sorted(streamed(store, experts, 0, ALL, tokens=100)) == list(ALL)
        # Half of the staging slots.
        assert store.stats().prefetched == 4
        assert sorted(streamed(store, experts, 1, ALL, tokens=100)) == list(ALL)
        assert store.stats().prefetch_hits == 4


def test_the_last_layer_reads_nothing_ahead(path: Path) -> None:
    with opened_store(path, 16, staging=8, layers=1) as (store, experts):
        streamed(store, experts, 0, ALL, tokens=100)
        assert store.stats().prefetched == 0


def test_interrupted_books_are_made_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened_store(path, 4) as (store, experts):
        streamed(store, experts, 0, [1, 2])
        with monkeypatch.context() as patch:
            patch.setattr(store, "_begin_reads", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(store.stream(1, [3], 1, go_on))
        store.end_forward(0)
        assert sorted(streamed(store, experts, 0, ALL)) == list(ALL)
        assert store.resident() <= 4


def test_what_another_thread_uses_survives_an_interrupt(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened_store(path, 6) as (store, experts):
        has_fetched, may_end = threading.Event(), threading.Event()
        kept_well: list[bool] = []

        def other() -> None:
            weights = store.fetch(0, [5])[0]
            has_fetched.set()
            may_end.wait(20)
            kept_well.append(same_expert(weights, experts.expert(0, 5)))
            store.end_forward(1)

        thread = threading.Thread(target=other)
        thread.start()
        has_fetched.wait(20)
        with monkeypatch.context() as patch:
            patch.setattr(store, "_begin_reads", _interrupt)
            with pytest.raises(KeyboardInterrupt):
                list(store.stream(1, [3], 1, go_on))
        store.end_forward(0)
        for layer in (1, 2):
            assert sorted(streamed(store, experts, layer, ALL)) == list(ALL)
        may_end.set()
        thread.join()
        assert kept_well == [True]
        # Its slot is back: all slots can be used at once.
        assert len(store.fetch(0, range(6))) == 6


def _interrupt(*_arguments: object) -> None:
    raise KeyboardInterrupt

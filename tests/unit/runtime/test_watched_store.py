"""Experts on a drive that a GPU's stream waits for: same bits, and never one that has gone."""

from __future__ import annotations

import errno
import gc
import os
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from expert_store_samples import opened_store
from tiny_model import random_tensors, tiny_config, write_gguf
from torch import Tensor

from edgedsv4.errors import CancelledError, ExpertReadError, NumericError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.next_pairs import NextPairs
from edgedsv4.kernels.native.library import library
from edgedsv4.model.expert_stager import ExpertStager
from edgedsv4.model.gpu_banks import PlacedLayer
from edgedsv4.model.gpu_residents import Residents
from edgedsv4.model.host_experts import HostExperts, HostSetting
from edgedsv4.model.moe import guess_by_router
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.aged_frequency import AgedFrequency
from edgedsv4.runtime.expert_store import MappedExperts
from edgedsv4.runtime.hybrid import HybridWork, with_hybrid
from edgedsv4.runtime.watched_store import WatchedStore

LAYERS, EXPERTS, K = 2, 16, 6
CONFIG = tiny_config(
    compress_ratios=(0, 0), num_hash_layers=0, num_experts=EXPERTS, experts_per_token=K
)
LIMITS = [1.5] * LAYERS


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("store") / "tiny.gguf"
    write_gguf(path, CONFIG, random_tensors(CONFIG, seed=3), types="a")
    return path


def setting(*, has_int8: bool) -> HostSetting:
    return HostSetting(threads=2, has_int8=has_int8)


@contextmanager
def opened(
    path: Path,
    slots: int,
    *,
    has_int8: bool = True,
    places: list[Tensor | None] | None = None,
    **changes: Any,
) -> Iterator[tuple[HostExperts, HostExperts, WatchedStore]]:
    """Experts out of a store, the same ones in the mapping, and the store."""
    with opened_store(path, slots, kind=WatchedStore, **changes) as (store, experts):
        assert isinstance(store, WatchedStore)
        where = places or [None] * LAYERS
        how = setting(has_int8=has_int8)
        mapped = MappedExperts(experts, torch.device("cpu"))
        host = HostExperts(CONFIG, LIMITS, store, where, how)
        try:
            yield host, HostExperts(CONFIG, LIMITS, mapped, where, how), store
        finally:
            host.close()


def draw(seed: int, tokens: int = 1) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, CONFIG.hidden_size, generator=made)
    order = torch.rand(tokens, EXPERTS, generator=made).argsort(dim=1)[:, :K]
    return x, order.to(torch.int32).contiguous(), torch.rand(tokens, K, generator=made)


def token(host: HostExperts, layer: int, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """What the stream's function leaves, called by a thread that holds no lock of Python's."""
    x, ids, weights = given
    host.step.x.copy_(x)
    host.step.ids.copy_(ids)
    host.step.weights.copy_(weights)
    host.step_out.fill_(torch.nan)
    lib, _ = library()
    thread = threading.Thread(target=lib.dk_host_experts, args=(host._jobs + layer,), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive()
    return host.step_out.clone()


def step(host: HostExperts, store: WatchedStore | None, seed: int) -> Tensor:
    """All layers of a token."""
    if store is not None:
        store.begin_forward([1])
    host.begin()
    out = [token(host, layer, draw(100 * seed + layer)) for layer in range(LAYERS)]
    host.check()
    host.end_step()
    if store is not None:
        store.end_forward(1)
    return torch.cat(out)


def table_of(host: HostExperts) -> set[tuple[int, int]]:
    """Experts that the function would use without asking."""
    _, ffi = library()
    every = ((layer, expert) for layer in range(LAYERS) for expert in range(EXPERTS))
    return {(at, e) for at, e in every if host._records[at][3 * e].data != ffi.NULL}


@pytest.mark.parametrize("has_int8", [True, False], ids=["int8", "f32"])
@pytest.mark.parametrize("slots", [K, 9, LAYERS * EXPERTS])
def test_a_token_has_the_same_bits_whatever_was_in_memory(
    path: Path, slots: int, *, has_int8: bool
) -> None:
    with opened(path, slots, has_int8=has_int8) as (host, mapped, store):
        for seed in (1, 2, 1, 3, 3, 2):
            assert torch.equal(step(host, store, seed), step(mapped, None, seed))
            cached = {key for key, _ in store._books.cached()}
            assert table_of(host) == cached
            assert len(cached) <= slots
        counts, stats = host.counts(), store.stats()
        assert (counts.experts, counts.left) == (6 * LAYERS * K, 0)
        assert stats.asked == 6 * LAYERS * K
        if slots == LAYERS * EXPERTS:
            # Every expert is read once, and what is there is used without asking.
            used = {(at, e) for seed in (1, 2, 3) for at in (0, 1) for e in ids_of(seed, at)}
            assert stats.disk_reads == len(used)
            assert store.resident() == len(used)


def ids_of(seed: int, layer: int) -> list[int]:
    return [int(e) for e in draw(100 * seed + layer)[1].flatten()]


def test_experts_of_the_card_are_left_out_and_counted(path: Path) -> None:
    places: list[Tensor | None] = [torch.full((EXPERTS,), -1, dtype=torch.int32) for _ in LIMITS]
    for layer, found in enumerate(places):
        assert found is not None
        found[ids_of(1, layer)[:2]] = torch.arange(2, dtype=torch.int32)
    with opened(path, K, places=places) as (host, mapped, store):
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))
        assert (host.counts().experts, host.counts().left) == (LAYERS * (K - 2), LAYERS * 2)
        assert store.stats().asked == LAYERS * (K - 2)
        places_of_all = torch.zeros(EXPERTS, dtype=torch.int32)
        for found in places:
            assert found is not None
            found.copy_(places_of_all)
        assert torch.equal(step(host, store, 2), torch.zeros(LAYERS, CONFIG.hidden_size))


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_chunks_have_the_bits_of_the_mapping_with_few_slots(path: Path, tokens: int) -> None:
    with opened(path, K) as (host, mapped, store):
        for layer in range(LAYERS):
            found = []
            for one in (host, mapped):
                memory = one.chunk(tokens)
                for target, given in zip(
                    (memory.x, memory.ids, memory.weights), draw(layer, tokens), strict=True
                ):
                    target.copy_(given)
                memory.out.fill_(torch.nan)
                one.run_chunk(layer)
                found.append(memory.out.clone())
            assert torch.equal(*found)
        store.end_forward(tokens)


def test_a_stopped_chunk_leaves_a_store_that_serves(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise CancelledError("stopped")

    with opened(path, K) as (host, mapped, store):
        memory = host.chunk(40)
        for target, given in zip((memory.x, memory.ids, memory.weights), draw(0, 40), strict=True):
            target.copy_(given)
        with monkeypatch.context() as patch:
            patch.setattr(store._filler, "collect", list)  # nothing arrives
            with pytest.raises(CancelledError):
                host.run_chunk(0, stop)
        store.end_forward(0)
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))


def test_a_step_that_waits_can_be_stopped(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = threading.Event()

    def stop() -> None:
        asked.set()
        raise CancelledError("stopped")

    with opened(path, K) as (host, mapped, store):
        with monkeypatch.context() as patch:
            patch.setattr(store._filler, "collect", list)  # nothing arrives
            store.begin_forward([1])
            host.begin(stop)
            token(host, 0, draw(100))
            with pytest.raises(CancelledError):
                host.check()
        assert asked.is_set()
        store.end_forward(0)
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))


def test_a_read_that_fails_ends_the_step_with_its_reason_and_not_for_ever(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, K) as (host, mapped, store):
        wanted = step(mapped, None, 1)
        start = store._filler.start

        def fail(_reading: object) -> ExpertReadError:
            return ExpertReadError(f"cannot be read: {os.strerror(errno.EIO)}")

        monkeypatch.setattr(store._filler, "start", fail)
        with pytest.raises(ExpertReadError, match="Input/output"):
            step(host, store, 1)
        assert bool(torch.isnan(host.step_out).all())
        store.end_forward(0)
        monkeypatch.setattr(store._filler, "start", start)
        assert torch.equal(step(host, store, 1), wanted)


def test_an_expert_that_does_not_exist_is_an_error(path: Path) -> None:
    with opened(path, K) as (host, _, store):
        x, ids, weights = draw(1)
        ids[0, 3] = EXPERTS
        host.begin()
        token(host, 1, (x, ids, weights))
        with pytest.raises(NumericError, match=f"layer 1 chose expert {EXPERTS}"):
            host.check()
        store.end_forward(0)
        step(host, store, 2)


def test_what_an_interrupt_left_half_done_is_not_used(path: Path) -> None:
    with opened(path, 12) as (host, mapped, store):
        step(host, store, 1)
        assert table_of(host)
        store._is_dirty = True
        store.begin_forward(None)
        assert not table_of(host)
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))


def test_a_table_that_comes_later_hears_of_all_that_is_there(path: Path) -> None:
    with opened(path, 12) as (host, mapped, store):
        step(host, store, 1)
        other = HostExperts(CONFIG, LIMITS, store, [None] * LAYERS, setting(has_int8=True))
        assert table_of(other) == table_of(host) != set()
        assert torch.equal(step(other, store, 1), step(mapped, None, 1))
        other.close()


def test_who_waits_when_the_desk_closes_hears_of_it(path: Path) -> None:
    with opened(path, K) as (host, _, store):
        entered, go = threading.Event(), threading.Event()

        def slow(*_: object) -> Iterator[list[object]]:
            entered.set()
            go.wait(60)
            raise ExpertReadError("the drive is gone")
            yield []

        store.stream = slow  # type: ignore[method-assign,assignment]
        lib, _ = library()
        x, ids, weights = draw(1)
        host.step.x.copy_(x)
        host.step.ids.copy_(ids)
        host.step.weights.copy_(weights)
        asking = threading.Thread(target=lib.dk_host_experts, args=(host._jobs,), daemon=True)
        asking.start()
        assert entered.wait(60)
        closing = threading.Thread(target=host.close, daemon=True)
        closing.start()
        go.set()
        for thread in (asking, closing):
            thread.join(60)
            assert not thread.is_alive()
        with pytest.raises(ExpertReadError, match="drive is gone"):
            host.check()


def test_a_host_that_nobody_holds_is_gone_with_its_thread(path: Path) -> None:
    def servers() -> int:
        return sum(thread.name == "dsv4-experts" for thread in threading.enumerate())

    before = servers()
    with opened_store(path, K, kind=WatchedStore) as (store, _):
        assert isinstance(store, WatchedStore)
        host = HostExperts(CONFIG, LIMITS, store, [None] * LAYERS, setting(has_int8=True))
        assert servers() == before + 1
        store._table = None
        del host
        gc.collect()
        until = time.monotonic() + 60
        while servers() > before and time.monotonic() < until:
            time.sleep(0.05)
        assert servers() == before


def test_what_pairs_bring_and_the_policy_keeps_is_in_the_table(path: Path) -> None:
    followers = np.tile(np.arange(8, dtype=np.int32), (1, EXPERTS, 1))
    counts = np.full((1, EXPERTS, 8), 5, dtype=np.uint64)
    pairs = NextPairs(followers, counts, np.full((1, EXPERTS), 9, dtype=np.uint64))
    chosen: dict[str, Any] = {
        "prefetch": "pairs",
        "pairs": pairs,
        "guesses": 8,
        "staging": 8,
        "policy": lambda: AgedFrequency(LAYERS, EXPERTS),
    }
    with opened(path, 9, **chosen) as (host, mapped, store):
        has_grown = False
        for seed in (1, 2, 3, 1, 1, 2, 2, 3, 3, 3, 1, 2):
            before = {key for key, _ in store._books.cached()}
            assert torch.equal(step(host, store, seed), step(mapped, None, seed))
            kept = {key for key, _ in store._books.cached()}
            assert table_of(host) == kept
            has_grown = has_grown or bool(kept - before)
        assert has_grown
        stats = store.stats()
        assert stats.prefetched > 0
        assert stats.guess_misses > 0


def test_a_desk_that_waits_guesses_by_the_next_router(path: Path) -> None:
    chosen: dict[str, Any] = {"prefetch": "gate", "guesses": 4, "staging": 8}
    with (
        open_checkpoint(path) as checkpoint,
        opened_store(path, 9, kind=WatchedStore, **chosen) as (store, experts),
    ):
        assert isinstance(store, WatchedStore)
        weights, _ = load_weights(checkpoint)
        routers = [layer.moe for layer in weights.layers]
        how, nowhere = setting(has_int8=True), [None] * LAYERS
        host = HostExperts(CONFIG, LIMITS, store, nowhere, how, routers)
        told: list[tuple[int, list[int]]] = []
        guess = store.guess

        def listen(layer: int, ids: Sequence[int]) -> None:
            told.append((layer, list(ids)))
            guess(layer, ids)

        store.guess = listen  # type: ignore[method-assign]
        mapped = HostExperts(
            CONFIG, LIMITS, MappedExperts(experts, torch.device("cpu")), nowhere, how
        )
        for seed in (1, 2, 3, 2):
            assert torch.equal(step(host, store, seed), step(mapped, None, seed))
            assert {key for key, _ in store._books.cached()} == table_of(host)
        x = draw(100)[0]
        wanted = guess_by_router(x, routers[1], 4, backend="reference")[0].tolist()
        assert told[0] == (1, wanted)
        assert {layer for layer, _ in told} == {1}  # nothing follows the last layer
        host.close()


def test_what_is_on_the_card_is_not_read_ahead(tmp_path: Path) -> None:
    config = tiny_config(compress_ratios=(0, 0), num_hash_layers=1, num_experts=EXPERTS)
    path = tmp_path / "hash.gguf"
    write_gguf(path, config, random_tensors(config, seed=4), types="a")
    with open_checkpoint(path) as checkpoint:
        table = load_weights(checkpoint)[0].layers[0].moe.expert_table
    assert table is not None
    tokens = list(range(6))
    sure = set(table[tokens].flatten().tolist())
    there = set(sorted(sure)[::2])
    chosen: dict[str, Any] = {
        "tables": {0: table},
        "is_elsewhere": lambda layer, expert: layer == 0 and expert in there,
    }
    with opened_store(path, 64, kind=WatchedStore, **chosen) as (store, _):
        store.begin_forward(tokens)
        for _ in store.stream(0, sorted(sure - there), 6, lambda: None):
            pass
        assert store.stats().prefetched == len(sure - there)
        assert not any((0, expert) in dict(store._books.cached()) for expert in there)
        store.end_forward(6)


def test_whatever_ends_a_wait_lets_the_stream_go_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop() -> None:
        raise KeyboardInterrupt  # not an Exception: nothing but the desk can catch it

    with opened(path, K) as (host, mapped, store):
        with monkeypatch.context() as patch:
            patch.setattr(store._filler, "collect", list)  # nothing arrives
            host.begin(stop)
            token(host, 0, draw(100))
            with pytest.raises(KeyboardInterrupt):
                host.check()
        store.end_forward(0)
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))


def test_claims_of_spoilt_books_are_not_given_back_to_new_ones(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with opened(path, K) as (host, mapped, store):
        with monkeypatch.context() as patch:
            patch.setattr(store._ahead, "read_guesses", fail)  # in the middle of a change
            with pytest.raises(MemoryError):
                step(host, store, 1)
        store.end_forward(0)
        let_go, unknown = store._let_go, list[tuple[int, int]]()

        def watch(ask: Any, *, is_over: bool) -> None:
            books = store._books
            keys = ask.claims if is_over else ask.held
            unknown.extend(k for k in keys if not (k in books._claims or k in books.readings))
            let_go(ask, is_over=is_over)

        monkeypatch.setattr(store, "_let_go", watch)
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))
        assert unknown == []


def test_a_failure_that_nobody_asked_for_is_not_the_next_steps(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(path, K) as (host, mapped, store):
        with monkeypatch.context() as patch:
            patch.setattr(store._filler, "start", lambda _: ExpertReadError("gone"))
            host.begin()
            token(host, 0, draw(100))
        store.end_forward(0)  # an interrupt came before the check
        assert torch.equal(step(host, store, 1), step(mapped, None, 1))


def test_a_closed_store_is_freed_without_a_collection(path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        with opened(path, K) as (host, mapped, store):
            step(host, store, 1)
            bank = weakref.ref(store.bank)
        del host, mapped, store
        until = time.monotonic() + 60
        while bank() is not None and time.monotonic() < until:
            time.sleep(0.05)
        assert bank() is None
    finally:
        gc.enable()


@dataclass
class NetworkOfPlaces:
    """As much of a network as sharing the work out looks at."""

    places: list[PlacedLayer]
    hybrid: object = None

    def placed_layers(self) -> list[PlacedLayer]:
        return self.places


def test_a_thread_that_opens_a_model_keeps_no_expert(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(self: Residents) -> None:
        self._bring(self._layers[0], 3, 0)

    def bring(self: ExpertStager, placed: PlacedLayer, expert: int, _slot: int) -> None:
        next(self._stream.stream(placed.layer, (expert,), 1, lambda: None))  # type: ignore[union-attr]

    monkeypatch.setattr(Residents, "prepare", prepare)
    monkeypatch.setattr(ExpertStager, "replace", bring)
    rates = SimpleNamespace(prefers_cpu=lambda *_: True)
    monkeypatch.setattr("edgedsv4.runtime.hybrid.measure_rates", lambda *_: rates)
    elsewhere = torch.full((EXPERTS,), -1, dtype=torch.int32)
    layers = [
        PlacedLayer(layer, None, elsewhere.clone(), elsewhere.clone(), tuple(range(EXPERTS)))  # type: ignore[arg-type]
        for layer in range(LAYERS)
    ]
    work = HybridWork(mode="auto", setting=setting(has_int8=True), device=torch.device("cpu"))
    with opened_store(path, K, kind=WatchedStore) as (store, _):
        network: Any = with_hybrid(NetworkOfPlaces(layers), CONFIG, store, work)  # type: ignore[arg-type]
        assert not store._asks
        assert not store._books._claims
        network.hybrid.close()

"""The KV cache alone: rings, counts, rewind limits, checkpoints, bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from tiny_model import tiny_config

from edgedsv4.model.kv_cache import REWIND_TOKENS, KvCache, Numerics
from edgedsv4.model.layer_plan import layer_plans
from edgedsv4.model.row_store import FloatRows, GrowingRows, PositionRing

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

CPU = torch.device("cpu")
EXACT = Numerics(profile="exact", dtype=torch.float32, device=CPU)
DEFAULT = Numerics(profile="default", dtype=torch.float32, device=CPU)


def cache_of(config: ModelConfig, capacity: int = 4096, numerics: Numerics = EXACT) -> KvCache:
    return KvCache(config, layer_plans(config), capacity=capacity, numerics=numerics)


def feed(cache: KvCache, count: int, first: int | None = None) -> None:
    """Give every ring a row per position whose value is the position."""
    start = cache.length if first is None else first
    for layer in cache.layers.values():
        for ring in layer.rings():
            width = ring.read(ring.oldest, ring.oldest).shape[1]
            ring.stage(torch.arange(start, start + count).float()[:, None].expand(-1, width))
    cache.commit(count)


def test_a_ring_returns_the_rows_of_its_last_positions() -> None:
    ring = PositionRing(FloatRows(1, torch.float32, CPU), slots=5)
    for start, stop in ((0, 3), (3, 4), (4, 11)):
        ring.stage(torch.arange(start, stop).float()[:, None])
        ring.commit(stop)
    assert ring.oldest == 6
    assert ring.read(6, 11).flatten().tolist() == [6, 7, 8, 9, 10]


def test_a_ring_refuses_rows_it_has_lost() -> None:
    ring = PositionRing(FloatRows(1, torch.float32, CPU), slots=4)
    ring.stage(torch.zeros(9, 1))
    ring.commit(9)
    with pytest.raises(IndexError, match="holds positions from 5"):
        ring.read(4, 6)


def test_staged_rows_enter_only_at_commit() -> None:
    ring = PositionRing(FloatRows(1, torch.float32, CPU), slots=4)
    ring.stage(torch.ones(3, 1))
    ring.commit(3)
    ring.stage(torch.full((4, 1), 9.0))
    ring.discard()
    ring.commit(3)
    assert ring.read(0, 3).flatten().tolist() == [1, 1, 1]


def test_growing_rows_read_back_by_range_and_by_id() -> None:
    rows = GrowingRows(FloatRows(2, torch.float32, CPU), capacity=10)
    rows.write(0, torch.zeros(4, 2))
    rows.write(4, torch.ones(3, 2))
    assert rows.read(3, 6)[:, 0].tolist() == [0, 1, 1]
    assert rows.gather(torch.tensor([6, 0])).tolist() == [[1, 1], [0, 0]]


@pytest.mark.parametrize(
    "chunks", [[1000], [1] * 700, [129, 3, 500, 1, 1]], ids=["one", "ones", "mixed"]
)
def test_any_of_the_last_tokens_can_be_dropped(chunks: list[int]) -> None:
    cache = cache_of(tiny_config(window=32))
    for count in chunks:
        feed(cache, count)
    assert cache.rewind_floor <= cache.length - REWIND_TOKENS - 1


def test_a_short_timeline_can_be_dropped_whole() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 100)
    assert cache.rewind_floor == 0


@pytest.mark.parametrize("back", [1, 5, 127, 128])
def test_after_a_rewind_everything_the_next_token_needs_is_there(back: int) -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 777)
    cache.rewind(777 - back)
    for layer in cache.layers.values():
        for ring in layer.rings():
            first = layer.first_needed(ring, cache.length)
            rows = ring.read(first, cache.length)
            assert rows[:, 0].tolist() == list(range(first, cache.length))


def test_rewinds_do_not_add_up_past_the_floor() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 777)
    floor = cache.rewind_floor
    cache.rewind(700)
    assert cache.rewind_floor == floor
    with pytest.raises(IndexError, match="rewind to"):
        cache.rewind(floor - 1)
    assert cache.length == 700


def test_growing_again_after_a_rewind_raises_the_floor() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 777)
    cache.rewind(700)
    feed(cache, 400)
    assert 777 <= cache.rewind_floor <= 1100 - REWIND_TOKENS - 1


def test_a_rewind_to_nothing_starts_over() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 777)
    cache.rewind(0)
    feed(cache, 20)
    assert (cache.length, cache.rewind_floor) == (20, 0)


@pytest.mark.parametrize("position", [0, 1, 3, 127, 128, 129, 130, 500])
def test_a_checkpoint_brings_back_what_the_next_tokens_need(position: int) -> None:
    cache = cache_of(tiny_config(window=32))
    if position:
        feed(cache, position)
    checkpoint = cache.checkpoint()
    feed(cache, 900)
    cache.restore(checkpoint)
    assert cache.length == position
    for layer in cache.layers.values():
        for ring in layer.rings():
            first = layer.first_needed(ring, max(0, position - 1))
            rows = ring.read(first, position)
            assert rows[:, 0].tolist() == list(range(first, position))
    assert cache.rewind_floor <= max(0, position - 1)


def test_a_checkpoint_at_the_lowest_place_keeps_what_the_next_token_needs() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 900)
    cache.rewind(cache.rewind_floor)
    length = cache.length
    checkpoint = cache.checkpoint()
    feed(cache, 300)
    cache.restore(checkpoint)
    assert (cache.length, cache.rewind_floor) == (length, length)


def test_a_checkpoint_from_the_future_is_refused() -> None:
    cache = cache_of(tiny_config(window=32))
    feed(cache, 100)
    checkpoint = cache.checkpoint()
    cache.rewind(50)
    with pytest.raises(IndexError, match="past the end 50"):
        cache.restore(checkpoint)


def test_a_checkpoint_counts_its_own_bytes() -> None:
    cache = cache_of(tiny_config(window=32), numerics=DEFAULT)
    feed(cache, 333)
    checkpoint = cache.checkpoint()
    stored = sum(
        part.numel() * part.element_size() for _, parts in checkpoint.rings for part in parts
    )
    assert checkpoint.nbytes == stored
    assert checkpoint.nbytes < cache.ring_bytes()


def released_flash() -> ModelConfig:
    """Shapes of DeepSeek-V4-Flash that decide the cache's size."""
    return tiny_config(
        head_dim=512,
        rope_dim=64,
        window=128,
        index_dim=128,
        index_topk=512,
        num_layers=43,
        compress_ratios=(0, 0, *(4, 128) * 20, 4),
    )


def test_flash_grows_by_3514_and_a_quarter_bytes_per_token() -> None:
    cache = cache_of(released_flash(), capacity=128, numerics=DEFAULT)
    assert cache.growing_bytes(128) == 3514.25 * 128


def test_rings_of_flash_hold_window_and_rewind_rows() -> None:
    cache = cache_of(released_flash(), capacity=128, numerics=DEFAULT)
    windows = 43 * (128 + REWIND_TOKENS) * 584
    raw_128 = 20 * (128 + REWIND_TOKENS) * 2 * 512 * 4
    raw_4 = 21 * (8 + REWIND_TOKENS) * 2 * 2 * (512 + 128) * 4
    assert cache.ring_bytes() == windows + raw_128 + raw_4


def test_allocated_bytes_cover_the_whole_capacity() -> None:
    cache = cache_of(tiny_config(), capacity=1000, numerics=DEFAULT)
    assert cache.nbytes() == cache.ring_bytes() + cache.growing_bytes(1000)

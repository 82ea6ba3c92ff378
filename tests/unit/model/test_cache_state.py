"""The stores of a cache as bytes: how many, in which order, and into an empty cache again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from memory_model import BACKENDS, ids_tensor, model_of, state_of
from tiny_model import random_tensors, random_tokens, tiny_config

from edgedsv4.model.cache_state import (
    cache_blocks,
    cache_layout,
    checkpoint_blocks,
    fill_cache,
    read_checkpoint,
    ring_starts,
)
from edgedsv4.model.kv_cache import KvCache, Numerics
from edgedsv4.model.layer_plan import layer_plans

if TYPE_CHECKING:
    from edgedsv4.model.cache_state import Bytes, Fill, OpenSection
    from edgedsv4.model.model import Model

CONFIG = tiny_config()
FLASH_RATIOS = (0, 0, *(4, 128) * 20, 4)


def filled(model: Model, count: int, rewound: int = 0) -> KvCache:
    cache = model.new_cache(400)
    for part in ids_tensor(random_tokens(CONFIG, count, 1)).split(100):
        model.forward(part, cache, logits="none")
    cache.rewind(count - rewound)
    return cache


def joined(blocks: list[Bytes]) -> bytes:
    return b"".join(block.tobytes() for block in blocks)


def taking(data: bytes) -> tuple[Fill, bytearray]:
    """Fills blocks from the front of some bytes; and what is left of them."""
    left = bytearray(data)

    def fill(block: Bytes) -> None:
        block[:] = np.frombuffer(left[: block.size], dtype=np.uint8)
        del left[: block.size]

    return fill, left


def sections_of(blocks: dict[str, list[Bytes]]) -> OpenSection:
    names = iter(blocks)

    @contextmanager
    def section(name: str) -> Iterator[Fill]:
        assert name == next(names)
        fill, left = taking(joined(blocks[name]))
        yield fill
        assert not left

    return section


@pytest.mark.parametrize("profile", ["default", "exact"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_filled_cache_holds_what_the_other_held(backend: str, profile: str) -> None:
    model = model_of(CONFIG, random_tensors(CONFIG, 1), profile=profile, backend=backend)  # type: ignore[arg-type]
    for count, rewound in ((1, 0), (31, 0), (32, 0), (129, 0), (350, 0), (350, 90)):
        cache, other = filled(model, count, rewound), model.new_cache(500)
        fill_cache(other, cache.length, ring_starts(cache), sections_of(cache_blocks(cache)))
        before, after = state_of(model, cache), state_of(model, other)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert (other.length, other.rewind_floor) == (cache.length, cache.rewind_floor)


def test_blocks_are_as_long_as_the_layout_says() -> None:
    model = model_of(CONFIG, random_tensors(CONFIG, 1), profile="default")
    cache = filled(model, 350, 20)
    layout = cache_layout(CONFIG, cache)
    sizes = {name: sum(b.size for b in blocks) for name, blocks in cache_blocks(cache).items()}
    window, partial = layout.ring_bytes(ring_starts(cache), 330)
    rows, keys = layout.compressed_bytes(330)
    assert sizes == {
        "window_rows": window,
        "compressed_rows": rows,
        "index_keys": keys,
        "partial_windows": partial,
    }


def test_checkpoint_is_read_back() -> None:
    model = model_of(CONFIG, random_tensors(CONFIG, 1), profile="default")
    cache = filled(model, 250)
    state = cache.checkpoint()
    fill, left = taking(joined(checkpoint_blocks(state)))
    other = read_checkpoint(cache, 250, tuple(first for first, _ in state.rings), fill)
    assert not left
    assert (other.position, other.nbytes) == (state.position, state.nbytes)
    for (first, parts), (first_again, again) in zip(state.rings, other.rings, strict=True):
        assert first == first_again
        assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))


def test_rings_and_the_layout_agree_on_what_a_position_needs() -> None:
    model = model_of(CONFIG, random_tensors(CONFIG, 1))
    cache = model.new_cache(400)
    pairs = list(zip(cache._rings(), cache_layout(CONFIG, cache).rings(), strict=True))
    for (layer, ring), described in pairs:
        assert (ring.slots, ring.row_bytes) == (described.slots, described.row_bytes)
        for position in range(400):
            assert layer.first_needed(ring, position) == described.first_needed(position)


def test_flash_takes_3514_25_bytes_per_token() -> None:
    config = tiny_config(
        compress_ratios=FLASH_RATIOS, head_dim=512, rope_dim=64, index_dim=128, window=128
    )
    numerics = Numerics(profile="default", dtype=torch.float32, device=torch.device("cpu"))
    cache = KvCache(config, layer_plans(config), capacity=1, numerics=numerics)
    layout = cache_layout(config, cache)
    assert (sum(layout.row_bytes), sum(layout.key_bytes)) == (584, 68)
    assert Fraction(sum(layout.compressed_bytes(1 << 20)), 1 << 20) == Fraction(14057, 4)

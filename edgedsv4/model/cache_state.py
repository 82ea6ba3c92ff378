"""A timeline's KV cache at rest: its rows as stored, in one order that every backend shares.

Backends differ in what fills a cache, never in its bytes, so the rows travel as they are: FP8 rows,
FP4 index keys, raw rows in the accumulator's type. A store is written part by part (codes, then
scales), layers ascending; a ring from its first position to its last; window rings before raw ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.formats.snapshot_header import LayerStores, SnapshotLayout
from edgedsv4.model.kv_cache import REWIND_TOKENS, CacheCheckpoint

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.kv_cache import KvCache, LayerCache
    from edgedsv4.model.row_store import Parts, PositionRing

Bytes = npt.NDArray[np.uint8]
Fill: TypeAlias = Callable[[Bytes], None]
"""Fills an array with the next bytes of a section."""
OpenSection: TypeAlias = Callable[[str], AbstractContextManager[Fill]]
"""Opens a section by name, in file order; at the end it must have been read whole."""

_DTYPES = {torch.float32: "f32", torch.float64: "f64", torch.bfloat16: "bf16"}


def cache_layout(config: ModelConfig, cache: KvCache) -> SnapshotLayout:
    """How a cache of the main model stores its rows."""
    numerics = cache.numerics
    row, key = (
        tuple(part.shape[1] * part.element_size() for part in codec.allocate(0))
        for codec in (numerics.kv_rows(config), numerics.index_keys(config))
    )
    return SnapshotLayout(
        profile=numerics.profile,
        dtype=_DTYPES[numerics.dtype],
        vocab_size=config.vocab_size,
        window=config.window,
        spare=REWIND_TOKENS,
        row_bytes=row,
        key_bytes=key,
        stream_bytes=config.hc_streams * config.hidden_size * numerics.dtype.itemsize,
        layers=tuple(_layer_stores(layer) for layer in cache.layers.values()),
    )


def _layer_stores(layer: LayerCache) -> LayerStores:
    plan = layer.plan
    raw, key = (
        0 if part is None else part.raw.row_bytes for part in (layer.compressor, layer.indexer)
    )
    return LayerStores(plan.ratio, 1 + plan.has_overlap if plan.ratio else 0, raw, key)


def ring_starts(cache: KvCache) -> tuple[int, ...]:
    """The oldest position that each ring holds."""
    return tuple(ring.oldest if cache.length else 0 for ring in cache.rings())


def cache_blocks(cache: KvCache) -> dict[str, list[Bytes]]:
    """The stores of a cache as uint8 blocks, by section; views of its memory where that can be."""
    starts = zip(cache.rings(), ring_starts(cache), strict=True)
    rings = [ring.stored(first, cache.length) for ring, first in starts]
    windows = len(cache.layers)
    return {
        "window_rows": _blocks(rings[:windows]),
        "compressed_rows": _blocks(_growing(cache, cache.length, is_keys=False)),
        "index_keys": _blocks(_growing(cache, cache.length, is_keys=True)),
        "partial_windows": _blocks(rings[windows:]),
    }


def checkpoint_blocks(state: CacheCheckpoint) -> list[Bytes]:
    """The ring rows of a checkpoint as uint8 blocks."""
    return _blocks(parts for _, parts in state.rings)


def fill_cache(cache: KvCache, length: int, starts: tuple[int, ...], section: OpenSection) -> None:
    """Fill an empty cache with the rows of `length` tokens; it counts them only at the very end.

    Args:
        cache: empty, with room for the tokens.
        length: tokens.
        starts: first position of each ring.
        section: opens the sections of `cache_blocks`.
    """
    rings = list(zip(cache.rings(), starts, strict=True))
    windows = len(cache.layers)
    with section("window_rows") as fill:
        for ring, first in rings[:windows]:
            fill_ring(ring, first, length, fill)
    for name in ("compressed_rows", "index_keys"):
        with section(name) as fill:
            for parts in _growing(cache, length, is_keys=name == "index_keys"):
                _fill_parts(parts, fill)
    with section("partial_windows") as fill:
        for ring, first in rings[windows:]:
            fill_ring(ring, first, length, fill)
    cache.length = length


def fill_ring(ring: PositionRing, first: int, stop: int, fill: Fill) -> None:
    """Fill a ring with stored rows of positions first..stop-1, which are then all it holds."""
    parts = ring.allocate(stop - first)
    _fill_parts(parts, fill)
    ring.load(parts, first, stop)
    ring.oldest = first


def read_checkpoint(
    cache: KvCache, position: int, starts: tuple[int, ...], fill: Fill
) -> CacheCheckpoint:
    """A checkpoint of a cache, from the bytes of `checkpoint_blocks`."""
    saved = []
    for ring, first in zip(cache.rings(), starts, strict=True):
        parts = ring.allocate(position - first)
        _fill_parts(parts, fill)
        saved.append((first, parts))
    nbytes = sum(part.numel() * part.element_size() for _, parts in saved for part in parts)
    return CacheCheckpoint(position, tuple(saved), nbytes)


def as_bytes(rows: Tensor) -> Bytes:
    """The memory of stored rows [N, width] as uint8 [N * row bytes]; copied only if need be."""
    flat: Bytes = rows.cpu().contiguous().view(torch.uint8).reshape(-1).numpy()
    return flat


def fill_tensor(rows: Tensor, fill: Fill) -> None:
    """Fill stored rows [N, width], a contiguous tensor."""
    is_staged = rows.device.type != "cpu"
    memory = torch.empty(rows.shape, dtype=rows.dtype) if is_staged else rows
    fill(memory.view(torch.uint8).reshape(-1).numpy())
    if is_staged:
        rows.copy_(memory)


def _growing(cache: KvCache, length: int, *, is_keys: bool) -> list[Parts]:
    """The compressed rows (or index keys) of `length` tokens, of every layer that has some."""
    found = []
    for layer in cache.layers.values():
        part = layer.indexer if is_keys else layer.compressor
        if part is not None:
            found.append(part.rows.stored(layer.plan.visible_rows(length)))
    return found


def _blocks(stores: Iterable[Parts]) -> list[Bytes]:
    return [as_bytes(part) for parts in stores for part in parts]


def _fill_parts(parts: Parts, fill: Fill) -> None:
    for part in parts:
        fill_tensor(part, fill)

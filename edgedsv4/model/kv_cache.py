"""What a timeline remembers between tokens, layer by layer, and how it goes back.

Each layer has a window ring (raw key/value rows), and with compression: compressed rows, the raw
projections of the windows that may still be pooled, and for the indexer its keys and raw
projections. All counts follow from the number of tokens (rows = tokens // ratio), so going back is
mostly forgetting; only the rings limit how far. They hold `REWIND_TOKENS` more positions than the
forward needs. Further back takes a checkpoint: a copy of the few ring rows that the next token
needs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from edgedsv4.kernels.precision import accumulator
from edgedsv4.model.row_store import (
    FloatRows,
    Fp4Rows,
    Fp8Rows,
    GrowingRows,
    Parts,
    PositionRing,
    RowCodec,
)

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, Profile
    from edgedsv4.model.layer_plan import LayerPlan

REWIND_TOKENS = 128
"""Tokens a timeline can always go back without evaluating anything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """In which type the forward computes, how it keeps rows, and where."""

    profile: Profile
    dtype: torch.dtype
    device: torch.device

    def kv_rows(self, config: ModelConfig) -> RowCodec:
        """Codec of window and compressed rows."""
        if self.profile == "default":
            return Fp8Rows(config.head_dim, config.rope_dim, self.dtype, self.device)
        return FloatRows(config.head_dim, self.dtype, self.device)

    def index_keys(self, config: ModelConfig) -> RowCodec:
        """Codec of index keys."""
        if self.profile == "default":
            return Fp4Rows(config.index_dim, self.dtype, self.device)
        return FloatRows(config.index_dim, self.dtype, self.device)

    def raw_rows(self, width: int) -> RowCodec:
        """Codec of a compressor's raw projections (values and gates)."""
        return FloatRows(2 * width, accumulator(self.dtype), self.device)


class CompressorCache:
    """State of one compressor: its finished rows, and the raw projections of unfinished windows."""

    def __init__(self, plan: LayerPlan, rows: RowCodec, raw: RowCodec, capacity: int) -> None:
        self.rows = GrowingRows(rows, capacity // plan.ratio)
        windows = 2 if plan.has_overlap else 1
        self.raw = PositionRing(raw, windows * plan.ratio + REWIND_TOKENS)


class LayerCache:
    """State of one layer."""

    def __init__(
        self, config: ModelConfig, plan: LayerPlan, numerics: Numerics, capacity: int
    ) -> None:
        self.plan = plan
        self._window = config.window
        kv_rows = numerics.kv_rows(config)
        self.window = PositionRing(kv_rows, config.window + REWIND_TOKENS)
        self.compressor: CompressorCache | None = None
        self.indexer: CompressorCache | None = None
        series = 2 if plan.has_overlap else 1
        if plan.kv_source == plan.layer:
            raw = numerics.raw_rows(series * config.head_dim)
            self.compressor = CompressorCache(plan, kv_rows, raw, capacity)
        if plan.index_source == plan.layer:
            raw = numerics.raw_rows(series * config.index_dim)
            self.indexer = CompressorCache(plan, numerics.index_keys(config), raw, capacity)

    def rings(self) -> Iterator[PositionRing]:
        """Every ring of the layer, window first."""
        yield self.window
        yield from self.raw_rings()

    def raw_rings(self) -> Iterator[PositionRing]:
        """Rings of unfinished windows: the compressor's, then the indexer's."""
        for part in (self.compressor, self.indexer):
            if part is not None:
                yield part.raw

    def first_needed(self, ring: PositionRing, position: int) -> int:
        """First position of `ring` that evaluating `position` reads."""
        if ring is self.window:
            return max(0, position - (self._window - 1))
        return self.plan.first_raw_position(position)

    def rewind_floor(self) -> int:
        """Lowest position that can come next without reading what the rings have lost."""
        return max(self._floor(ring) for ring in self.rings())

    def _floor(self, ring: PositionRing) -> int:
        if ring.oldest == 0:
            return 0
        if ring is self.window:
            return ring.oldest + self._window - 1
        ratio = self.plan.ratio
        return ratio * (-(-ring.oldest // ratio) + (1 if self.plan.has_overlap else 0))

    def growing_bytes(self, length: int) -> int:
        """Bytes of compressed rows and index keys of `length` tokens."""
        parts = (part for part in (self.compressor, self.indexer) if part is not None)
        return sum(self.plan.visible_rows(length) * part.rows.row_bytes for part in parts)


@dataclass(frozen=True, slots=True)
class CacheCheckpoint:
    """Ring rows with which a timeline can be put back to `position`."""

    position: int
    rings: tuple[tuple[int, Parts], ...]
    """(first position, rows), in the order of `KvCache.rings`."""
    nbytes: int


class KvCache:
    """State of one timeline through all layers of a model (or of its draft block).

    While rings are written the length is 0, so that an interrupt between two statements leaves an
    empty timeline and never one whose rows are not its own; what its rings say is then void.
    """

    def __init__(
        self,
        config: ModelConfig,
        plans: Sequence[LayerPlan],
        *,
        capacity: int,
        numerics: Numerics,
    ) -> None:
        self.capacity = capacity
        self.length = 0
        self.numerics = numerics
        self.layers = {plan.layer: LayerCache(config, plan, numerics, capacity) for plan in plans}

    def commit(self, count: int) -> None:
        """Make the `count` tokens just evaluated part of the timeline."""
        end = self._begin_writing() + count
        for _, ring in self._rings():
            ring.commit(end)
        self.length = end

    def discard(self) -> None:
        """Forget what a failed forward had staged."""
        for _, ring in self._rings():
            ring.discard()

    @property
    def rewind_floor(self) -> int:
        """Lowest length that `rewind` can go to."""
        if self.length == 0:
            return 0
        return max(layer.rewind_floor() for layer in self.layers.values())

    def rewind(self, length: int) -> None:
        """Drop all tokens from position `length` on.

        Raises:
            IndexError: if `length` is below `rewind_floor` or above the present length; nothing
            changes.
        """
        if not (length == 0 or self.rewind_floor <= length <= self.length):
            raise IndexError(
                f"rewind to {length}: possible from {self.rewind_floor} to {self.length}"
            )
        self.length = length
        if length == 0:
            for _, ring in self._rings():
                ring.oldest = 0

    def checkpoint(self) -> CacheCheckpoint:
        """Copy what is needed to come back here later.

        It stays valid until the timeline is rewound below its position: other tokens may then
        replace the compressed rows, which a checkpoint does not hold.
        """
        saved: list[tuple[int, Parts]] = []
        nbytes = 0
        for layer, ring in self._rings() if self.length else ():
            # One position more than the next token needs: the last one can be evaluated again.
            # After a long rewind the ring may have lost just that one.
            first = max(ring.oldest, layer.first_needed(ring, max(0, self.length - 1)))
            parts = ring.stored(first, self.length)
            nbytes += sum(part.numel() * part.element_size() for part in parts)
            saved.append((first, parts))
        return CacheCheckpoint(self.length, tuple(saved), nbytes)

    def restore(self, checkpoint: CacheCheckpoint) -> None:
        """Go back to a checkpoint of this cache."""
        if checkpoint.position > self.length:
            raise IndexError(f"checkpoint at {checkpoint.position} is past the end {self.length}")
        if checkpoint.position == 0:
            self.rewind(0)
            return
        self._begin_writing()
        for (_, ring), (first, parts) in zip(self._rings(), checkpoint.rings, strict=True):
            ring.load(parts, first, checkpoint.position)
            ring.oldest = first
        self.length = checkpoint.position

    def rings(self) -> Iterator[PositionRing]:
        """Every ring: the window rings of all layers, then the rings of unfinished windows."""
        return (ring for _, ring in self._rings())

    def growing_bytes(self, length: int | None = None) -> int:
        """Bytes of compressed rows and index keys of `length` tokens (default: those held now)."""
        count = self.length if length is None else length
        return sum(layer.growing_bytes(count) for layer in self.layers.values())

    def ring_bytes(self) -> int:
        """Bytes of all rings, whatever the length."""
        return sum(ring.nbytes for _, ring in self._rings())

    def nbytes(self) -> int:
        """Bytes allocated: rings, and rows for the whole capacity."""
        return self.ring_bytes() + self.growing_bytes(self.capacity)

    def _begin_writing(self) -> int:
        """Let the timeline be empty until the length is set again; the length it had."""
        length, self.length = self.length, 0
        if length == 0:
            for _, ring in self._rings():
                ring.oldest = 0
        return length

    def _rings(self) -> Iterator[tuple[LayerCache, PositionRing]]:
        for layer in self.layers.values():
            yield layer, layer.window
        for layer in self.layers.values():
            for ring in layer.raw_rings():
                yield layer, ring

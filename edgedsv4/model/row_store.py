"""Rows at rest: codecs of cached rows, a store that grows, and a ring of the last rows.

A codec turns float rows into the tensors kept in memory and back. `FloatRows` keeps the compute
type (profile `exact`), `Fp8Rows` and `Fp4Rows` keep what DeepSeek-V4 was trained with (profile
`default`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from edgedsv4.kernels import kv_quant

Parts = tuple[Tensor, ...]
"""Encoded rows: tensors with the same number of rows."""


class RowCodec(Protocol):
    """How rows of one width are stored."""

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""

    def allocate(self, rows: int) -> Parts:
        """Memory for `rows` rows, not initialised."""

    def encode(self, rows: Tensor) -> Parts:
        """[N, width] floats -> what is stored."""

    def decode(self, parts: Parts) -> Tensor:
        """Stored rows -> [N, width] floats."""


class FloatRows:
    """Rows as they are, in one float dtype."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return self._width * self._dtype.itemsize

    def allocate(self, rows: int) -> Parts:
        """Memory for `rows` rows, not initialised."""
        return (torch.empty((rows, self._width), dtype=self._dtype, device=self._device),)

    def encode(self, rows: Tensor) -> Parts:
        """[N, width] floats -> what is stored."""
        return (rows.to(self._dtype),)

    def decode(self, parts: Parts) -> Tensor:
        """Stored rows -> [N, width] floats."""
        return parts[0]


class Fp8Rows:
    """Key/value rows: e4m3 codes in groups of 64, rotated dims in bfloat16."""

    def __init__(self, width: int, rope_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._rope_dim, self._dtype, self._device = rope_dim, dtype, device
        self._data_bytes = width - rope_dim + 2 * rope_dim
        self._scale_bytes = kv_quant.fp8_scale_bytes(width - rope_dim)

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return self._data_bytes + self._scale_bytes

    def allocate(self, rows: int) -> Parts:
        """Memory for `rows` rows, not initialised."""
        return (
            torch.empty((rows, self._data_bytes), dtype=torch.uint8, device=self._device),
            torch.empty((rows, self._scale_bytes), dtype=torch.uint8, device=self._device),
        )

    def encode(self, rows: Tensor) -> Parts:
        """[N, width] floats -> what is stored."""
        return kv_quant.quantize_kv_rows(rows, self._rope_dim)

    def decode(self, parts: Parts) -> Tensor:
        """Stored rows -> [N, width] floats."""
        return kv_quant.dequantize_kv_rows(parts[0], parts[1], self._rope_dim, self._dtype)


class Fp4Rows:
    """Index keys: e2m1 codes in groups of 32."""

    def __init__(self, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._width, self._dtype, self._device = width, dtype, device
        self._scale_bytes = -(-width // kv_quant.FP4_GROUP)

    @property
    def row_bytes(self) -> int:
        """Bytes of one stored row."""
        return self._width // 2 + self._scale_bytes

    def allocate(self, rows: int) -> Parts:
        """Memory for `rows` rows, not initialised."""
        return (
            torch.empty((rows, self._width // 2), dtype=torch.uint8, device=self._device),
            torch.empty((rows, self._scale_bytes), dtype=torch.uint8, device=self._device),
        )

    def encode(self, rows: Tensor) -> Parts:
        """[N, width] floats -> what is stored."""
        return kv_quant.quantize_index_keys(rows)

    def decode(self, parts: Parts) -> Tensor:
        """Stored rows -> [N, width] floats."""
        return kv_quant.dequantize_index_keys(parts[0], parts[1], self._dtype)


class GrowingRows:
    """Rows 0..capacity-1, written in order; how many count is known to the timeline, not here.

    A row past the committed end may be overwritten at any time, so a forward that fails has nothing
    to undo.
    """

    def __init__(self, codec: RowCodec, capacity: int) -> None:
        self._codec = codec
        self._parts = codec.allocate(capacity)

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._codec.row_bytes

    @property
    def parts(self) -> Parts:
        """The memory of all rows."""
        return self._parts

    def write(self, first: int, rows: Tensor) -> None:
        """Store rows [N, width] as first..first+N-1."""
        for stored, new in zip(self._parts, self._codec.encode(rows), strict=True):
            stored[first : first + new.shape[0]] = new

    def read(self, first: int, stop: int) -> Tensor:
        """Rows first..stop-1, [N, width] floats."""
        return self._codec.decode(tuple(part[first:stop] for part in self._parts))

    def gather(self, ids: Tensor) -> Tensor:
        """Rows by id, [N, width] floats."""
        return self._codec.decode(tuple(part[ids] for part in self._parts))

    def stored(self, count: int) -> Parts:
        """The first `count` rows as stored (views)."""
        return tuple(part[:count] for part in self._parts)


class PositionRing:
    """The last `slots` rows of a timeline, slot = position mod slots.

    New rows are staged during a forward and enter the ring at `commit`, so that a forward that
    fails leaves it as it was. `oldest` is the lowest position that can still be read.
    """

    def __init__(self, codec: RowCodec, slots: int) -> None:
        self._codec = codec
        self._slots = slots
        self._parts = codec.allocate(slots)
        self._staged: Parts | None = None
        self.oldest = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the ring."""
        return self._slots * self._codec.row_bytes

    @property
    def slots(self) -> int:
        """Rows it holds."""
        return self._slots

    @property
    def row_bytes(self) -> int:
        """Bytes of one row."""
        return self._codec.row_bytes

    def allocate(self, count: int) -> Parts:
        """Memory for `count` rows as this ring stores them, not initialised."""
        return self._codec.allocate(count)

    @property
    def parts(self) -> Parts:
        """The memory of the ring."""
        return self._parts

    def stage(self, rows: Tensor) -> Tensor:
        """Hold new rows [T, width] until `commit`; returns them as they will read, [T, width]."""
        parts = self._codec.encode(rows)
        self._staged = tuple(part[-self._slots :] for part in parts)
        return self._codec.decode(parts)

    def read(self, first: int, stop: int) -> Tensor:
        """Committed rows of positions first..stop-1, [N, width] floats."""
        return self._codec.decode(self.stored(first, stop))

    def stored(self, first: int, stop: int) -> Parts:
        """Committed rows of positions first..stop-1 as stored (copies)."""
        if first < stop and (first < self.oldest or stop - first > self._slots):
            raise IndexError(f"ring holds positions from {self.oldest}, asked for {first}..{stop}")
        slots = torch.arange(first, stop, device=self._parts[0].device) % self._slots
        return tuple(part[slots] for part in self._parts)

    def commit(self, end: int) -> None:
        """Let the staged rows in as the last positions below `end`."""
        if self._staged is None:
            return
        staged, self._staged = self._staged, None
        self.load(staged, end - staged[0].shape[0], end)
        self.oldest = max(self.oldest, end - self._slots)

    def discard(self) -> None:
        """Forget the staged rows."""
        self._staged = None

    def load(self, parts: Parts, first: int, stop: int) -> None:
        """Put stored rows back as positions first..stop-1."""
        slots = torch.arange(first, stop, device=self._parts[0].device) % self._slots
        for stored, new in zip(self._parts, parts, strict=True):
            stored[slots] = new

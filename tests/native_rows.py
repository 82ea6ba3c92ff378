"""Rows at rest for tests of the C kernels: on guarded memory, NaN where nothing was stored.

A row that was never stored holds NaN whatever its format, so one that leaks into a result shows.
"""

from __future__ import annotations

from typing import Any

import torch
from guarded import Guarded
from torch import Tensor

from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    fp8_scale_bytes,
)
from edgedsv4.kernels.native.library import NativeRun, library, pointer

lib, ffi = library()

F32, FP8, FP4 = 0, 1, 2


class StoredRows:
    """`count` rows of one format and their `dk_rows` record."""

    def __init__(self, count: int, width: int, kind: int, rope: int = 0) -> None:
        self.width, self.kind, self.rope = width, kind, rope
        data_bytes = {F32: 4 * width, FP8: width + rope, FP4: width // 2}[kind]
        scale_bytes = {F32: 0, FP8: fp8_scale_bytes(width - rope), FP4: -(-width // 32)}[kind]
        self._data = Guarded(count, data_bytes, dtype=torch.uint8)
        self._scales = Guarded(count, scale_bytes, dtype=torch.uint8)
        self._data.tensor.fill_(0xFF)  # NaN as float32, e4m3 and bfloat16, and as a scale
        self._scales.tensor.fill_(0xFF)
        self.record: Any = ffi.new("dk_rows *")
        self.record.data = pointer(self._data.tensor)
        self.record.scales = pointer(self._scales.tensor) if scale_bytes else ffi.NULL
        self.record.data_stride, self.record.scale_stride = data_bytes, scale_bytes
        self.record.format, self.record.width, self.record.rope = kind, width, rope

    @property
    def parts(self) -> tuple[Tensor, Tensor]:
        """Data and scale bytes."""
        return self._data.check(), self._scales.check()

    def store(self, first: int, rows: Tensor, run: NativeRun | None = None) -> None:
        """Encode with the C kernel."""
        run = run or NativeRun()
        rows = rows.contiguous()
        count = rows.shape[0]
        run.check(lib.dk_rows_store(run.cdata, self.record, first, pointer(rows), count))

    def values(self) -> Tensor:
        """All rows, float32, by the reference decoders."""
        data, scales = self.parts
        if self.kind == F32:
            return data.view(torch.float32)
        if self.kind == FP4:
            return dequantize_index_keys(data, scales, torch.float32, backend="reference")
        return dequantize_kv_rows(data, scales, self.rope, torch.float32, backend="reference")

    def commit(self, staged: StoredRows, start: int, count: int) -> None:
        """Take the last staged rows in, as a ring."""
        slots = self._data.tensor.shape[0]
        lib.dk_ring_commit(self.record, slots, staged.record, start, count)

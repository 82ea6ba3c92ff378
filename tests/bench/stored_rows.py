"""Random rows at rest for the benchmarks of attention and indexer."""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.native.library import library, pointer


class KeptRows:
    """`dk_rows` of FP8 rows (with rope dims) or FP4 index keys (without), and its memory."""

    def __init__(self, rows: Tensor, rope: int = 0) -> None:
        _, ffi = library()
        self.parts = quantize_kv_rows(rows, rope) if rope else quantize_index_keys(rows)
        data, scales = self.parts
        self.record: Any = ffi.new("dk_rows *")
        self.record.data, self.record.data_stride = pointer(data), data.shape[1]
        self.record.scales, self.record.scale_stride = pointer(scales), scales.shape[1]
        self.record.format = 1 if rope else 2
        self.record.width, self.record.rope = rows.shape[1], rope

    @property
    def nbytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.numel() for part in self.parts)

    def values(self) -> Tensor:
        """All rows, float32."""
        rope = self.record.rope
        if rope:
            return dequantize_kv_rows(*self.parts, rope, torch.float32)
        return dequantize_index_keys(*self.parts, torch.float32)


def product_rate(threads: int) -> float:
    """Operations per second of torch's float32 product, close to what the FMA units give."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    a, b = torch.randn(2, 768, 768)
    best = min(_timed(a, b) for _ in range(8))
    torch.set_num_threads(before)
    return 2 * 768**3 / best


def _timed(a: Tensor, b: Tensor) -> float:
    start = time.perf_counter()
    a @ b
    return time.perf_counter() - start

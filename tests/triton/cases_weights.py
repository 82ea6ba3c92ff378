"""Launches of the kernels that only read weights, at V4-Flash geometry, for the compiler."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.gpu.gather_rows import dequantize, embed_streams
from edgedsv4.kernels.gpu.planes import SUPPORTED, empty_matrix
from edgedsv4.kernels.gpu.split_blocks import SPLIT_TYPES, split_rows


def whole_bytes(name: str) -> int:
    """Of a row of 4096 columns."""
    return BLOCK_TYPES[name].row_bytes(4096)


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and call of every compiled variant."""
    ids = torch.empty(7, dtype=torch.int64, device="meta")
    streams = torch.empty(7, 4, 4096, device="meta")
    for name in ("Q8_0", "BF16", "F16", "Q4_K", "Q6_K"):
        embed = empty_matrix(name, 129280, 4096, "meta")
        yield f"embed_streams {name}", partial(embed_streams, streams, ids, embed)
    for name in SPLIT_TYPES:
        whole = empty_matrix(name, 32 * 2048, 4096, "meta")
        raw = torch.empty(32 * 2048, whole_bytes(name), dtype=torch.uint8, device="meta")
        yield f"split_rows {name}", partial(split_rows, name, whole.planes, raw)
    for name in sorted(SUPPORTED):
        matrix = empty_matrix(name, 4096, 2048, "meta")
        for dtype in (torch.bfloat16, torch.float32):
            out = torch.empty(2048, 2048, dtype=dtype, device="meta")
            label = f"dequantize {name} {str(dtype).removeprefix('torch.')}"
            yield label, partial(dequantize, out, matrix, 2048, 2048)

"""Taking the fields of many blocks apart at once: half floats, bit planes, table look-ups.

A field is a slice of the [n, block_bytes] array, so it starts at any byte and has a stride. It is
copied before it is reinterpreted: the copy is small, contiguous and aligned, whatever the file's
layout was. Multi-byte numbers are little-endian, as in the files and on every machine this library
runs on.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_EVERY_BYTE = 0x0101_0101_0101_0101


def as_type(field: Tensor, dtype: torch.dtype) -> Tensor:
    """Bytes [n, w] as numbers, [n, w / itemsize] of `dtype` (a copy)."""
    return field.clone(memory_format=torch.contiguous_format).view(dtype)


def halves(field: Tensor) -> Tensor:
    """Bytes [n, 2k] as IEEE half floats, [n, k] f32."""
    return as_type(field, torch.float16).float()


def bit_planes(field: Tensor, shifts: Sequence[int], mask: int, group: int) -> Tensor:
    """Small integers packed in bytes: within each group of bytes, one run of values per shift.

    Args:
        field: uint8 [n, w].
        shifts: right shifts, each giving one plane.
        mask: bits kept after the shift, below 256.
        group: bytes per group, a multiple of 8 that divides w.

    Returns:
        uint8 [n, w / group, len(shifts), group], contiguous.
    """
    n, width = field.shape
    lanes = as_type(field, torch.int64).view(n, width // group, group // 8)
    # Eight bytes per operation: bits that a shift carries across a byte boundary are masked away.
    planes = [(lanes >> shift) & (mask * _EVERY_BYTE) for shift in shifts]
    return torch.stack(planes, dim=2).view(torch.uint8).view(n, -1, len(shifts), group)


def spread(field: Tensor, shifts: Sequence[int], mask: int) -> Tensor:
    """Small integers packed in words, in order: [n, w] -> [n, w * len(shifts)], same dtype."""
    steps = torch.tensor(shifts, dtype=field.dtype, device=field.device)
    return ((field.unsqueeze(-1) >> steps) & mask).flatten(1)


def nibbles(field: Tensor) -> Tensor:
    """Low nibbles of all bytes, then the high ones: uint8 [n, 16] -> [n, 32]."""
    return bit_planes(field, (0, 4), 15, 16).flatten(1)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Values of a table: table [K], index [...] of integers -> [...]."""
    return table.index_select(0, index.reshape(-1).int()).view(index.shape)


def look_up_rows(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table: table [K, w], index [...] of integers -> [..., w]."""
    return table.index_select(0, index.reshape(-1).int()).view(*index.shape, table.shape[1])

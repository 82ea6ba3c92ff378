"""Copies between rings (slot = position mod slots) and rows in the order of the timeline.

`commit_rings` lets the staged rows of a chunk in; `read_rings` takes the rows before a position
out. One launch copies all tensors of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch

MAX_RINGS = 4
"""Tensors of one launch: codes, scales and two raw rings are those of a layer."""


def commit_rings(rings: Sequence[tuple[Tensor, Tensor]], position: Tensor, tokens: int) -> None:
    """Copy the last staged rows into their rings, in one launch.

    Args:
        rings: up to 4 of (ring [slots, width], result; staged rows [n, width], the last of which
            is that of the chunk's last token).
        position: [1] int32 on the device, of the chunk's first token.
        tokens: T.

    Raises:
        ShapeError: if a pair disagrees.
    """
    pairs = [(ring, rows[-ring.shape[0] :]) for ring, rows in rings]
    _copy_rows(pairs, position, tokens, to_ring=True)


def read_rings(rings: Sequence[tuple[Tensor, Tensor]], position: Tensor) -> None:
    """Copy the rows before a position out of their rings, in one launch.

    Args:
        rings: up to 4 of (rows [n, width], result: positions p - n .. p - 1, of which those below
            0 are left as they are; ring [slots, width]), n <= slots.
        position: [1] int32 on the device, p.

    Raises:
        ShapeError: if a pair disagrees.
    """
    _copy_rows([(ring, rows) for rows, ring in rings], position, 0, to_ring=False)


def _copy_rows(
    pairs: Sequence[tuple[Tensor, Tensor]], position: Tensor, tokens: int, *, to_ring: bool
) -> None:
    """Between rings and rows whose last one is that of position + tokens - 1."""
    for ring, rows in pairs:
        if ring.shape[1] != rows.shape[1] or ring.dtype != rows.dtype:
            raise ShapeError(f"rings: {list(ring.shape)} and {list(rows.shape)} {rows.dtype}")
        if rows.shape[0] > ring.shape[0]:
            raise ShapeError(f"rings: {rows.shape[0]} rows of a ring of {ring.shape[0]}")
    if not 0 < len(pairs) <= MAX_RINGS:
        raise ShapeError(f"rings: {len(pairs)} of them")
    words = [(_words(ring), _words(rows)) for ring, rows in pairs]
    count = max(rows.shape[0] for _, rows in words)
    if count == 0:
        return
    arguments: dict[str, Any] = {}
    for place in range(MAX_RINGS):
        ring, rows = words[min(place, len(words) - 1)]
        arguments |= {
            f"ring{place}_ptr": ring,
            f"rows{place}_ptr": rows,
            f"count{place}": rows.shape[0],
            f"SLOTS{place}": ring.shape[0],
            f"WIDTH{place}": ring.shape[1],
        }
    launch(
        _copy_rows_kernel,
        (count, len(words)),
        **arguments,
        position_ptr=position,
        tokens=tokens,
        TO_RING=to_ring,
        num_warps=4,
    )


def _words(rows: Tensor) -> Tensor:
    """Rows as words of four bytes, where they are made of such."""
    whole = rows.shape[1] * rows.element_size() % 4 == 0 and rows.storage_offset() % 4 == 0
    return rows.view(torch.int32) if whole else rows.view(torch.uint8)


@triton.jit
def _copy_row(
    ring_ptr,
    rows_ptr,
    row,
    count,
    end,
    SLOTS: tl.constexpr,
    WIDTH: tl.constexpr,
    TO_RING: tl.constexpr,
):
    """Row `row` of `count` rows that end before position `end`."""
    position = end - count + row
    if (row < count) & (position >= 0):
        ring_ptr += (position % SLOTS).to(tl.int64) * WIDTH
        rows_ptr += row.to(tl.int64) * WIDTH
        for first in tl.static_range(0, WIDTH, 1024):
            o_w = first + tl.arange(0, 1024)
            m_w = o_w < WIDTH
            if TO_RING:
                tl.store(ring_ptr + o_w, tl.load(rows_ptr + o_w, mask=m_w, other=0), mask=m_w)
            else:
                tl.store(rows_ptr + o_w, tl.load(ring_ptr + o_w, mask=m_w, other=0), mask=m_w)


@triton.jit(do_not_specialize=["count0", "count1", "count2", "count3", "tokens"])
def _copy_rows_kernel(
    ring0_ptr,
    ring1_ptr,
    ring2_ptr,
    ring3_ptr,
    rows0_ptr,
    rows1_ptr,
    rows2_ptr,
    rows3_ptr,
    count0,
    count1,
    count2,
    count3,
    position_ptr,
    tokens,
    SLOTS0: tl.constexpr,
    SLOTS1: tl.constexpr,
    SLOTS2: tl.constexpr,
    SLOTS3: tl.constexpr,
    WIDTH0: tl.constexpr,
    WIDTH1: tl.constexpr,
    WIDTH2: tl.constexpr,
    WIDTH3: tl.constexpr,
    TO_RING: tl.constexpr,
):
    """One program copies one row of one tensor."""
    row, i_tensor = tl.program_id(0), tl.program_id(1)
    end = tl.load(position_ptr) + tokens
    if i_tensor == 0:
        _copy_row(ring0_ptr, rows0_ptr, row, count0, end, SLOTS0, WIDTH0, TO_RING)
    elif i_tensor == 1:
        _copy_row(ring1_ptr, rows1_ptr, row, count1, end, SLOTS1, WIDTH1, TO_RING)
    elif i_tensor == 2:
        _copy_row(ring2_ptr, rows2_ptr, row, count2, end, SLOTS2, WIDTH2, TO_RING)
    else:
        _copy_row(ring3_ptr, rows3_ptr, row, count3, end, SLOTS3, WIDTH3, TO_RING)

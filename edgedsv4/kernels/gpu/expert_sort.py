"""Order the (token, expert) pairs of a chunk by expert, on the device.

Pair p = token * k + place has the slot ids[token, place]. Sorted by slot, equal slots in the order
of the pairs, the pairs of slot e are order[bounds[0, e] : bounds[1, e]]. They are cut into tiles of
`width` pairs; tile i belongs to slot tiles[0, i] and starts at position tiles[1, i]. Their number
is known on the device only, so the table is as long as it can get and ends with slots of -1. A pair
whose slot is negative or not in the bank is left out.

Where only some of the experts are in memory at a time, slots are numbers of experts, the pairs are
sorted once, and each part of the experts gets a table of its own (`cut_tiles` with `places`).
"""

from __future__ import annotations

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two

_SORT_BLOCK = 1024
_TILE_BLOCK = 32
_SLOT_BLOCK = 256


def tile_capacity(pairs: int, slots: int, width: int) -> int:
    """Most tiles that `pairs` pairs can make: each slot may leave one of its tiles unfilled."""
    return min(slots, pairs) + pairs // width


def sort_pairs(order: Tensor, bounds: Tensor, ids: Tensor) -> None:
    """Fill `order` and `bounds` of the module docstring; one launch.

    Args:
        order: out, int32 [T * k]; its end is left as it was if pairs are left out.
        bounds: out, int32 [2, slots].
        ids: int32 [T, k], contiguous.

    Raises:
        ShapeError: if the shapes do not fit.
    """
    pairs, slots = ids.numel(), bounds.shape[1]
    if order.numel() < pairs or not (ids.is_contiguous() and bounds.is_contiguous()):
        raise ShapeError(
            f"sort_pairs: {pairs} pairs of {slots} slots, order {list(order.shape)};"
            " ids and bounds must be contiguous"
        )
    block = min(_SORT_BLOCK, max(32, power_of_two(pairs)))
    launch(_sort_kernel, (slots,), order, bounds, ids, pairs, slots, BLOCK=block, num_warps=4)


def cut_tiles(
    tiles: Tensor, bounds: Tensor, pairs: int, width: int, places: Tensor | None = None
) -> None:
    """Fill `tiles` of the module docstring; one launch.

    Args:
        tiles: out, int32 [2, n], n at least `tile_capacity(pairs, slots, width)`.
        bounds: int32 [2, slots] of `sort_pairs`.
        pairs: T * k.
        width: pairs per tile.
        places: int32 [slots]; only slots whose place is not negative get tiles. None for all.

    Raises:
        ShapeError: if the shapes do not fit.
    """
    slots, capacity = bounds.shape[1], tiles.shape[1]
    is_whole = tiles.is_contiguous() and bounds.is_contiguous()
    fits = places is None or places.shape == (slots,)
    if capacity < tile_capacity(pairs, slots, width) or not (is_whole and fits):
        raise ShapeError(
            f"cut_tiles: {pairs} pairs of {slots} slots, tiles {list(tiles.shape)} of {width},"
            f" places {None if places is None else list(places.shape)}"
        )
    launch(
        _tile_kernel,
        (cdiv(capacity, _TILE_BLOCK),),
        tiles,
        bounds,
        places,
        slots,
        capacity,
        WIDTH=width,
        BLOCK_TILES=_TILE_BLOCK,
        BLOCK_SLOTS=min(_SLOT_BLOCK, power_of_two(slots)),
        num_warps=4,
    )


@triton.jit
def _sort_kernel(order_ptr, bounds_ptr, ids_ptr, pairs, slots, BLOCK: tl.constexpr):
    """One slot: count the pairs before it and its own, then write its own in order."""
    i_slot = tl.program_id(0)
    o_pair = tl.arange(0, BLOCK)
    before = tl.zeros([BLOCK], tl.int32)
    own = tl.zeros([BLOCK], tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + o_pair, mask=start + o_pair < pairs, other=-1)
        before += ((ids >= 0) & (ids < i_slot)).to(tl.int32)
        own += (ids == i_slot).to(tl.int32)
    place = tl.sum(before, axis=0)
    count = tl.sum(own, axis=0)
    tl.store(bounds_ptr + i_slot, place)
    tl.store(bounds_ptr + slots + i_slot, place + count)
    if count > 0:
        for start in range(0, pairs, BLOCK):
            ids = tl.load(ids_ptr + start + o_pair, mask=start + o_pair < pairs, other=-1)
            is_own = (ids == i_slot).to(tl.int32)
            rank = tl.cumsum(is_own, axis=0)
            tl.store(order_ptr + place + rank - 1, start + o_pair, mask=is_own != 0)
            place += tl.sum(is_own, axis=0)


@triton.jit
def _tile_kernel(
    tiles_ptr,
    bounds_ptr,
    places_ptr,
    slots,
    capacity,
    WIDTH: tl.constexpr,
    BLOCK_TILES: tl.constexpr,
    BLOCK_SLOTS: tl.constexpr,
):
    """A block of the table: the slot of tile i is the number of slots whose tiles all end by i."""
    o_tile = tl.program_id(0) * BLOCK_TILES + tl.arange(0, BLOCK_TILES)
    o_slot = tl.arange(0, BLOCK_SLOTS)
    slot = tl.zeros([BLOCK_TILES], tl.int32)
    base = tl.zeros([BLOCK_TILES], tl.int32)  # first tile of that slot
    total = 0
    for first in range(0, slots, BLOCK_SLOTS):
        m_slot = first + o_slot < slots
        start = tl.load(bounds_ptr + first + o_slot, mask=m_slot, other=0)
        end = tl.load(bounds_ptr + slots + first + o_slot, mask=m_slot, other=0)
        count = (end - start + WIDTH - 1) // WIDTH
        if places_ptr is not None:
            place = tl.load(places_ptr + first + o_slot, mask=m_slot, other=-1)
            count = tl.where(place >= 0, count, 0)
        upto = total + tl.cumsum(count, axis=0)
        is_past = (upto[None, :] <= o_tile[:, None]) & m_slot[None, :]  # [BLOCK_TILES, BLOCK_SLOTS]
        slot += tl.sum(is_past.to(tl.int32), axis=1)
        base = tl.maximum(base, tl.max(tl.where(is_past, upto[None, :], 0), axis=1))
        total += tl.sum(count, axis=0)
    is_used = o_tile < total
    start = tl.load(bounds_ptr + slot, mask=is_used, other=0)
    m_tile = o_tile < capacity
    tl.store(tiles_ptr + o_tile, tl.where(is_used, slot, -1), mask=m_tile)
    tl.store(tiles_ptr + capacity + o_tile, start + (o_tile - base) * WIDTH, mask=m_tile)

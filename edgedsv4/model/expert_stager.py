"""Brings experts from host memory to the card for a chunk, ahead of the products that use them.

A layer's missing experts come in pieces, each into one half of its bank; while one is multiplied
with, the next travels and is taken apart into planes, on a stream of its own. The pieces of a whole
forward are announced at its beginning, so that a layer's first ones travel while the layer before
is computed. What lies in pageable memory goes through page-locked buffers.

Of a source that streams, a piece is whatever arrives next, and each expert travels as it arrives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.planes import fill_rows
from edgedsv4.kernels.native.library import HAVE_NATIVE, library, new_run
from edgedsv4.model.gpu_banks import HALVES, PlacedLayer, copy_expert
from edgedsv4.model.moe import stream_of

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix
    from edgedsv4.kernels.quant_matmul import QuantMatrix
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import ExpertWeights

_ROW = 256
"""Bytes at whose multiples the matrices of a piece begin."""
_ROLES = 3

Arrived = Sequence[tuple[int, "ExpertWeights"]]
"""(id, weights) of experts that can be copied now."""


@dataclass(slots=True, eq=False)
class Piece:
    """Some experts of a layer on their way to the card, or there."""

    placed: PlacedLayer
    ids: tuple[int, ...]
    half: int
    table: Tensor
    """int32 [E] on the device: slot of each of them, -1 for all others."""


class _Arrivals:
    """Experts of a layer in batches, handed on in pieces of any size."""

    def __init__(self, batches: Iterator[Arrived]) -> None:
        self._batches = batches
        self._left: Arrived = ()

    def take(self, count: int) -> Iterator[Arrived]:
        """The next `count` experts; each part stays until the next one is asked for."""
        while count:
            if not self._left:
                self._left = next(self._batches)
                continue
            part, self._left = self._left[:count], self._left[count:]
            count -= len(part)
            yield part


@dataclass(frozen=True, slots=True)
class _Cut:
    """A piece that is to be brought."""

    placed: PlacedLayer
    count: int
    arrivals: _Arrivals
    """Shared by all pieces of the layer."""


class _Half:
    """One of the two places for pieces: stream, buffers, and when they are free again."""

    def __init__(self, experts: int, device: torch.device) -> None:
        self.device = device
        self.table = torch.empty(experts, dtype=torch.int32, device=device)
        self.raw = torch.empty(0, dtype=torch.uint8, device=device)
        self.bounce = torch.empty(0, dtype=torch.uint8)
        self.stream: Any = None
        self.ready: Any = None
        self.free: Any = None
        self.copied: Any = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            self.ready, self.free, self.copied = (
                torch.cuda.Event()  # type: ignore[no-untyped-call]
                for _ in range(3)
            )

    def on_stream(self) -> AbstractContextManager[Any]:
        """Launch on the stream of this half, behind what used its slots last."""
        if self.stream is None:
            return nullcontext()
        self.stream.wait_event(self.free)
        return torch.cuda.stream(self.stream)

    def reserve(self, nbytes: int, *, has_bounce: bool) -> None:
        """Have buffers of so many bytes; the old ones are given up when nothing uses them."""
        if self.raw.numel() < nbytes:
            if self.stream is not None:
                torch.cuda.synchronize(self.device)
            self.raw = torch.empty(0, dtype=torch.uint8, device=self.device)
            self.raw = torch.empty(nbytes, dtype=torch.uint8, device=self.device)
        if has_bounce and self.bounce.numel() < nbytes:
            self.bounce = torch.empty(0, dtype=torch.uint8)
            self.bounce = torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.stream is not None)


class ExpertStager:
    """Brings experts of a source into the halves of shared banks.

    One forward at a time. Launches of whoever computes go to the current stream.

    Args:
        source: of the experts, in host memory.
        experts: E.
        device: the card.
        threads: that copy from pageable memory.
    """

    def __init__(
        self, source: ExpertSource, experts: int, device: torch.device, threads: int = 1
    ) -> None:
        self._source = source
        self._device = device
        self._halves = tuple(_Half(experts, device) for _ in range(HALVES))
        self._stream = stream_of(source)
        self._tokens = 1
        self._check_stop: Callable[[], None] = _go_on
        self._plan: deque[_Cut] = deque()
        self._issued: deque[Piece] = deque()
        self._announced: deque[int] = deque()
        self._busy = 0
        self._turn = 0
        self._run = new_run(threads) if HAVE_NATIVE else None
        self.bytes_moved = 0
        """Brought so far."""

    def begin(self, tokens: int, check_stop: Callable[[], None]) -> None:
        """A chunk of so many tokens begins.

        Args:
            tokens: of the chunk.
            check_stop: called every now and then while experts are waited for; raises to stop.
        """
        self.reset()
        self._tokens = tokens
        self._check_stop = check_stop

    def announce(self, layers: Sequence[PlacedLayer]) -> None:
        """Say that all missing experts of these layers will be asked for, in this order."""
        for placed in layers:
            if placed.missing:
                self._plan.extend(self._cut(placed, placed.missing))
                self._announced.append(placed.layer)
        self._issue()

    def pieces(self, placed: PlacedLayer, ids: Sequence[int]) -> Iterator[Piece]:
        """Experts of a layer piece by piece, each on the card until the next is asked for.

        Args:
            placed: the layer.
            ids: ascending; of an announced layer all its missing ones.

        Raises:
            ExpertReadError: the source cannot read them.
        """
        cut = list(self._cut(placed, tuple(ids)))
        if self._announced and self._announced[0] == placed.layer:
            self._announced.popleft()
        else:
            self._plan.extend(cut)
        for _ in cut:
            self._issue()
            piece = self._issued.popleft()
            half = self._halves[piece.half]
            if half.stream is not None:
                torch.cuda.current_stream(self._device).wait_event(half.ready)
            yield piece
            self._release(half)
            self._issue()

    def bring(
        self, placed: PlacedLayer, ids: Sequence[int], check_stop: Callable[[], None] | None = None
    ) -> list[int]:
        """Copy a few experts in the order of the current stream; slots, in the order of `ids`.

        At most as many as a half has slots, and not while pieces are under way. `check_stop` as in
        `begin`.
        """
        if not ids:
            return []
        half, first = self._halves[0], placed.bank.first_of_half(0)
        self._tokens, self._check_stop = 1, check_stop or _go_on
        (cut,) = self._cut(placed, tuple(ids))
        slots = {expert: first + at for at, expert in enumerate(self._load(cut, half, first))}
        return [slots[expert] for expert in ids]

    def replace(self, placed: PlacedLayer, expert_id: int, slot: int) -> None:
        """Copy an expert into the slot of one that lives on the card, as `bring` does."""
        self._tokens, self._check_stop = 1, _go_on
        (cut,) = self._cut(placed, (expert_id,))
        self._load(cut, self._halves[0], slot)

    def reset(self) -> None:
        """Forget what is under way: a forward ended early, or another begins."""
        self._plan.clear()
        self._issued.clear()
        self._announced.clear()
        self._busy = 0
        for half in self._halves:
            if half.stream is not None:
                torch.cuda.current_stream(self._device).wait_stream(half.stream)
            self._release(half, is_use=False)

    # ---- pieces under way ----

    def _issue(self) -> None:
        """Start what there is room for."""
        while self._plan and self._busy < HALVES:
            cut = self._plan.popleft()
            index = self._turn % HALVES
            half, first = self._halves[index], cut.placed.bank.first_of_half(index)
            self._turn += 1
            self._busy += 1
            places = torch.full((half.table.numel(),), -1, dtype=torch.int32)
            with half.on_stream():
                ids = self._load(cut, half, first)
                places[list(ids)] = torch.arange(first, first + len(ids), dtype=torch.int32)
                # From pageable memory it has left when the call returns.
                half.table.copy_(places, non_blocking=True)
                if half.stream is not None:
                    half.ready.record(half.stream)
            self._issued.append(Piece(cut.placed, ids, index, half.table))

    def _release(self, half: _Half, *, is_use: bool = True) -> None:
        if half.stream is not None:
            half.free.record(torch.cuda.current_stream(self._device))
        if is_use:
            self._busy -= 1

    # ---- one piece ----

    def _cut(self, placed: PlacedLayer, ids: tuple[int, ...]) -> Iterator[_Cut]:
        """Some experts of a layer in pieces as large as a half; nothing is asked for yet."""
        size = placed.bank.half
        starts = range(0, len(ids), size)
        batches = self._streamed(placed.layer, ids) if self._stream else self._fetched(placed, ids)
        arrivals = _Arrivals(batches)
        for start in starts:
            yield _Cut(placed, min(size, len(ids) - start), arrivals)

    def _fetched(self, placed: PlacedLayer, ids: tuple[int, ...]) -> Iterator[Arrived]:
        size = placed.bank.half
        for start in range(0, len(ids), size):
            some = ids[start : start + size]
            yield list(zip(some, self._source.fetch(placed.layer, some), strict=True))

    def _streamed(self, layer: int, ids: tuple[int, ...]) -> Iterator[Arrived]:
        if self._stream is not None:
            yield from self._stream.stream(layer, ids, self._tokens, self._check_stop)

    def _load(self, cut: _Cut, half: _Half, first: int) -> tuple[int, ...]:
        """Copy experts into slots from `first` on and take them apart, on the current stream.

        Returns:
            Their ids, slot by slot.
        """
        ids: list[int] = []
        at = 0
        for part in cut.arrivals.take(cut.count):
            experts = [expert for _, expert in part]
            at = self._load_part(cut, experts, half, (first + len(ids), at))
            ids += [expert_id for expert_id, _ in part]
        return tuple(ids)

    def _load_part(
        self, cut: _Cut, experts: Sequence[ExpertWeights], half: _Half, start: tuple[int, int]
    ) -> int:
        """Some of a piece: into slots and buffers from `start` on; where the next ones begin."""
        bank, (first, at) = cut.placed.bank.experts, start
        roles = [
            [expert.w1 for expert in experts],
            [expert.w3 for expert in experts],
            [expert.w2 for expert in experts],
        ]
        if not all(
            _is_plain(weight, matrix)
            for weights, matrix in zip(roles, bank.matrices, strict=True)
            for weight in weights
        ):
            self._load_one_by_one(cut.placed, experts, first)
            return at
        parts, end = self._travel(roles, half, at, cut.count)
        for weights, matrix, raw in zip(roles, bank.matrices, parts, strict=True):
            head = weights[0]
            whole = replace(head, rows=len(experts) * head.rows, data=raw)
            fill_rows(matrix, first * head.rows, whole)
        return end

    def _load_one_by_one(
        self, placed: PlacedLayer, experts: Sequence[ExpertWeights], first: int
    ) -> None:
        """Types with scales apart, or that are decoded on the way."""
        for place, expert in enumerate(experts):
            copy_expert(placed.bank.experts, first + place, expert)
            self.bytes_moved += sum(m.data.nbytes for m in (expert.w1, expert.w3, expert.w2))

    def _travel(
        self, roles: list[list[QuantMatrix]], half: _Half, at: int, count: int
    ) -> tuple[list[Tensor], int]:
        """The stored rows of each role on the device, uint8 [n * rows, row_bytes].

        Args:
            roles: matrices of some experts.
            half: whose buffers they go through.
            at: first byte of them that is free.
            count: experts of the whole piece.

        Returns:
            The rows, and the first byte that is free then.
        """
        sizes = [sum(weight.data.nbytes for weight in weights) for weights in roles]
        starts, end = [], at
        for size in sizes:
            starts.append(end)
            end += -(-size // _ROW) * _ROW
        is_direct = self._is_direct(roles[0][0].data)
        if at == 0:
            each = sum(sizes) // len(roles[0])
            half.reserve(count * (each + _ROLES * _ROW), has_bounce=not is_direct)
        self.bytes_moved += sum(sizes)
        targets = [
            half.raw[start : start + size].view(-1, weights[0].data.shape[1])
            for start, size, weights in zip(starts, sizes, roles, strict=True)
        ]
        if is_direct:
            for target, weights in zip(targets, roles, strict=True):
                _copy_stretches(target, weights, is_lasting=self._source.is_resident)
            return targets, end
        if at == 0 and half.copied is not None:
            half.copied.synchronize()  # the last piece has left the buffer
        self._gather(half, starts, roles)
        half.raw[at:end].copy_(half.bounce[at:end], non_blocking=True)
        if half.copied is not None:
            half.copied.record(torch.cuda.current_stream(self._device))
        return targets, end

    def _is_direct(self, data: Tensor) -> bool:
        """Whether the device copies from where the source has it.

        A source that moves its experts may do so while a copy waits its turn.
        """
        if self._device.type != "cuda":
            return True
        return self._source.is_resident and data.is_pinned()

    def _gather(self, half: _Half, starts: list[int], roles: list[list[QuantMatrix]]) -> None:
        """All matrices into the page-locked buffer."""
        pairs: list[tuple[Tensor, Tensor]] = []
        for start, weights in zip(starts, roles, strict=True):
            at = start
            for weight in weights:
                size = weight.data.nbytes
                pairs.append((half.bounce[at : at + size], weight.data))
                at += size
        if self._run is None:
            for target, data in pairs:
                target.view(data.shape).copy_(data)
            return
        lib, ffi = library()
        targets = ffi.new("void *[]", [ffi.cast("void *", t.data_ptr()) for t, _ in pairs])
        sources = ffi.new("void *[]", [ffi.cast("void *", d.data_ptr()) for _, d in pairs])
        lengths = ffi.new("int64_t[]", [data.nbytes for _, data in pairs])
        self._run.check(lib.dk_copy_many(self._run.cdata, targets, sources, lengths, len(pairs)))


def _is_plain(weight: QuantMatrix, matrix: DeviceMatrix) -> bool:
    """Whether a stored matrix is nothing but rows of blocks of the bank's own type."""
    is_same = weight.block_type.name == matrix.type and weight.tensor_scale == 1.0
    is_bytes = weight.data.dtype == torch.uint8 and weight.data.is_contiguous()
    return is_same and is_bytes and weight.scale is None


def _copy_stretches(target: Tensor, weights: list[QuantMatrix], *, is_lasting: bool) -> None:
    """Matrices one below the other; neighbours in memory by one copy."""
    rows, start = weights[0].rows, 0
    while start < len(weights):
        stop = start + 1
        while stop < len(weights) and _are_neighbours(weights[stop - 1].data, weights[stop].data):
            stop += 1
        data = weights[start].data
        if stop > start + 1:
            data = data.as_strided(((stop - start) * rows, data.shape[1]), data.stride())
        target[start * rows : stop * rows].copy_(data, non_blocking=is_lasting)
        start = stop


def _are_neighbours(first: Tensor, second: Tensor) -> bool:
    """Whether one tensor of a storage goes on where another ends."""
    is_next = second.data_ptr() == first.data_ptr() + first.nbytes
    is_inside = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    return is_next and is_inside


def _go_on() -> None:
    """Nobody stops."""

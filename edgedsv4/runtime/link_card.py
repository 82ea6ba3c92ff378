"""What a GPU does and what its bus carries: copies, its memory, products, pieces of a step.

`Card` says what is measured, `TorchCard` measures it by torch on any kind of card, and
`measure_card` decides what to run and how often; tests hand it cards that only return numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from statistics import median
from typing import Protocol

import torch

from edgedsv4.kernels.gpu.nvidia import overlaps
from edgedsv4.kernels.native.library import HAVE_NATIVE
from edgedsv4.runtime.card_reads import read_rate
from edgedsv4.runtime.gpu_devices import Gpu, device_budget, release_unused_memory
from edgedsv4.runtime.link_step import (
    CARD_TOKENS,
    CardExpertBench,
    exchange_seconds,
    has_card_form,
    launch_seconds,
)
from edgedsv4.runtime.links import CardRate, ExpertRate, OverlapRate

PIECE_BYTES = 12 << 20
"""Of a copy: about one expert of V4-Flash."""
_PIECES = 16
_READ_BYTES = 2 << 30
_SIDE = 4096
_STEPS = 8
_ROOM_SHARE = 4
"""One part in so many of what is free may hold experts to measure."""

Progress = Callable[[str, int, int], None]


class Card(Protocol):
    """A card whose rates can be taken; each call is one run."""

    name: str
    description: str
    memory_bytes: int
    free_bytes: int
    has_read: bool
    """Whether its kernels run: `read`, `launch` and `experts` can be called."""
    has_overlap: bool
    """Whether a launch can begin while the one before ends."""

    def to_card(self, seconds: float) -> float:
        """Bytes per second from pinned memory."""

    def from_card(self, seconds: float) -> float:
        """Bytes per second into pinned memory."""

    def copy(self, seconds: float) -> float:
        """Bytes per second within the card's memory, reads and writes together."""

    def read(self) -> float:
        """Bytes per second read of the card's memory."""

    def products(self, seconds: float) -> float:
        """Multiplications with an addition per second."""

    def exchange(self) -> float:
        """Seconds for a token's row to the host, a call there, and a row of sums back."""

    def launch(self, read_rate: float, *, overlap: bool) -> float:
        """Seconds of a launch of a recorded step beyond reading at that rate."""

    def experts(self, block_type: str) -> CardExperts | None:
        """Experts of a type on the card; None where it has no form there."""


class CardExperts(Protocol):
    """Experts that a card computes: `CardExpertBench`."""

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of storage per element."""

    def rate(self, tokens: int) -> float:
        """Stored weights per second."""


class Experts(Protocol):
    """Experts that a CPU computes: `ExpertBench`."""

    @property
    def bytes_per_weight(self) -> float:
        """Bytes of storage per element."""

    def rate(self, threads: int, tokens: int, seconds: float) -> float:
        """Stored weights per second."""


class TorchCard:
    """A card as torch sees it.

    Args:
        gpu: which one.
        piece_bytes: of a copy.
    """

    def __init__(self, gpu: Gpu, piece_bytes: int = PIECE_BYTES) -> None:
        self._device = gpu.device
        self.name, self.description = gpu.name, gpu.description
        self.memory_bytes = gpu.total_bytes
        self.free_bytes = device_budget(gpu.device, None) if self._is_card else gpu.total_bytes
        self.has_read = gpu.obstacle is None
        self.has_overlap = gpu.obstacle is None and overlaps(gpu.family)
        self._family = gpu.family
        self._piece = piece_bytes
        self._host = [self._pinned(piece_bytes, torch.uint8) for _ in range(_PIECES)]
        self._near = [
            torch.zeros(piece_bytes, dtype=torch.uint8, device=self._device) for _ in range(_PIECES)
        ]

    @property
    def _is_card(self) -> bool:
        return self._device.type != "cpu"

    def _pinned(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        """Memory of the host that the card reads by itself."""
        return torch.zeros(size, dtype=dtype, pin_memory=self._is_card)

    def _wait(self) -> None:
        if self._is_card:
            torch.accelerator.synchronize(self._device)

    def _per_second(self, work: Callable[[], object], amount: int, seconds: float) -> float:
        """`amount` per second of a piece of work that is repeated; waits for the card each time."""
        work()
        self._wait()
        began, count = time.perf_counter(), 0
        while count == 0 or time.perf_counter() - began < seconds:
            work()
            self._wait()
            count += 1
        return count * amount / (time.perf_counter() - began)

    def to_card(self, seconds: float) -> float:
        """As `Card.to_card`."""
        return self._copied(self._near, self._host, seconds)

    def from_card(self, seconds: float) -> float:
        """As `Card.from_card`."""
        return self._copied(self._host, self._near, seconds)

    def _copied(
        self, targets: list[torch.Tensor], sources: list[torch.Tensor], seconds: float
    ) -> float:
        def work() -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        return self._per_second(work, len(sources) * self._piece, seconds)

    def copy(self, seconds: float) -> float:
        """As `Card.copy`."""
        half = len(self._near) // 2
        pairs = list(zip(self._near[:half], self._near[half:], strict=True))

        def work() -> None:
            # Many of them between two waits, which would take longer than a copy.
            for (target, source), _ in zip(cycle(pairs), range(64), strict=False):
                target.copy_(source)

        return self._per_second(work, 2 * 64 * self._piece, seconds)

    def read(self) -> float:
        """As `Card.read`."""
        block = 1 << 20
        nbytes = max(block, min(_READ_BYTES, self.free_bytes // 4) // block * block)
        return read_rate(self._device, nbytes, reads=3)

    def products(self, seconds: float) -> float:
        """As `Card.products`."""
        side = _SIDE if self._is_card else 64
        one = torch.randn(side, side, device=self._device).to(torch.bfloat16)
        other = torch.randn(side, side, device=self._device).to(torch.bfloat16)
        out = torch.empty_like(one)

        def work() -> None:
            for _ in range(8):
                torch.matmul(one, other, out=out)

        return self._per_second(work, 8 * side**3, seconds)

    def exchange(self) -> float:
        """As `Card.exchange`."""
        return exchange_seconds(self._device, 1)

    def launch(self, read_rate: float, *, overlap: bool) -> float:
        """As `Card.launch`."""
        return launch_seconds(self._device, self._family, read_rate, overlap=overlap)

    def experts(self, block_type: str) -> CardExpertBench | None:
        """As `Card.experts`."""
        release_unused_memory(self._device)
        if not has_card_form(block_type):
            return None
        return CardExpertBench(
            block_type, self._device, self._family, self.free_bytes // _ROOM_SHARE
        )


def measure_card(
    card: Card, repeat: int, seconds: float, report: Progress, types: Sequence[str] = ()
) -> CardRate:
    """All rates of a card.

    Args:
        card: the card.
        repeat: runs of each.
        seconds: of each run of a copy or product.
        report: told before each rate.
        types: block types of experts to measure.
    """
    done, steps = 0, _STEPS + len(types)

    def runs(what: str, run: Callable[[], float], *, can_run: bool = True) -> tuple[float, ...]:
        nonlocal done
        report(f"{card.name}, {what}", done, steps)
        done += 1
        return tuple(run() for _ in range(repeat)) if can_run else ()

    copy = runs("copies", lambda: card.copy(seconds))
    read = runs("reads", card.read, can_run=card.has_read)
    rate = median(read or copy)
    rates = {
        "copy": copy,
        "read": read,
        "to_card": runs("from pinned memory", lambda: card.to_card(seconds)),
        "from_card": runs("into pinned memory", lambda: card.from_card(seconds)),
        "products": runs("products", lambda: card.products(seconds)),
        "exchange_seconds": runs("exchange with the host", card.exchange, can_run=HAVE_NATIVE),
        "launch_seconds": runs(
            "launches", lambda: card.launch(rate, overlap=False), can_run=card.has_read
        ),
        "overlapped_launch_seconds": runs(
            "launches that overlap",
            lambda: card.launch(rate, overlap=True),
            can_run=card.has_overlap,
        ),
    }
    experts: list[ExpertRate] = []
    for name in types if card.has_read else ():
        report(f"{card.name}, {name} experts", done, steps)
        done += 1
        experts += _expert_rates(card, name, repeat)
    return CardRate(
        name=card.name,
        description=card.description,
        memory_bytes=card.memory_bytes,
        free_bytes=max(1, card.free_bytes),
        experts=tuple(experts),
        **rates,
    )


def _expert_rates(card: Card, block_type: str, repeat: int) -> list[ExpertRate]:
    bench = card.experts(block_type)
    if bench is None:
        return []
    return [
        ExpertRate(
            block_type=block_type,
            threads=1,
            tokens=tokens,
            bytes_per_weight=bench.bytes_per_weight,
            runs=tuple(bench.rate(tokens) for _ in range(repeat)),
        )
        for tokens in CARD_TOKENS
    ]


def measure_overlap(
    card: Card, experts: Experts, block_type: str, *, threads: int, repeat: int, seconds: float
) -> OverlapRate:
    """Experts on the CPU while the card copies from memory.

    Args:
        card: the card.
        experts: what the CPU computes, for one token.
        block_type: of the experts.
        threads: of the CPU.
        repeat: runs.
        seconds: of each run; both sides work this long.
    """
    pairs = []
    with ThreadPoolExecutor(1) as pool:
        for _ in range(repeat):
            copying = pool.submit(card.to_card, seconds)
            pairs.append((experts.rate(threads, 1, seconds), copying.result()))
    computed, copied = zip(*pairs, strict=True)
    return OverlapRate(
        block_type=block_type,
        bytes_per_weight=experts.bytes_per_weight,
        expert_runs=computed,
        to_card_runs=copied,
    )

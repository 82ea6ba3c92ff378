"""Attention in C over a window ring and selected compressed rows, beside torch's float32 product.

Rows are FP8 with 64 rotated dims, as the default profile keeps them; decoding them is part of the
time. Figures are for one thread and for two.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import harness
import torch
from harness import Figure
from stored_rows import KeptRows, product_rate
from torch import Tensor

from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.sparse_attention import sparse_attention_reference

WINDOW, SLOTS, START, ROPE = 128, 256, 4096, 64
CALLS_SECONDS = 2e-3
"""Calls are repeated for about this long per reading."""


@dataclass(frozen=True)
class Shape:
    """What one call attends to."""

    heads: int
    dim: int
    selected: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads}x{self.dim}, {WINDOW}+{self.selected} rows"

    @property
    def operations(self) -> int:
        """Multiplications and additions of dots and weighted sums."""
        return 4 * self.tokens * self.heads * self.dim * (WINDOW + self.selected)


SHAPES = [
    Shape(8, 128, 64, 1),
    Shape(8, 128, 64, 64),
    Shape(32, 512, 512, 1),
    Shape(32, 512, 512, 8),
]


def prepare(shape: Shape) -> tuple[Callable[[int], Tensor], Callable[[], Tensor]]:
    """The C call by thread count, and the reference."""
    lib, ffi = library()
    generator = torch.Generator().manual_seed(shape.dim)
    positions = torch.randn(START + shape.tokens, shape.dim, generator=generator)
    compressed = torch.randn(START // 4, shape.dim, generator=generator)
    q = torch.randn(shape.tokens, shape.heads, shape.dim, generator=generator)
    sink = torch.randn(shape.heads, generator=generator)
    picked = [
        torch.randperm(len(compressed), generator=generator)[: shape.selected].sort().values
        for _ in range(shape.tokens)
    ]
    selected, out = torch.stack(picked).int(), torch.empty_like(q)
    in_ring = positions[START - SLOTS : START].roll(START % SLOTS, 0)
    parts = (in_ring, positions[START:], compressed)
    ring, staged, stored = (KeptRows(rows.contiguous(), ROPE) for rows in parts)
    record = ffi.new("dk_attention *")
    record.ring, record.staged, record.compressed = ring.record, staged.record, stored.record
    record.slots, record.window, record.ratio, record.top = SLOTS, WINDOW, 4, shape.selected
    record.selected, record.sink = pointer(selected), pointer(sink)
    sizes = (START, shape.tokens, shape.heads, shape.dim)
    run = NativeRun()

    def call(threads: int) -> Tensor:
        run.cdata.threads = threads
        run.check(lib.dk_attend(run.cdata, pointer(out), pointer(q), record, *sizes))
        return out

    def reference() -> Tensor:
        span = torch.arange(START, START + shape.tokens)[:, None] - torch.arange(WINDOW)
        ids = torch.cat((span, selected.long() + len(positions)), dim=-1)
        return sparse_attention_reference(q, torch.cat((positions, compressed)), ids, sink)

    call.keep = (ring, staged, stored, selected, sink)  # type: ignore[attr-defined]
    return call, reference


def measure(repeats: int) -> list[Figure]:
    """Time per call, and its share of the rate of a float32 product, per shape and threads."""
    figures = []
    for threads in (1, 2):
        peak = product_rate(threads)
        for shape in SHAPES:
            call, reference = prepare(shape)
            expected = reference()
            error = float((call(threads) - expected).norm() / expected.norm())
            if not error < 0.05:  # rows are FP8 here, float32 in the reference
                raise SystemExit(f"{shape}: error {error:.3g}, no time is reported")
            calls = max(1, int(CALLS_SECONDS / (shape.operations / 5e10)))

            def work(
                call: Callable[[int], Tensor] = call, calls: int = calls, threads: int = threads
            ) -> None:
                for _ in range(calls):
                    call(threads)

            seconds = harness.seconds(work, repeats) / calls
            rate = shape.operations / seconds
            label = f"{shape}, {threads} thread{'s' if threads > 1 else ''}"
            figures += [
                Figure("attention", label, seconds * 1e6, "us", repeats),
                Figure("attention", f"{label}, rate", rate / 1e9, "GFLOP/s", repeats),
                Figure("attention", f"{label}, share", rate / peak, "of a product", repeats),
            ]
    return figures


if __name__ == "__main__":
    harness.main(measure)

"""The compressor in C: raw projections to stored rows, beside the rate of the process's reads.

The three kinds of the mid model: rows of 512 dims over 4 tokens with overlap, the same over 128
without, and transformed index keys of 128 over 4. One token is the one that ends a window, 256 are
a chunk. Bytes are those of the raw rows of the windows and of the stored rows; a chunk's work is
exponentials and sums rather than bytes. Rates are the best of n.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import Figure
from mid_model import mid_config
from stored_rows import KeptRows
from torch import Tensor

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import apply_rope_reference, rope_frequencies, rope_table

CONFIG = mid_config()
HALF = CONFIG.rope_dim // 2
CHUNK = 256
ERROR_STORED = {True: 0.05, False: 0.2}
"""Of FP8 rows and of FP4 keys after rounding; tests compare the codes."""
READING_BYTES = 1 << 22


@dataclass(frozen=True)
class Kind:
    """One of a model's compressors."""

    name: str
    width: int
    ratio: int
    series: int
    is_key: bool = False


KINDS = (
    Kind("rows of 512 over 4", CONFIG.head_dim, 4, 2),
    Kind("rows of 512 over 128", CONFIG.head_dim, 128, 1),
    Kind("keys of 128 over 4", CONFIG.index_dim, 4, 2, is_key=True),
)


@dataclass
class Work:
    """A chunk at the end of two chunks' tokens, ready to be compressed again and again."""

    kind: Kind
    tokens: int
    run: NativeRun = field(default_factory=NativeRun)

    def __post_init__(self) -> None:
        _, ffi = library()
        kind, stop = self.kind, 2 * CHUNK
        generator = torch.Generator().manual_seed(kind.width)
        size = kind.series * kind.width
        self.start = stop - self.tokens
        self.raw = torch.randn(stop, 2 * size, generator=generator)
        self.ape = torch.randn(kind.ratio, size, generator=generator)
        self.norm = 1 + torch.randn(kind.width, generator=generator) / 10
        self.frequencies = rope_frequencies(CONFIG.rope_dim, CONFIG.rope_theta, None).float()
        self.rows = KeptRows(
            torch.zeros(stop // kind.ratio, kind.width), 0 if kind.is_key else CONFIG.rope_dim
        )
        self.slots = CHUNK
        ring = self.raw[self.start - self.slots : self.start].clone()
        ring[:, size:] += self.ape[torch.arange(self.start - self.slots, self.start) % kind.ratio]
        self.ring = ring.roll(self.start % self.slots, 0).contiguous()
        self.staged = torch.empty_like(self.raw[self.start :])
        self.record: Any = ffi.new("dk_compressor *")
        self.record.rows = self.rows.record[0]
        self.record.ring, self.record.staged = pointer(self.ring), pointer(self.staged)
        self.record.slots, self.record.width = self.slots, kind.width
        self.record.ape, self.record.norm = pointer(self.ape), pointer(self.norm)
        self.record.ratio, self.record.series = kind.ratio, kind.series
        self.record.has_hadamard = kind.is_key

    def call(self, threads: int) -> None:
        lib, _ = library()
        self.run.cdata.threads = threads
        sizes = (self.start, self.tokens, pointer(self.frequencies), HALF, CONFIG.rms_norm_eps)
        self.run.check(lib.dk_compress(self.run.cdata, self.record, *sizes))

    def reset(self) -> None:
        """The kernel adds the position bias to the staged rows in place."""
        self.staged.copy_(self.raw[self.start :])

    def check(self) -> None:
        """Compare the rows of the chunk with the references in float64."""
        self.reset()
        self.call(2)
        kind, size = self.kind, self.kind.series * self.kind.width
        raw = self.raw.double()
        raw[:, size:] += self.ape.double().repeat(len(raw) // kind.ratio, 1)
        values, gates = (part.reshape(-1, kind.ratio, size) for part in raw.chunk(2, dim=1))
        pooled = pool_windows(values, gates, has_overlap=kind.series == 2, previous=False)
        rows = rms_norm_reference(pooled, self.norm.double(), CONFIG.rms_norm_eps)
        table = rope_table(
            torch.arange(len(rows)) * kind.ratio, self.frequencies.double(), torch.float64
        )
        expected = apply_rope_reference(rows[:, None], table)[:, 0]
        if kind.is_key:
            expected = hadamard_reference(expected)
        first = self.start // kind.ratio
        error = _error(self.rows.values()[first:], expected[first:])
        if not error < ERROR_STORED[not kind.is_key]:
            raise SystemExit(f"{kind.name}: error {error:.3g}, no time is reported")

    @property
    def nbytes(self) -> int:
        """Raw rows of the windows that end in the chunk, and the rows made of them."""
        finished = (self.start + self.tokens) // self.kind.ratio - self.start // self.kind.ratio
        raw = self.tokens * self.raw.shape[1]
        windows = finished * self.kind.ratio * self.raw.shape[1]
        return 4 * max(raw, windows) + finished * self.rows.nbytes // len(self.rows.parts[0])

    def best(self, threads: int, repeats: int) -> float:
        """Shortest mean wall time of a call, seconds."""
        turns = max(1, READING_BYTES // self.nbytes)

        def work() -> None:
            for _ in range(turns):
                self.call(threads)

        readings = []
        for _ in range(repeats + 1):
            self.reset()  # or the biases would add up until a gate is infinite
            readings.append(harness.once(work))
        return min(readings[1:]) / turns


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected).norm() / expected.norm())


def measure(repeats: int) -> list[Figure]:
    """Time, bytes per second and share of the reads, by compressor, tokens and threads."""
    figures = []
    reads = {threads: harness.read_rate(threads) for threads in (1, 2)}
    for kind in KINDS:
        for tokens in (1, CHUNK):
            work = Work(kind, tokens)
            work.check()
            for threads in (1, 2) if tokens > 1 else (1,):
                seconds = work.best(threads, repeats)
                rate, plurals = work.nbytes / seconds, ("s" * (tokens > 1), "s" * (threads > 1))
                label = f"{kind.name}, {tokens} token{plurals[0]}, {threads} thread{plurals[1]}"
                values = (
                    (1e6 * seconds, "µs"),
                    (rate / 1e9, "GB/s"),
                    (rate / reads[threads], "of the reads"),
                )
                figures += [Figure("compress", label, *value, repeats) for value in values]
    return figures


if __name__ == "__main__":
    harness.main(measure)

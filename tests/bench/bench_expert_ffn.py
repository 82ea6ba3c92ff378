"""Experts of one layer in C at the mid model's sizes, beside the rate of the process's reads.

64 experts of which every token uses 6, and the shared one. With one token the bytes of the experts
decide; calls take turns over all experts, which together are larger than any cache. With more
tokens the products decide. Activations are rounded to int8, as the default profile does; rates are
the best of n.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from bench_quant_matmul import Shape, stored
from harness import Figure
from mid_model import mid_config

from edgedsv4.kernels.expert_ffn import expert_ffn_reference
from edgedsv4.kernels.native.library import NativeRun, fill_matrix, library, pointer
from edgedsv4.kernels.quant_matmul import QuantMatrix

CONFIG = mid_config()
EXPERTS, CHOSEN = CONFIG.num_experts, CONFIG.experts_per_token
HIDDEN, WIDTH = CONFIG.hidden_size, CONFIG.expert_width
LIMIT = CONFIG.swiglu_limits[0]
TYPES = ("MXFP4", "Q4_K", "Q2_K")
ERROR = 0.02
"""Of a result whose inputs and hidden values were rounded to int8."""


def experts_of(name: str, count: int) -> list[tuple[QuantMatrix, ...]]:
    """w1, w3 and w2 of each."""
    shapes = (Shape(WIDTH, count), Shape(WIDTH, count), Shape(HIDDEN, count, WIDTH))
    whole = [stored(name, shape) for shape in shapes]
    return [
        tuple(
            QuantMatrix(
                matrix.block_type,
                shape.rows,
                shape.columns,
                matrix.data[place * shape.rows : (place + 1) * shape.rows],
            )
            for matrix, shape in zip(whole, shapes, strict=True)
        )
        for place in range(count)
    ]


@dataclass
class Layer:
    """All experts of one type, and calls of the kernel."""

    name: str
    tokens: int
    run: NativeRun = field(default_factory=NativeRun)
    arguments: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        lib, ffi = library()
        self.experts, self.shared = experts_of(self.name, EXPERTS), experts_of(self.name, 1)[0]
        generator = torch.Generator().manual_seed(self.tokens)
        self.x = torch.randn(self.tokens, HIDDEN, generator=generator)
        self.weights = torch.rand(self.tokens, CHOSEN, generator=generator)
        order = torch.randperm(EXPERTS, generator=generator)
        draws = torch.rand(self.tokens, EXPERTS, generator=generator)
        self.turns = EXPERTS // CHOSEN if self.tokens == 1 else 1
        few = order[: self.turns * CHOSEN] if self.tokens == 1 else draws.argsort()[:, :CHOSEN]
        ids = few.reshape(self.turns, self.tokens, CHOSEN)
        self.ids = ids.sort(dim=-1).values.int().contiguous()
        self.out = torch.empty(self.tokens, HIDDEN)
        record, given = ffi.new("dk_experts *"), ffi.new("dk_input *")
        matrices, shared = ffi.new("dk_matrix[]", 3 * EXPERTS), ffi.new("dk_matrix[3]")
        for place, matrix in enumerate(m for expert in self.experts for m in expert):
            fill_matrix(matrices[place], matrix)
        for place, matrix in enumerate(self.shared):
            fill_matrix(shared[place], matrix)
        record.matrices, record.shared, record.experts, record.k = matrices, shared, EXPERTS, CHOSEN
        record.width = record.shared_width = WIDTH
        record.hidden, record.limit, record.shared_limit = HIDDEN, LIMIT, LIMIT
        record.has_int8 = 1
        self.run.cdata.is_small = self.tokens <= 16
        given.x, given.stride = pointer(self.x), HIDDEN
        sizes = (
            lib.dk_quantized_bytes(self.tokens, HIDDEN),
            lib.dk_experts_scratch_bytes(record, self.tokens),
        )
        memory = [torch.empty(size + 64, dtype=torch.uint8) for size in sizes]
        starts = [ffi.cast("void *", -(-part.data_ptr() // 64) * 64) for part in memory]
        rounded = lib.dk_quantize_rows(self.run.cdata, given, starts[0], self.tokens, HIDDEN)
        self.run.check(rounded)
        self.arguments = [record, given, starts[1], matrices, shared, memory]

    def call(self, turn: int) -> None:
        lib, _ = library()
        record, given, scratch, *_ = self.arguments
        ids, weights, out = pointer(self.ids[turn]), pointer(self.weights), pointer(self.out)
        sizes = (record, self.tokens, scratch)
        self.run.check(lib.dk_expert_ffn(self.run.cdata, out, given, ids, weights, *sizes))

    def check(self) -> None:
        """Compare the first token with the reference in float64."""
        self.call(0)
        row = self.x[:1].double()
        expected = expert_ffn_reference(row, *self.shared, LIMIT)
        for expert, weight in zip(self.ids[0, 0].tolist(), self.weights[0], strict=True):
            matrices = self.experts[expert]
            expected += weight.double() * expert_ffn_reference(row, *matrices, LIMIT)
        error = float((self.out[:1] - expected).norm() / expected.norm())
        if not error < ERROR:
            raise SystemExit(f"experts of {self.name}: error {error:.3g}, no time is reported")

    def best(self, threads: int, repeats: int) -> float:
        """Shortest mean wall time of a call over all turns, seconds."""
        self.run.cdata.threads = threads

        def turns() -> None:
            for turn in range(self.turns):
                self.call(turn)

        turns()
        return min(harness.once(turns) for _ in range(repeats)) / self.turns

    @property
    def nbytes(self) -> float:
        """Of the experts that a call reads, on average over the turns."""
        used = sum(len(self.ids[turn].unique()) for turn in range(self.turns)) / self.turns + 1
        return used * sum(matrix.data.numel() for matrix in self.shared)

    @property
    def operations(self) -> int:
        """Multiplications and additions of the products."""
        return 2 * self.tokens * (CHOSEN + 1) * 3 * WIDTH * HIDDEN


def measure(repeats: int) -> list[Figure]:
    """Time of a call, bytes per second and share of the reads, operations per second, by type."""
    figures = []
    reads = {threads: harness.read_rate(threads) for threads in (1, 2)}
    for name in TYPES:
        for tokens in (1, 64, 256):
            layer = Layer(name, tokens)
            layer.check()
            for threads in (1, 2):
                seconds = layer.best(threads, repeats)
                plurals = ("s" * (tokens > 1), "s" * (threads > 1))
                label = f"{name}, {tokens} token{plurals[0]}, {threads} thread{plurals[1]}"
                rate = layer.nbytes / seconds
                values = [(1e6 * seconds, "µs"), (layer.operations / seconds / 1e9, "GFLOP/s")]
                if tokens == 1:
                    values += [(rate / 1e9, "GB/s"), (rate / reads[threads], "of the reads")]
                figures += [Figure("expert_ffn", label, *value, repeats) for value in values]
    return figures


if __name__ == "__main__":
    harness.main(measure)

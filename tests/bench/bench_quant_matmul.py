"""Products with stored weights, beside the rate at which the same process reads memory.

One matrix [2048, 2048] shows the work itself, a list of 64 matrices [512, 2048] what experts cost:
together they are larger than any cache, so with one token the bytes decide. "int8" rounds the
activations, as the default profile does; types without that form are multiplied in float32. Rates
are the best of n, because other programs only ever take time away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import harness
import torch
from harness import Figure
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native.library import NativeRun, library, matrix_of, pointer
from edgedsv4.kernels.quant_matmul import INT8_TYPES, QuantMatrix, dequantize, round_activations

COLUMNS = 2048
TYPES = ("Q8_0", "MXFP4", "Q4_K", "Q2_K", "IQ2_XXS", "F32", "BF16", "FP8_E4M3")
# Bytes at which the half-precision fields of a block start.
HALVES = {"Q8_0": (0,), "Q4_K": (0, 2), "Q2_K": (80, 82), "IQ2_XXS": (0,)}
LIMIT = 1e-5


@dataclass(frozen=True)
class Shape:
    """Matrices of one call."""

    rows: int
    count: int
    columns: int = COLUMNS

    def __str__(self) -> str:
        return f"[{self.rows}, {self.columns}]" + (f" x {self.count}" if self.count > 1 else "")

    @property
    def elements(self) -> int:
        """Of all matrices."""
        return self.rows * self.count * self.columns


ONE, EXPERTS = Shape(2048, 1), Shape(512, 64)


def stored(name: str, shape: Shape) -> QuantMatrix:
    """All matrices, one below the other."""
    kind, rows, columns = BLOCK_TYPES[name], shape.rows * shape.count, shape.columns
    generator = torch.Generator().manual_seed(rows)
    if name in ("F32", "BF16"):
        dtype = torch.float32 if name == "F32" else torch.bfloat16
        numbers = torch.randn(rows, columns, generator=generator).to(dtype)
        return QuantMatrix(kind, rows, columns, numbers)
    size = (rows, columns // kind.block_elements, kind.block_bytes)
    data = torch.randint(0, 256, size, dtype=torch.uint8, generator=generator)
    for start in HALVES.get(name, ()):
        data[:, :, start : start + 2] = torch.tensor([0.01]).half().view(torch.uint8)
    scale = None
    if name == "MXFP4":
        data[:, :, 0] = 120
    elif name == "FP8_E4M3":
        data &= 0xBF
        scale = torch.full((-(-rows // 128), columns // 128), 120, dtype=torch.uint8)
    return QuantMatrix(kind, rows, columns, data.flatten(1), scale)


@dataclass
class Work:
    """One list of products, ready to be called."""

    weight: QuantMatrix
    shape: Shape
    x: Tensor
    y: Tensor = field(init=False)
    call: Callable[[int], None] = field(init=False)

    def __post_init__(self) -> None:
        lib, ffi = library()
        tokens, count = len(self.x), self.shape.count
        self.y = torch.full((count, tokens, self.shape.rows), torch.nan)
        run, record = NativeRun(), ffi.new("dk_input *")
        record.x, record.stride = pointer(self.x), COLUMNS
        memory = torch.empty(lib.dk_quantized_bytes(tokens, COLUMNS) + 63, dtype=torch.uint8)
        start = pointer(memory) + -memory.data_ptr() % 64
        if self.is_int8:
            run.check(lib.dk_quantize_rows(run.cdata, record, start, tokens, COLUMNS))
        products, matrix = ffi.new("dk_product[]", count), matrix_of(self.weight)
        for index in range(count):
            product: Any = products[index]
            product.y, product.y_stride = pointer(self.y[index]), self.shape.rows
            product.w, product.x, product.tokens = matrix, record, tokens
            product.first_row, product.rows = index * self.shape.rows, self.shape.rows
        run.cdata.is_small = tokens <= 16
        kept = (record, memory, matrix)

        def call(threads: int) -> None:
            assert kept
            run.cdata.threads = threads
            run.check(lib.dk_products(run.cdata, products, count))

        self.call = call

    @property
    def is_int8(self) -> bool:
        return self.weight.block_type.name in INT8_TYPES

    def check(self) -> None:
        """Compare the last matrix with the float64 product."""
        last = slice(self.weight.rows - self.shape.rows, self.weight.rows)
        x = round_activations(self.x) if self.is_int8 else self.x
        reference = x.double() @ dequantize(self.weight, torch.float64, rows=last).T
        error = float((self.y[-1] - reference).norm() / reference.norm())
        if not error < LIMIT:
            raise SystemExit(f"{self.weight.block_type.name}: error {error:.3g}, no time is given")

    def best(self, threads: int, repeats: int) -> float:
        """Shortest wall time of a call, seconds."""
        self.call(threads)
        self.check()
        return min(harness.once(lambda: self.call(threads)) for _ in range(repeats))


def activations(tokens: int) -> Tensor:
    """f32 [tokens, COLUMNS]."""
    return torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(tokens))


def measure(repeats: int) -> list[Figure]:
    """Bytes and elements per second of one token, operations per second of more, by type."""
    figures = []

    def add(name: str, value: float, unit: str) -> None:
        figures.append(Figure("quant_matmul", name, value, unit, repeats))

    reads = {threads: harness.read_rate(threads) for threads in (1, 2)}
    for threads, rate in reads.items():
        add(f"reads, {threads} threads", rate / 1e9, "GB/s")
    for name in TYPES:
        form = "int8" if name in INT8_TYPES else "float32"
        for shape in (ONE, EXPERTS):
            weight = stored(name, shape)
            nbytes = weight.data.numel() * weight.data.element_size()
            label = f"{name} {form} {shape}"
            for threads in (1, 2):
                seconds = Work(weight, shape, activations(1)).best(threads, repeats)
                where = f"{label}, 1 token, {threads} threads"
                add(where, nbytes / seconds / 1e9, "GB/s")
                add(f"{where}, elements", shape.elements / seconds / 1e9, "G/s")
                if shape is EXPERTS:
                    add(f"{where}, share", nbytes / seconds / reads[threads], "of the reads")
            for tokens in (8, 64, 512) if shape is ONE else (8, 64):
                seconds = Work(weight, shape, activations(tokens)).best(2, repeats)
                rate = 2 * shape.elements * tokens / seconds
                add(f"{label}, {tokens} tokens, 2 threads", rate / 1e9, "GFLOP/s")
    return figures


if __name__ == "__main__":
    harness.main(measure)

"""One token, one thread, at the sizes of V4-Flash's experts: every instruction set, type by type.

Rows that stay in the second-level cache show what the arithmetic costs, rows that are larger than
any cache what is left of it behind the memory. Beside both stands the rate at which the same thread
reads such data. Rates are the best of n.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from bench_quant_matmul import Shape, stored
from harness import Figure

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native.library import (
    NativeRun,
    instruction_sets,
    library,
    matrix_of,
    pointer,
    using_instruction_set,
)
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, round_activations

COLUMNS = {"IQ2_XXS": 4096, "Q2_K": 2048, "MXFP4": 4096, "Q4_K": 4096, "Q8_0": 4096}
"""Of gate and up, and of down where only that has the type."""
LEVELS = ("avx2", "avx-vnni", "avx512-vnni", "avx512-vbmi", "neon-dotprod")
CACHED_BYTES, FAR_BYTES = 3 << 18, 400 << 20
NEAR_CALLS = 10
"""Calls on data in the cache for each on data in memory."""
LIMIT = 1e-5


def product(weight: QuantMatrix, x: torch.Tensor) -> Callable[[int], torch.Tensor]:
    """The product of the first rows of a matrix with one token, as often as is wanted."""
    lib, ffi = library()
    run, record, item = NativeRun(), ffi.new("dk_input *"), ffi.new("dk_product *")
    memory = torch.empty(lib.dk_quantized_bytes(1, weight.columns) + 63, dtype=torch.uint8)
    start = pointer(memory) + -memory.data_ptr() % 64
    record.x, record.stride = pointer(x), weight.columns
    run.cdata.is_small = True
    run.check(lib.dk_quantize_rows(run.cdata, record, start, 1, weight.columns))
    y = torch.full((weight.rows,), torch.nan)
    matrix = matrix_of(weight)
    item.y, item.y_stride, item.w, item.x, item.tokens = pointer(y), weight.rows, matrix, record, 1
    kept = (record, memory, matrix, x)

    def call(rows: int) -> torch.Tensor:
        assert kept
        item.rows = rows
        run.check(lib.dk_products(run.cdata, item, 1))
        return y

    return call


def measure(repeats: int, far_bytes: int = FAR_BYTES) -> list[Figure]:
    """Weights and bytes per second by type, instruction set and place of the data."""
    if repeats == 1:
        far_bytes //= 16  # no figure, only whether it runs
    figures = []

    def add(name: str, value: float, unit: str) -> None:
        figures.append(Figure("single_token", name, value, unit, repeats))

    for place, nbytes in (("cache", CACHED_BYTES), ("memory", far_bytes)):
        add(f"reads, {place}", harness.read_rate(1, nbytes) / 1e9, "GB/s")
    for name, columns in COLUMNS.items():
        row_bytes = BLOCK_TYPES[name].row_bytes(columns)
        few = CACHED_BYTES // row_bytes
        weight = stored(name, Shape(far_bytes // row_bytes, 1, columns))
        x = torch.randn(1, columns, generator=torch.Generator().manual_seed(1))
        first = dequantize(weight, torch.float64, rows=slice(0, few))
        expected = (round_activations(x).double() @ first.T)[0]
        for level in instruction_sets():
            if level.name not in LEVELS:
                continue
            with using_instruction_set(level):
                call = product(weight, x)
                error = float((call(few)[:few] - expected).norm() / expected.norm())
                if not error < LIMIT:
                    raise SystemExit(f"{name}, {level.name}: error {error:.3g}, no time is given")
                times = {
                    "cache": (few, best_of(call, few, NEAR_CALLS * repeats)),
                    "memory": (weight.rows, best_of(call, weight.rows, repeats)),
                }
            for place, (rows, seconds) in times.items():
                label = f"{name}, {level.name}, {place}"
                add(label, rows * columns / seconds / 1e9, "G weights/s")
                add(f"{label}, bytes", rows * row_bytes / seconds / 1e9, "GB/s")
    return figures


def best_of(call: Callable[[int], object], rows: int, repeats: int) -> float:
    """Shortest time of a call, seconds."""
    return min(harness.once(lambda: call(rows)) for _ in range(repeats))


if __name__ == "__main__":
    harness.main(measure, repeats=20)

"""Cached rows stored and loaded in C, beside the rate of the process's reads.

FP8 key/value rows of 512 dims, 64 of them rotated; FP4 index keys of 128. One row is what a decode
step stores per layer, 4096 are more than a prefill chunk and larger than the near caches. Bytes are
those of the float32 rows and of the codes; rates are the best of n.
"""

from __future__ import annotations

from collections.abc import Callable

import harness
import torch
from harness import Figure
from stored_rows import KeptRows
from torch import Tensor

from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.native.library import NativeRun, library, pointer

FORMS = {"FP8 rows of 512": (512, 64), "FP4 keys of 128": (128, 0)}
COUNTS = (1, 256, 4096)
READING_BYTES = 1 << 22
"""Calls are repeated until they went over about so many."""


def reference(rows: Tensor, rope: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Codes and scales, and the rows that come back, by the definition."""
    if rope:
        parts = quantize_kv_rows(rows, rope, backend="reference")
        return parts, dequantize_kv_rows(*parts, rope, torch.float32, backend="reference")
    parts = quantize_index_keys(rows, backend="reference")
    return parts, dequantize_index_keys(*parts, torch.float32, backend="reference")


def prepare(count: int, width: int, rope: int) -> tuple[dict[str, Callable[[int], None]], int]:
    """Checked calls by name, each by thread count, and the bytes that one goes over."""
    lib, _ = library()
    rows = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    kept, loaded, run = KeptRows(torch.zeros_like(rows), rope), torch.empty_like(rows), NativeRun()

    def store(threads: int) -> None:
        run.cdata.threads = threads
        run.check(lib.dk_rows_store(run.cdata, kept.record, 0, pointer(rows), count))

    def load(_threads: int) -> None:
        lib.dk_rows_load(pointer(loaded), kept.record, 0, count)

    store(2)
    load(1)
    parts, values = reference(rows, rope)
    pairs = ((kept.parts[0], parts[0]), (kept.parts[1], parts[1]), (loaded, values))
    if not all(torch.equal(found, expected) for found, expected in pairs):
        raise SystemExit(f"{count} rows of {width}: wrong values, no time is reported")
    return {"store": store, "load": load}, rows.numel() * 4 + kept.nbytes


def measure(repeats: int) -> list[Figure]:
    """Time per row, bytes per second and share of the reads, by format, rows and threads."""
    figures = []
    reads = {threads: harness.read_rate(threads) for threads in (1, 2)}
    for form, (width, rope) in FORMS.items():
        for count in COUNTS:
            calls, nbytes = prepare(count, width, rope)
            for name, call in calls.items():
                # A row is loaded by the thread that needs it, so loads have one.
                for threads in (1, 2) if name == "store" and count > 1 else (1,):
                    turns = max(1, READING_BYTES // nbytes)
                    seconds = _best(call, threads, turns, repeats)
                    rate, plural = nbytes / seconds, "s" * (threads > 1)
                    label = f"{name} {count} {form}, {threads} thread{plural}"
                    values = (
                        (1e9 * seconds / count, "ns per row"),
                        (rate / 1e9, "GB/s"),
                        (rate / reads[threads], "of the reads"),
                    )
                    figures += [Figure("kv_rows", label, *value, repeats) for value in values]
    return figures


def _best(call: Callable[[int], None], threads: int, turns: int, repeats: int) -> float:
    """Shortest mean wall time of a call, seconds."""

    def work() -> None:
        for _ in range(turns):
            call(threads)

    work()
    return min(harness.once(work) for _ in range(repeats)) / turns


if __name__ == "__main__":
    harness.main(measure)

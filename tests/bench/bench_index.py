"""Scoring and selection of FP4 index keys in C, beside the memory rate of the same process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import harness
import torch
from harness import Figure
from stored_rows import KeptRows
from torch import Tensor

from edgedsv4.kernels.index_scores import index_scores_reference
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.kv_quant import dequantize_index_keys, quantize_index_keys
from edgedsv4.kernels.native.library import NativeRun, library, pointer

RATIO = 4
CALLS_SECONDS = 2e-3


@dataclass(frozen=True)
class Shape:
    """What one call scores; dims are 128."""

    heads: int
    keys: int
    tokens: int
    top: int

    def __str__(self) -> str:
        return f"{self.tokens}x{self.heads} heads, {self.top} of {self.keys} keys"

    @property
    def operations(self) -> int:
        """Multiplications and additions of the dots."""
        return 2 * self.tokens * self.heads * self.keys * 128


SHAPES = [Shape(8, 2048, 1, 64), Shape(8, 2048, 64, 64), Shape(64, 8192, 1, 512)]


def rounded(rows: Tensor) -> Tensor:
    """To FP4 and back."""
    return dequantize_index_keys(*quantize_index_keys(rows), torch.float32)


def prepare(shape: Shape, threads: int) -> tuple[Callable[[], Tensor], Tensor, int]:
    """The C call, the rows that it should give, and the bytes of the keys."""
    lib, ffi = library()
    generator = torch.Generator().manual_seed(shape.keys)
    keys = torch.randn(shape.keys, 128, generator=generator)
    q = rounded(torch.randn(shape.tokens * shape.heads, 128, generator=generator))
    q = q.view(shape.tokens, shape.heads, 128)
    weights = torch.rand(shape.tokens, shape.heads, generator=generator)
    stored, start = KeptRows(keys), RATIO * shape.keys - shape.tokens
    nbytes = lib.dk_index_scratch_bytes(shape.keys, shape.heads, 128, threads)
    scratch = torch.empty(nbytes, dtype=torch.uint8)
    selected = torch.empty(shape.tokens, shape.top, dtype=torch.int32)
    memory, run = ffi.cast("void *", scratch.data_ptr()), NativeRun(threads)
    sizes = (start, shape.tokens, shape.heads, 128, RATIO, shape.top, memory)
    pointers = (pointer(selected), ffi.NULL, pointer(q), pointer(weights), stored.record)

    def call() -> Tensor:
        run.check(lib.dk_index_select(run.cdata, *pointers, *sizes))
        return selected

    visible = (start + torch.arange(shape.tokens) + 1) // RATIO
    scores = index_scores_reference(q.double(), rounded(keys).double(), weights.double())
    ids, _ = index_topk(scores, torch.arange(shape.keys), visible, shape.top)
    call.keep = (stored, scratch, q, weights)  # type: ignore[attr-defined]
    return call, ids.sort(dim=-1).values, stored.nbytes


def measure(repeats: int) -> list[Figure]:
    """Time per call, rate of the dots and share of the memory rate, per shape and threads."""
    figures = []
    for threads in (1, 2):
        memory = harness.read_rate(threads, 1 << 28)
        for shape in SHAPES:
            call, expected, nbytes = prepare(shape, threads)
            if not torch.equal(call().long(), expected):
                raise SystemExit(f"{shape}: wrong rows, no time is reported")
            calls = max(1, int(CALLS_SECONDS / (shape.operations / 1.5e11)))

            def work(call: Callable[[], Tensor] = call, calls: int = calls) -> None:
                for _ in range(calls):
                    call()

            seconds = harness.seconds(work, repeats) / calls
            label = f"{shape}, {threads} thread{'s' if threads > 1 else ''}"
            share = nbytes / seconds / memory
            figures += [
                Figure("index", label, seconds * 1e6, "us", repeats),
                Figure(
                    "index", f"{label}, dots", shape.operations / seconds / 1e9, "Gop/s", repeats
                ),
                Figure("index", f"{label}, share", share, "of the memory rate", repeats),
            ]
    return figures


if __name__ == "__main__":
    harness.main(measure)

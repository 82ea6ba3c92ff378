"""Launches of products of a chunk at the sizes of V4-Flash, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgedsv4.kernels.gpu.matmul import matmul, matmul_scratch_bytes
from edgedsv4.kernels.gpu.planes import empty_matrix

# Type, rows, columns, groups; tokens, up to 128 for every width of a tile.
_CASES = {
    "wq_a": ("Q8_0", 1024, 4096, 1, (2, 32, 64, 128, 512)),
    "wkv": ("Q8_0", 512, 4096, 1, (2, 64, 512)),
    "wo_a": ("Q8_0", 8192, 4096, 8, (2, 64, 512)),
    "wo_b": ("Q8_0", 4096, 8192, 1, (2,)),
    "fp8": ("FP8_E4M3", 1024, 4096, 1, (2, 64, 512)),
    "mxfp4": ("MXFP4", 2048, 4096, 1, (64,)),
    "q4_k": ("Q4_K", 2048, 4096, 1, (64, 512)),
    "q6_k": ("Q6_K", 2048, 4096, 1, (64, 512)),
}
_FLOAT_CASES = {
    "router_bf16": ("BF16", 256, 4096, 1, (2, 128, 512)),
    "router_f16": ("F16", 256, 4096, 1, (2, 128, 512)),
    "router_f32": ("F32", 256, 4096, 1, (2, 128)),
}


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and launches."""
    for name, (kind, rows, columns, groups, chunks) in (_CASES | _FLOAT_CASES).items():
        is_wide = name in _FLOAT_CASES
        for tokens in chunks:
            sizes = (kind, rows, columns, groups, tokens)
            yield f"matmul_{name}_{tokens}", _launch(*sizes, precise=False, wide=is_wide)
    yield "matmul_precise_2", _launch("Q8_0", 1024, 4096, 1, 2, precise=True, wide=False)
    yield "matmul_precise_128", _launch("Q8_0", 1024, 4096, 1, 128, precise=True, wide=False)


def _launch(
    kind: str, rows: int, columns: int, groups: int, tokens: int, *, precise: bool, wide: bool
) -> Callable[[], None]:
    def launch() -> None:
        meta = torch.device("meta")
        matrix = empty_matrix(kind, rows, columns, meta)
        options = {"groups": groups, "precise": precise, "wide": wide}
        nbytes = matmul_scratch_bytes(tokens, matrix, meta, **options)
        scratch = torch.empty(nbytes, dtype=torch.uint8, device=meta)
        x = torch.empty(tokens, groups * columns, device=meta)
        matmul(torch.empty(tokens, rows, device=meta), x, matrix, scratch=scratch, **options)

    return launch

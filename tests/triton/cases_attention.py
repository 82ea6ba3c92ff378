"""Launches of the attention kernels at the sizes of V4-Flash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.attention import decode_attention, decode_partials
from edgedsv4.kernels.gpu.attention_rows import Parts, widen_rows
from edgedsv4.kernels.gpu.chunk_attention import chunk_attention
from edgedsv4.kernels.gpu.nvidia import overlaps

H, D, R, W, TOP = 64, 512, 64, 128, 512
SPLITS, TOKENS = 33, 4096
LAYERS = {"window only": (0, False), "ratio 4": (4, True), "ratio 128": (128, False)}
"""Ratio, and whether an indexer selects."""


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def rows(count: int, form: str) -> Parts:
    if form == "fp8":
        widths = (D + R, 8)
        return tuple(empty(count, width, dtype=torch.uint8) for width in widths)
    return (empty(count, D, dtype=torch.float32 if form == "f32" else torch.bfloat16),)


def layer(tokens: int, ratio: int, has_indexer: bool, form: str, family: str) -> dict[str, Any]:
    return {
        "position": empty(1, dtype=torch.int32),
        "window": W,
        "compressed": rows((1 << 20) // ratio, form) if ratio else None,
        "selected": empty(tokens, TOP, dtype=torch.int32) if has_indexer else None,
        "ratio": ratio,
        "sink": empty(H),
        "cos": empty(tokens, R // 2),
        "sin": empty(tokens, R // 2),
        "family": family,
    }


def decode(ratio: int, has_indexer: bool, form: str, family: str) -> None:
    decode_attention(
        empty(1, H * D),
        empty(1, H, D),
        rows(W, form),
        partials=decode_partials(SPLITS, H, D, "meta"),
        overlap=overlaps(family),
        **layer(1, ratio, has_indexer, form, family),
    )


def chunk(
    ratio: int, has_indexer: bool, form: str, family: str, dtypes: tuple[torch.dtype, torch.dtype]
) -> None:
    q_dtype, out_dtype = dtypes
    chunk_attention(
        empty(TOKENS, H * D, dtype=out_dtype),
        empty(TOKENS, H, D, dtype=q_dtype),
        rows(W - 1 + TOKENS, form),
        first=0,
        **layer(TOKENS, ratio, has_indexer, form, family),
    )


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    full, half = torch.float32, torch.bfloat16
    for name, kind in LAYERS.items():
        for form in ("fp8", "f32"):
            yield f"decode_attention, {name}, {form}", partial(decode, *kind, form, family)
        # FP8 rows as they are, or decoded by `wide`.
        for form, dtypes in (
            ("bf16", (half, half)),
            ("bf16", (full, full)),
            ("fp8", (half, half)),
            ("fp8", (full, full)),
            ("f32", (full, full)),
        ):
            q_type, out_type = (str(dtype).removeprefix("torch.") for dtype in dtypes)
            yield (
                f"chunk_attention, {name}, {form}, {q_type} -> {out_type}",
                partial(chunk, *kind, form, family, dtypes),
            )
    stored, wide = rows(TOKENS, "fp8"), rows(TOKENS, "bf16")[0]
    yield "widen_rows", partial(widen_rows, wide, stored, R, family=family)

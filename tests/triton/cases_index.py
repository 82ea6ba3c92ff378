"""Launches of the indexer's kernels at the sizes of V4-Flash, for ahead-of-time compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.index_scores import score_keys
from edgedsv4.kernels.gpu.index_select import select_rows, select_scratch_ints
from edgedsv4.kernels.gpu.nvidia import overlaps

HEADS, DIM = 64, 128
RATIO = 4


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def score(
    tokens: int, rows: int, *, exact: bool = False, wide: bool = True, overlap: bool = False
) -> None:
    keys = (empty(rows, DIM // 2, dtype=torch.uint8), empty(rows, DIM // 32, dtype=torch.uint8))
    score_keys(
        empty(tokens, rows),
        empty(tokens, HEADS, DIM, dtype=torch.float32 if wide else torch.bfloat16),
        empty(tokens, HEADS),
        (empty(rows, DIM),) if exact else keys,
        empty(1, dtype=torch.int32),
        ratio=RATIO,
        topk=512,
        overlap=overlap,
    )


def select(tokens: int, rows: int, topk: int, *, overlap: bool = False) -> None:
    select_rows(
        empty(tokens, topk, dtype=torch.int32),
        empty(tokens, rows),
        empty(1, dtype=torch.int32),
        empty(select_scratch_ints(tokens, rows, topk), dtype=torch.int32),
        empty(1, dtype=torch.int32),
        ratio=RATIO,
        overlap=overlap,
    )


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    for tokens, rows in ((1, 262_144), (4096, 4096)):
        launch = partial(score, tokens, rows, overlap=tokens == 1 and overlaps(family))
        yield f"score_keys of {tokens}, FP4", launch
        yield f"score_keys of {tokens}, FP4, bfloat16", partial(launch, wide=False)
        yield f"score_keys of {tokens}, float32", partial(launch, exact=True)
    for topk in (512, 1024):
        launch = partial(select, 1, 262_144, topk, overlap=overlaps(family))
        yield f"select_rows {topk} of 262144", launch
    for rows in (1024, 4096):
        yield f"select_rows 512 of {rows}, chunk", partial(select, 4096, rows, 512)

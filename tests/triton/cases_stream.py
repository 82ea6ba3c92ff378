"""The launch that measures a card's memory, for ahead-of-time compiling."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from edgedsv4.kernels.gpu.stream import BLOCK, read_all


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Name and call."""
    out, words = (torch.empty(n, dtype=torch.int32, device="meta") for n in (1, 64 * BLOCK))
    yield "read_all", partial(read_all, out, words)

"""Launches of small kernels of a token, for the compile matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgedsv4.kernels.gpu.gated import gated
from edgedsv4.kernels.gpu.place import place


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """The gate of the shared expert of V4-Flash, and the place of a token."""

    def launch() -> None:
        out = torch.empty(1, 2048, device="meta")
        gated(out, torch.empty(1, 4096, device="meta"), 10.0)

    yield "one_token", launch

    def start() -> None:
        tables = [torch.empty(3, 32, device="meta") for _ in range(3)]
        one = torch.empty(1, dtype=torch.int32, device="meta")
        given = torch.empty(2, dtype=torch.int64, device="meta")
        ratios = torch.empty(3, dtype=torch.int64, device="meta")
        place(one, one, *tables[:2], given=given, ratios=ratios, frequencies=tables[2])

    yield "place", start

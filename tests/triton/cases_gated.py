"""Launches of the gate, for the compile matrix."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgedsv4.kernels.gpu.gated import gated


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """The shared expert of V4-Flash, one token."""

    def launch() -> None:
        out = torch.empty(1, 2048, device="meta")
        gated(out, torch.empty(1, 4096, device="meta"), 10.0)

    yield "one_token", launch

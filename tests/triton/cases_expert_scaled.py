"""Launches of a chunk's routed experts as block-scaled products, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgedsv4.kernels.gpu.expert_matmul import expert_scratch
from edgedsv4.kernels.gpu.expert_scaled import expert_ffn_scaled, has_scaled_products
from edgedsv4.kernels.gpu.planes import empty_bank

# D, F, slots and places of V4-Flash and of pocket-v4.
_MODELS = {"flash": (4096, 2048, 256, 6), "pocket": (256, 256, 8, 2)}
# One number for every width of a tile.
_TOKENS = {"flash": (64, 1024, 2048, 4096), "pocket": (64,)}


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and launches; none for families without these products."""
    if not has_scaled_products(family):
        return
    for model, chunks in _TOKENS.items():
        for tokens in chunks:
            yield f"expert_ffn_scaled_{model}_{tokens}", _launch(model, tokens)


def _launch(model: str, tokens: int) -> Callable[[], None]:
    hidden, width, slots, places = _MODELS[model]

    def launch() -> None:
        meta = torch.device("meta")
        w1, w3 = (empty_bank("MXFP4", slots, width, hidden, meta) for _ in range(2))
        w2 = empty_bank("MXFP4", slots, hidden, width, meta)
        scratch = expert_scratch(tokens, places, slots, hidden, width, device=meta, precise=False)
        x = torch.empty(tokens, hidden, device=meta)
        ids = torch.empty(tokens, places, dtype=torch.int32, device=meta)
        weights = torch.empty(tokens, places, device=meta)
        banks = (w1, w3, w2)
        expert_ffn_scaled(torch.empty_like(x), x, ids, weights, banks, 10.0, scratch=scratch)

    return launch

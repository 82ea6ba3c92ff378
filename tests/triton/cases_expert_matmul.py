"""Launches of a chunk's routed experts at the sizes of V4-Flash, for compiling ahead of time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from edgedsv4.kernels.gpu.expert_matmul import ExpertPart, expert_ffn_parts, expert_scratch
from edgedsv4.kernels.gpu.planes import empty_bank

_HIDDEN, _WIDTH, _SLOTS, _PLACES = 4096, 2048, 256, 6
# Types of w1, w3 and w2; tokens, one number for every width of a tile; products in f32.
_CASES = {
    "iq2_xxs_q2_k": ("IQ2_XXS", "IQ2_XXS", "Q2_K", (64, 1024, 2048, 4096), False),
    "mxfp4": ("MXFP4", "MXFP4", "MXFP4", (64, 1024, 2048, 4096), False),
    "q4_k": ("Q4_K", "Q4_K", "Q4_K", (64, 1024, 2048, 4096), False),
    "nvfp4": ("NVFP4", "NVFP4", "NVFP4", (64, 1024, 4096), False),
    "q8_0": ("Q8_0", "Q8_0", "Q8_0", (64, 4096), False),
    "fp8": ("FP8_E4M3", "FP8_E4M3", "FP8_E4M3", (64, 4096), False),
    "other_types": ("IQ2_XS", "IQ3_XXS", "Q6_K", (64, 1024, 4096), False),
    "precise": ("MXFP4", "MXFP4", "MXFP4", (64, 4096), True),
    "precise_q2": ("IQ2_XXS", "IQ2_XXS", "Q2_K", (64, 4096), True),
}


# Slots of a bank that holds a part of the experts of all layers.
_PARTS = {"iq2_xxs_q2_k": 3000, "mxfp4": 3000, "q4_k": 3000}


def cases() -> Iterator[tuple[str, Callable[[], None]]]:
    """Names and launches."""
    for name, (gate, up, down, chunks, precise) in _CASES.items():
        for tokens in chunks:
            yield f"expert_ffn_chunk_{name}_{tokens}", _launch(gate, up, down, tokens, precise)
        if name in _PARTS:
            for tokens in chunks:
                launch = _launch(gate, up, down, tokens, precise, slots=_PARTS[name])
                yield f"expert_ffn_parts_{name}_{tokens}", launch


def _launch(
    gate: str, up: str, down: str, tokens: int, precise: bool, slots: int = 0
) -> Callable[[], None]:
    def launch() -> None:
        meta = torch.device("meta")
        held = slots or _SLOTS
        w1 = empty_bank(gate, held, _WIDTH, _HIDDEN, meta)
        w3 = empty_bank(up, held, _WIDTH, _HIDDEN, meta)
        w2 = empty_bank(down, held, _HIDDEN, _WIDTH, meta)
        places = torch.empty(_SLOTS, dtype=torch.int32, device=meta) if slots else None
        sizes = (tokens, _PLACES, _SLOTS, _HIDDEN, _WIDTH)
        scratch = expert_scratch(*sizes, device=meta, precise=precise)
        x = torch.empty(tokens, _HIDDEN, device=meta)
        ids = torch.empty(tokens, _PLACES, dtype=torch.int32, device=meta)
        weights = torch.empty(tokens, _PLACES, device=meta)
        expert_ffn_parts(
            torch.empty_like(x),
            x,
            ids,
            weights,
            (ExpertPart((w1, w3, w2), places),),
            10.0,
            experts=_SLOTS,
            scratch=scratch,
            precise=precise,
        )

    return launch

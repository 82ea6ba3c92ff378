"""Launches of decode's products at the geometry of V4-Flash, with tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.planes import DeviceMatrix, empty_bank, empty_matrix

HIDDEN, WIDTH, EXPERTS, CHOSEN = 4096, 2048, 256, 6

_PRODUCTS: dict[str, tuple[list[tuple[str, int]], int, int]] = {
    "qr and kv": ([("Q8_0", 1024), ("Q8_0", 512)], HIDDEN, 1),
    "ratio 4": (
        [("Q8_0", 1536), ("F16", 2048), ("F16", 512), ("BF16", 64)],
        HIDDEN,
        1,
    ),
    "ratio 128": ([("Q8_0", 1536), ("F16", 1024)], HIDDEN, 1),
    "queries": ([("Q8_0", 32768)], 1024, 1),
    "queries and index queries": ([("Q8_0", 32768), ("Q8_0", 8192)], 1024, 1),
    "group outputs": ([("Q8_0", 8192)], HIDDEN, 8),
    "outputs": ([("Q8_0", HIDDEN)], 8192, 1),
    "router": ([("BF16", EXPERTS)], HIDDEN, 1),
    "head": ([("Q8_0", 129280)], HIDDEN, 1),
    "fallback": ([("Q6_K", HIDDEN)], HIDDEN, 1),
}
_EXPERTS = {
    "q2": ("IQ2_XXS", "Q2_K"),
    "mxfp4": ("MXFP4", "MXFP4"),
    "q4": ("Q4_K", "Q4_K"),
    "q8": ("Q8_0", "Q8_0"),
    "iq3": ("IQ3_XXS", "Q3_K"),
}


def _empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _product(parts: Sequence[tuple[str, int]], columns: int, groups: int, tokens: int) -> None:
    matrices = [empty_matrix(name, rows, columns, "meta") for name, rows in parts]
    y = _empty(tokens, sum(rows for _, rows in parts))
    matvec(y, _empty(tokens, groups * columns), matrices, groups)


def _shared(rows: int, columns: int) -> DeviceMatrix:
    return empty_matrix("Q8_0", rows, columns, "meta")


def _gate_up(name: str, family: str) -> None:
    bank = empty_bank(name, EXPERTS, WIDTH, HIDDEN, "meta")
    h, slots = _empty((CHOSEN + 1) * WIDTH), _empty(CHOSEN, dtype=torch.int32)
    shared = _shared(WIDTH, HIDDEN)
    x, limits = _empty(1, HIDDEN), (10.0, 10.0)
    expert_gate_up(h, x, slots, (bank, bank), (shared, shared), limits, family=family)


def _down(name: str, family: str) -> None:
    bank = empty_bank(name, EXPERTS, HIDDEN, WIDTH, "meta")
    h, slots = _empty((CHOSEN + 1) * WIDTH), _empty(CHOSEN, dtype=torch.int32)
    out, weights = _empty(1, HIDDEN), _empty(CHOSEN)
    expert_down(out, h, slots, weights, bank, _shared(HIDDEN, WIDTH), family=family)


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name of a launch, and the call that makes it."""
    for name, (parts, columns, groups) in _PRODUCTS.items():
        for tokens in (1, 2) if name in ("qr and kv", "fallback") else (1,):
            yield f"{name}, {tokens}", partial(_product, parts, columns, groups, tokens)
    for name, (up, down) in _EXPERTS.items():
        yield f"gate and up, {name}", partial(_gate_up, up, family)
        yield f"down, {name}", partial(_down, down, family)

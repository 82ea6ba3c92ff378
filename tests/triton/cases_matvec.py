"""Launches of decode's products at the geometry of V4-Flash, with tensors without memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.byte_products import BYTE_ORDERS
from edgedsv4.kernels.gpu.byte_vector import Order, empty_bytes, to_bytes
from edgedsv4.kernels.gpu.expert_bytes import down_bytes, gate_up_bytes
from edgedsv4.kernels.gpu.expert_split import split_experts
from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up
from edgedsv4.kernels.gpu.matvec import matvec
from edgedsv4.kernels.gpu.nvidia import has_byte_products, overlaps
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


def _product(
    parts: Sequence[tuple[str, int]], columns: int, groups: int, tokens: int, family: str
) -> None:
    matrices = [empty_matrix(name, rows, columns, "meta") for name, rows in parts]
    y = _empty(tokens, sum(rows for _, rows in parts))
    overlap = tokens == 1 and overlaps(family)
    x = _empty(tokens, groups * columns)
    matvec(y, x, matrices, groups, family=family, overlap=overlap)


def _shared(rows: int, columns: int) -> DeviceMatrix:
    return empty_matrix("Q8_0", rows, columns, "meta")


def _gate_up(name: str, family: str) -> None:
    bank = empty_bank(name, EXPERTS, WIDTH, HIDDEN, "meta")
    h, slots = _empty((CHOSEN + 1) * WIDTH), _empty(CHOSEN, dtype=torch.int32)
    shared = _shared(WIDTH, HIDDEN)
    x, limits = _empty(1, HIDDEN), (10.0, 10.0)
    expert_gate_up(h, x, slots, (bank, bank), (shared, shared), limits, family=family)
    overlap = overlaps(family)
    expert_gate_up(h[:-WIDTH], x, slots, (bank, bank), None, limits, family=family, overlap=overlap)


def _down(name: str, family: str) -> None:
    bank = empty_bank(name, EXPERTS, HIDDEN, WIDTH, "meta")
    h, slots = _empty((CHOSEN + 1) * WIDTH), _empty(CHOSEN, dtype=torch.int32)
    out, weights = _empty(1, HIDDEN), _empty(CHOSEN)
    expert_down(out, h, slots, weights, bank, _shared(HIDDEN, WIDTH), family=family)
    overlap = overlaps(family)
    expert_down(out, h[:-WIDTH], slots, weights, bank, None, family=family, overlap=overlap)


def _gate_up_bytes(name: str, order: Order, family: str) -> None:
    bank = empty_bank(name, EXPERTS, WIDTH, HIDDEN, "meta")
    h, x = (
        empty_bytes(CHOSEN * WIDTH, order, "meta"),
        empty_bytes(HIDDEN, BYTE_ORDERS[name], "meta"),
    )
    slots, overlap = _empty(CHOSEN, dtype=torch.int32), overlaps(family)
    gate_up_bytes(h, x, slots, (bank, bank), 10.0, width=WIDTH, overlap=overlap)


def _down_bytes(name: str, family: str) -> None:
    bank = empty_bank(name, EXPERTS, HIDDEN, WIDTH, "meta")
    h, slots = (
        empty_bytes(CHOSEN * WIDTH, BYTE_ORDERS[name], "meta"),
        _empty(CHOSEN, dtype=torch.int32),
    )
    down_bytes(_empty(1, HIDDEN), h, slots, _empty(CHOSEN), bank, overlap=overlaps(family))


def _part(gate_up: str, down: str, family: str) -> None:
    """Some of the experts are on the card."""
    bank = empty_bank(gate_up, EXPERTS, WIDTH, HIDDEN, "meta")
    h, slots, used = _empty(CHOSEN * WIDTH), *(_empty(n, dtype=torch.int32) for n in (CHOSEN, 1))
    x, weights = _empty(1, HIDDEN), _empty(CHOSEN)
    expert_gate_up(h, x, slots, (bank, bank), None, (10.0, 10.0), family=family, used=used)
    bank = empty_bank(down, EXPERTS, HIDDEN, WIDTH, "meta")
    expert_down(x, h, slots, weights, bank, None, family=family, used=used)


def _part_bytes(gate_up: str, down: str) -> None:
    """The same by bytes, and all of them, brought one by one."""
    bank = empty_bank(gate_up, EXPERTS, WIDTH, HIDDEN, "meta")
    other = empty_bank(down, EXPERTS, HIDDEN, WIDTH, "meta")
    x = empty_bytes(HIDDEN, BYTE_ORDERS[gate_up], "meta")
    h = empty_bytes(CHOSEN * WIDTH, BYTE_ORDERS[down], "meta")
    slots, used, weights = (
        _empty(CHOSEN, dtype=torch.int32),
        _empty(1, dtype=torch.int32),
        _empty(CHOSEN),
    )
    for count in (used, None):
        gate_up_bytes(h, x, slots, (bank, bank), 10.0, width=WIDTH, used=count)
        down_bytes(_empty(1, HIDDEN), h, slots, weights, other, used=count)


def _split() -> None:
    slots, used, ids, table = (_empty(n, dtype=torch.int32) for n in (CHOSEN, 1, CHOSEN, EXPERTS))
    split_experts(slots, _empty(CHOSEN), used, ids, _empty(CHOSEN), table)


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """Name of a launch, and the call that makes it."""
    for name, (parts, columns, groups) in _PRODUCTS.items():
        for tokens in (1, 2) if name in ("qr and kv", "fallback") else (1,):
            yield f"{name}, {tokens}", partial(_product, parts, columns, groups, tokens, family)
    for name, (up, down) in _EXPERTS.items():
        yield f"gate and up, {name}", partial(_gate_up, up, family)
        yield f"down, {name}", partial(_down, down, family)
        yield f"experts on the card, {name}", partial(_part, up, down, family)
    yield "split", _split
    if has_byte_products(family):
        for name, order in BYTE_ORDERS.items():
            for inner in sorted(set(BYTE_ORDERS.values())):
                yield f"gate and up by bytes, {name}", partial(_gate_up_bytes, name, inner, family)
            yield f"down by bytes, {name}", partial(_down_bytes, name, family)
            x = empty_bytes(HIDDEN, order, "meta")
            yield f"to bytes, {order}", partial(to_bytes, x, _empty(HIDDEN))
        for up, down in (("IQ2_XXS", "Q2_K"), ("Q2_K", "Q2_K")):
            yield f"experts on the card by bytes, {up}", partial(_part_bytes, up, down)

"""Launches of the hyper-connection, routing and sampling kernels at the sizes of V4-Flash."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from edgedsv4.config import SamplingOptions
from edgedsv4.kernels.gpu.byte_vector import Order, empty_bytes
from edgedsv4.kernels.gpu.hyper import head_step, hyper_step, hyper_work_floats
from edgedsv4.kernels.gpu.nvidia import has_byte_products, overlaps
from edgedsv4.kernels.gpu.route import route
from edgedsv4.kernels.gpu.sample import SamplingWork, TokenCounts, argmax, argmax_work_ints, sample
from edgedsv4.kernels.mhc import HyperConstants
from edgedsv4.kernels.sample import SamplingRules

D, HC = 4096, 4
E, K, V = 256, 6, 129280
CONSTANTS = HyperConstants(iterations=20, hc_eps=1e-6, norm_eps=1e-6)

ORDERS: tuple[Order, ...] = ("nibbles", "twos")


def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def parameters(rows: int) -> dict[str, Any]:
    scales = 3 if rows > HC else 1
    return {
        "fn": empty(rows, HC * D),
        "base": empty(rows),
        "scale": empty(scales),
        "norm": empty(D),
        "constants": CONSTANTS,
    }


def step(
    tokens: int,
    *,
    has_output: bool,
    precise: bool = False,
    additions: int = 0,
    overlap: bool = False,
) -> None:
    o = empty(tokens, D) if has_output else None
    extra, other = (empty(tokens, D) if additions > place else None for place in range(2))
    hyper_step(
        *(empty(tokens, D), empty(tokens, HC), empty(tokens, HC, HC), empty(tokens, HC, D), o),
        **parameters((2 + HC) * HC),
        work=empty(hyper_work_floats(tokens, D)),
        precise=precise,
        extra=extra,
        other=other,
        overlap=overlap,
    )


def rounded_step(order: Order, *, overlap: bool) -> None:
    o = empty(1, D)
    hyper_step(
        *(empty(1, D), empty(1, HC), empty(1, HC, HC), empty(1, HC, D), o),
        **parameters((2 + HC) * HC),
        work=empty(hyper_work_floats(1, D)),
        rounded=empty_bytes(D, order, "meta"),
        overlap=overlap,
    )


def head(tokens: int, wanted: int, *, overlap: bool = False) -> None:
    head_step(
        *(empty(wanted, D), empty(tokens, HC, D), empty(tokens, D)),
        *(empty(tokens, HC), empty(tokens, HC, HC)),
        **parameters(HC),
        work=empty(hyper_work_floats(tokens, D)),
        extra=empty(tokens, D) if overlap else None,
        overlap=overlap,
    )


def select(tokens: int, *, has_table: bool, overlap: bool = False) -> None:
    route(
        *(empty(tokens, K, dtype=torch.int32), empty(tokens, K), empty(tokens, E)),
        None if has_table else empty(E),
        scale=1.5,
        table=empty(V, K, dtype=torch.int32) if has_table else None,
        token_ids=empty(tokens, dtype=torch.int64) if has_table else None,
        overlap=overlap,
    )


def likeliest(tokens: int) -> None:
    work = empty(argmax_work_ints(tokens, V), dtype=torch.int32)
    argmax(empty(tokens, dtype=torch.int32), empty(tokens, V), work)


def draw(options: dict[str, Any]) -> None:
    rules = SamplingRules(SamplingOptions(**options), V)
    counts = TokenCounts(
        empty(V, dtype=torch.bool), empty(V, dtype=torch.int32), empty(V, dtype=torch.float64)
    )
    work = SamplingWork.allocate(V, "meta")
    sample(empty(1, dtype=torch.int32), empty(V), work, counts, rules)


def cases(family: str) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, launch)."""
    overlap = overlaps(family)
    yield "hyper_first", partial(step, 1, has_output=False, overlap=overlap)
    yield "hyper_decode", partial(step, 1, has_output=True, overlap=overlap)
    for count, name in ((1, "shared"), (2, "shared_host")):
        launch = partial(step, 1, has_output=True, additions=count, overlap=overlap)
        yield f"hyper_{name}", launch
    if has_byte_products(family):
        for order in ORDERS:
            yield f"hyper_decode_{order}", partial(rounded_step, order, overlap=overlap)
    yield "hyper_verify", partial(step, 4, has_output=True)
    yield "hyper_chunk_first", partial(step, 4096, has_output=False)
    yield "hyper_chunk", partial(step, 4096, has_output=True)
    yield "hyper_chunk_precise", partial(step, 4096, has_output=True, precise=True)
    yield "head_decode", partial(head, 1, 1, overlap=overlap)
    yield "head_chunk_last", partial(head, 4096, 1)
    yield "head_chunk_all", partial(head, 4096, 4096)
    yield "route_decode", partial(select, 1, has_table=False, overlap=overlap)
    yield "route_hash_decode", partial(select, 1, has_table=True, overlap=overlap)
    yield "route_chunk", partial(select, 4096, has_table=False)
    yield "route_hash_chunk", partial(select, 4096, has_table=True)
    yield "argmax", partial(likeliest, 1)
    yield "argmax_rows", partial(likeliest, 4)
    yield "sample", partial(draw, {"temperature": 0.6})
    yield "sample_top_p", partial(draw, {"top_p": 0.95})
    everything = {"top_k": 40, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1}
    yield "sample_all", partial(draw, {**everything, "logit_bias": {5: 1.0}})
    yield "sample_greedy_changed", partial(draw, {"temperature": 0.0, "presence_penalty": 0.5})

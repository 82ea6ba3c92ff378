"""Makes a forward compute every row by itself, so that a result cannot depend on its neighbours.

Torch's products round a row differently when more rows are multiplied with it. With every operation
called for one row (one query, one score, one window) at a time, evaluating in chunks must give the
same bits as evaluating at once; any bit that differs is then a mistake of the runtime.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from edgedsv4.kernels.mhc import HyperMix
from edgedsv4.model import attention, block, compressor, indexer, model, moe

_MODULES = (attention, block, compressor, indexer, model, moe)

Operation = Callable[..., Any]


def compute_rows_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace every operation whose rows could influence each other, in all model modules."""
    wrappers: dict[str, Callable[[Operation], Operation]] = {
        "quant_matmul": _product,
        "rms_norm": lambda op: _by_row(op, 1),
        "head_mix": lambda op: _by_row(op, 1),
        "read_streams": lambda op: _by_row(op, 2),
        "grouped_output": lambda op: _by_row(op, 1),
        "routing_weights": lambda op: _by_row(op, 2),
        # Torch's softplus takes another code path for the last elements of a tensor.
        "router_scores": lambda op: _by_row(op, 1),
        "expert_ffn": lambda op: _by_row(op, 1),
        "hyper_mix": _hyper_mix,
        "write_streams": _write_streams,
        "sparse_attention": _sparse_attention,
        "index_scores": _index_scores,
        "pool_windows": _pool_windows,
    }
    for module in _MODULES:
        for name, wrap in wrappers.items():
            if hasattr(module, name):
                monkeypatch.setattr(module, name, wrap(getattr(module, name)))


def _by_row(op: Operation, row_arguments: int) -> Operation:
    """Split the first `row_arguments` arguments along their first dim."""

    def wrapped(*args: Any, **options: Any) -> Tensor:
        fixed = args[row_arguments:]
        count = args[0].shape[0]
        rows = ([a[i : i + 1] for a in args[:row_arguments]] for i in range(count))
        return torch.cat([op(*row, *fixed, **options) for row in rows])

    return wrapped


def _product(op: Operation) -> Operation:
    by_row = _by_row(op, 1)

    def wrapped(x: Tensor, weight: Any, **options: Any) -> Tensor:
        flat = by_row(x.reshape(-1, x.shape[-1]), weight, **options)
        return flat.view(*x.shape[:-1], -1)

    return wrapped


def _hyper_mix(op: Operation) -> Operation:
    def wrapped(streams: Tensor, *args: Any, **options: Any) -> HyperMix:
        mixes = [op(streams[i : i + 1], *args, **options) for i in range(streams.shape[0])]
        parts = (torch.cat([getattr(mix, p) for mix in mixes]) for p in ("pre", "post", "comb"))
        return HyperMix(*parts)

    return wrapped


def _write_streams(op: Operation) -> Operation:
    def wrapped(streams: Tensor, output: Tensor, mix: HyperMix) -> Tensor:
        rows = (slice(i, i + 1) for i in range(streams.shape[0]))
        return torch.cat(
            [
                op(streams[r], output[r], HyperMix(mix.pre[r], mix.post[r], mix.comb[r]))
                for r in rows
            ]
        )

    return wrapped


def _sparse_attention(op: Operation) -> Operation:
    """One query over exactly its rows: padding would change the order of its sums."""

    def wrapped(q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, **options: Any) -> Tensor:
        outputs = []
        for i in range(q.shape[0]):
            attended = ids[i][ids[i] >= 0]
            places = torch.arange(len(attended))[None]
            outputs.append(op(q[i : i + 1], rows[attended], places, sink, **options))
        return torch.cat(outputs)

    return wrapped


def _index_scores(op: Operation) -> Operation:
    def wrapped(q: Tensor, keys: Tensor, weights: Tensor, **options: Any) -> Tensor:
        scores = [
            [
                op(q[i : i + 1], keys[w : w + 1], weights[i : i + 1], **options)
                for w in range(len(keys))
            ]
            for i in range(q.shape[0])
        ]
        return torch.cat([torch.cat(row, dim=1) for row in scores])

    return wrapped


def _pool_windows(op: Operation) -> Operation:
    def wrapped(
        values: Tensor, gates: Tensor, *, has_overlap: bool, previous: bool, **options: Any
    ) -> Tensor:
        pooled = []
        for i in range(1 if previous else 0, values.shape[0]):
            pair = has_overlap and i > 0
            part = slice(i - 1 if pair else i, i + 1)
            pooled.append(
                op(values[part], gates[part], has_overlap=has_overlap, previous=pair, **options)
            )
        return torch.cat(pooled)

    return wrapped

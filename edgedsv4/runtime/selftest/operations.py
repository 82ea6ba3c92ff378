"""Checks of the operations that have a public function, called with small odd shapes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.expert_ffn import expert_ffn
from edgedsv4.kernels.grouped_output import grouped_output
from edgedsv4.kernels.hadamard import hadamard
from edgedsv4.kernels.index_scores import index_scores
from edgedsv4.kernels.index_topk import index_topk
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.mhc import HyperConstants, hyper_head, hyper_read, hyper_write
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.kernels.rope import apply_rope, rope_frequencies, rope_table
from edgedsv4.kernels.router import route
from edgedsv4.kernels.sparse_attention import sparse_attention
from edgedsv4.kernels.swiglu import swiglu
from edgedsv4.runtime.selftest.check import Check, against_float64, draw
from edgedsv4.runtime.selftest.matrices import random_matrix

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation

_EPS = 1e-6
_CONSTANTS = HyperConstants(iterations=20, hc_eps=1e-6, norm_eps=_EPS)
_REFERENCE: tuple[Implementation, ...] = ("reference",)


def operation_checks(device: torch.device) -> Iterator[Check]:
    """One check per operation."""
    yield from _row_operations(device)
    yield from _streams(device)
    yield from _rows_at_rest(device)
    yield from _attention(device)
    yield from _experts(device)


def _row_operations(device: torch.device) -> Iterator[Check]:
    def norm(x: Tensor, weight: Tensor, **backend: Any) -> list[Tensor]:
        return [rms_norm(x, weight, _EPS, **backend), rms_norm(x, None, _EPS, **backend)]

    def rotate(x: Tensor, frequencies: Tensor, **backend: Any) -> list[Tensor]:
        positions = torch.arange(1000, 1000 + len(x), device=x.device)
        table = rope_table(positions, frequencies.float(), x.dtype)
        return [apply_rope(x, table, inverse=inverse, **backend) for inverse in (False, True)]

    def transform(*rows: Tensor, **backend: Any) -> list[Tensor]:
        return [hadamard(x, **backend) for x in rows]

    def gated(gate: Tensor, up: Tensor, **backend: Any) -> list[Tensor]:
        return [swiglu(gate, up, 1.5, **backend)]

    frequencies = rope_frequencies(10, 10_000.0, None)
    yield against_float64("rms_norm", device, norm, (draw(1, 5, 203), draw(2, 203)))
    yield against_float64("rope", device, rotate, (draw(3, 7, 3, 37), frequencies))
    yield against_float64("hadamard", device, transform, (draw(4, 5, 128), draw(5, 3, 2, 16)))
    yield against_float64("swiglu", device, gated, (2 * draw(6, 3, 77), 2 * draw(7, 3, 77)))


def _streams(device: torch.device) -> Iterator[Check]:
    hidden = 67
    streams, norm = draw(8, 5, 4, hidden), 1 + draw(9, hidden) / 8

    def read(x: Tensor, fn: Tensor, *rest: Tensor, **backend: Any) -> list[Tensor]:
        base, scale, norm = rest
        got = hyper_read(x, fn, base, scale, norm, _CONSTANTS, **backend)
        return [got.x, got.post, got.comb]

    def head(x: Tensor, fn: Tensor, *rest: Tensor, **backend: Any) -> list[Tensor]:
        base, scale, norm = rest
        return [hyper_head(x, fn, base, scale, norm, _CONSTANTS, **backend)]

    def write(*inputs: Tensor, **backend: Any) -> list[Tensor]:
        return [hyper_write(*inputs, **backend)]

    reading = (streams, draw(10, 24, 4 * hidden) / 16, draw(11, 24), draw(12, 3), norm)
    yield against_float64("hyper-connections: read", device, read, reading)
    writing = (streams, draw(13, 5, hidden), draw(14, 5, 4), draw(15, 5, 4, 4))
    yield against_float64("hyper-connections: write", device, write, writing)
    last = (streams, draw(16, 4, 4 * hidden) / 16, draw(17, 4), draw(18, 1), norm)
    yield against_float64("hyper-connections: head", device, head, last)


def _rows_at_rest(device: torch.device) -> Iterator[Check]:
    def kv_rows(x: Tensor, **backend: Any) -> list[Tensor]:
        data, scales = quantize_kv_rows(x, 16, **backend)
        return [data, scales, dequantize_kv_rows(data, scales, 16, x.dtype, **backend)]

    def index_keys(x: Tensor, **backend: Any) -> list[Tensor]:
        codes, scales = quantize_index_keys(x, **backend)
        return [codes, scales, dequantize_index_keys(codes, scales, x.dtype, **backend)]

    yield against_float64("kv_quant: FP8 rows", device, kv_rows, (3 * draw(19, 9, 117),))
    yield against_float64("kv_quant: FP4 index keys", device, index_keys, (draw(20, 9, 72),))


def _attention(device: torch.device) -> Iterator[Check]:
    def attend(q: Tensor, rows: Tensor, ids: Tensor, sink: Tensor, **backend: Any) -> list[Tensor]:
        return [sparse_attention(q, rows, ids, sink, **backend)]

    def score(*inputs: Tensor, **backend: Any) -> list[Tensor]:
        return [index_scores(*inputs, **backend)]

    def select(scores: Tensor, visible: Tensor, **backend: Any) -> list[Tensor]:
        rows = torch.arange(scores.shape[1], device=scores.device)
        return [index_topk(scores, rows, visible, 5, **backend)[0]]

    def pool(values: Tensor, gates: Tensor, **backend: Any) -> list[Tensor]:
        return [
            pool_windows(values, gates, has_overlap=True, previous=False, **backend),
            pool_windows(values, gates, has_overlap=False, previous=False, **backend),
        ]

    ids = torch.arange(7 * 23).view(7, 23) * 37 % 62 - 1
    attending = (draw(21, 7, 5, 48), draw(22, 61, 48), ids, draw(23, 5))
    yield against_float64("sparse_attention", device, attend, attending)
    scoring = (draw(24, 3, 5, 40), draw(25, 29, 40), draw(26, 3, 5))
    yield against_float64("index_scores", device, score, scoring)
    selecting = (draw(27, 4, 17).round(decimals=1), torch.tensor([17, 3, 0, 11]))
    yield against_float64("index_topk", device, select, selecting, _REFERENCE)
    pooling = (draw(28, 5, 4, 42), 3 * draw(29, 5, 4, 42))
    yield against_float64("compress: pooling", device, pool, pooling, _REFERENCE)


def _experts(device: torch.device) -> Iterator[Check]:
    def routed(logits: Tensor, bias: Tensor, **backend: Any) -> list[Tensor]:
        return [*route(logits, bias, 6, 1.5, **backend), *route(logits, None, 1, 2.5, **backend)]

    def expert(x: Tensor, gate: Any, up: Any, down: Any, **backend: Any) -> list[Tensor]:
        return [expert_ffn(x, gate, up, down, 1.5, **backend)]

    def grouped(outputs: Tensor, wo_a: Any, **backend: Any) -> list[Tensor]:
        return [
            grouped_output(outputs, wo_a, 2, activations="f32", **backend),
            grouped_output(outputs, wo_a, 2, activations="int8", **backend),
        ]

    yield against_float64("router", device, routed, (draw(30, 9, 37), draw(31, 37) / 4))
    gate, up = (random_matrix(BLOCK_TYPES["Q4_K"], 96, 256, seed) for seed in (32, 33))
    down = random_matrix(BLOCK_TYPES["MXFP4"], 256, 96, 34)
    yield against_float64("expert_ffn", device, expert, (draw(35, 5, 256), gate, up, down))
    wo_a = random_matrix(BLOCK_TYPES["Q8_0"], 34, 96, 36)
    yield against_float64("grouped_output", device, grouped, (draw(37, 19, 6, 32), wo_a))

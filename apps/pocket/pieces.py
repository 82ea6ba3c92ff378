"""The parts of a layer as plain functions of tensors, and which of them are compiled.

A part takes weights as arguments, so that one compiled version serves every layer of the same
shapes. The formulas are those of `edgedsv4.kernels`; what stands here is only their order. Products
run in `dtype`; mixing, norms, softmaxes and routing are float32.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.mhc import (
    HyperConstants,
    HyperMix,
    head_mix,
    hyper_mix,
    read_streams,
    write_streams,
)
from edgedsv4.kernels.rms_norm import rms_norm
from edgedsv4.kernels.rope import RopeTable, apply_rope
from edgedsv4.kernels.swiglu import swiglu
from pocket.losses import HIDDEN, weighted_cross_entropy
from pocket.training_attention import attend
from pocket.training_moe import dense_experts, route

logger = logging.getLogger(__name__)

CompileMode = Literal["auto", "off"]


@dataclass(frozen=True)
class HyperTensors:
    """Hyper-connection parameters, float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True)
class QueryTensors:
    """Matrices and norms that make queries and raw rows."""

    wq_a: Tensor
    q_norm: Tensor
    wq_b: Tensor
    wkv: Tensor
    kv_norm: Tensor


@dataclass(frozen=True)
class CompressorTensors:
    """One compressor."""

    wkv: Tensor
    wgate: Tensor
    ape: Tensor
    norm: Tensor


@dataclass(frozen=True)
class Numbers:
    """Constants of the network, and the dtype that products run in."""

    hyper: HyperConstants
    heads: int
    groups: int
    index_heads: int
    dtype: torch.dtype


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """The product x W^T in `dtype`."""
    return functional.linear(x.to(dtype), weight.to(dtype))


def read_sublayer(
    streams: Tensor, hyper: HyperTensors, norm: Tensor, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalised input of a sublayer [T, D], and the post and comb mixes for its output."""
    mix = hyper_mix(streams, hyper.fn, hyper.base, hyper.scale, numbers.hyper)
    x = rms_norm(read_streams(streams, mix.pre), norm, numbers.hyper.norm_eps)
    return x, mix.post, mix.comb


def write_sublayer(streams: Tensor, output: Tensor, post: Tensor, comb: Tensor) -> Tensor:
    """Streams [T, hc, D] after a sublayer with `output` [T, D]."""
    if not torch.compiler.is_compiling():
        return write_streams(streams, output, HyperMix(post, post, comb))
    # The same sum spelled out: fused into one kernel it beats 4 x 4 matrix products.
    mixed = (comb[..., None] * streams[:, :, None, :]).sum(dim=1)
    return post[..., None] * output.float()[:, None, :] + mixed


def make_queries(
    x: Tensor, tensors: QueryTensors, table: RopeTable, numbers: Numbers
) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries [T, H, d], normalised low-rank queries [T, Rq], rotated raw rows [T, d]."""
    eps, dtype = numbers.hyper.norm_eps, numbers.dtype
    qr = rms_norm(linear(x, tensors.wq_a, dtype), tensors.q_norm, eps)
    q = linear(qr, tensors.wq_b, dtype).view(x.shape[0], numbers.heads, -1)
    q = apply_rope(rms_norm(q, None, eps), table)
    kv = rms_norm(linear(x, tensors.wkv, dtype), tensors.kv_norm, eps)
    return q, qr, apply_rope(kv, table)


def make_rows(
    x: Tensor, tensors: CompressorTensors, table: RopeTable, own: Tensor, numbers: Numbers
) -> Tensor:
    """Rotated compressed rows [B, n, c].

    Args:
        x: [B, n * m, D].
        tensors: of the compressor.
        table: rotation of the B * n rows.
        own: [B, n, m, series] bool, which tokens are of the document of the row they go into.
        numbers: constants.
    """
    batch, count, ratio, series = own.shape
    values = linear(x, tensors.wkv, numbers.dtype).float()
    gates = linear(x, tensors.wgate, numbers.dtype).float()
    gates = gates.view(batch, count, ratio, -1) + tensors.ape
    gates = gates.view(batch, count, ratio, series, -1).masked_fill(~own[..., None], HIDDEN)
    # Pooling is per channel, so the sequences of a batch may stand side by side as channels.
    shape = (batch, count, ratio, series, -1)
    side_by_side = (1, 2, 3, 0, 4)
    values = values.view(shape).permute(side_by_side).flatten(2)
    gates = gates.view(shape).permute(side_by_side).flatten(2)
    pooled = pool_windows(values, gates, has_overlap=series == 2, previous=False)
    pooled = pooled.view(count, batch, -1).transpose(0, 1).flatten(0, 1)
    rows = rms_norm(pooled.to(numbers.dtype), tensors.norm, numbers.hyper.norm_eps)
    return apply_rope(rows, table).view(batch, count, -1)


def make_index_queries(
    x: Tensor,
    qr: Tensor,
    matrices: tuple[Tensor, Tensor],
    table: RopeTable,
    numbers: Numbers,
) -> tuple[Tensor, Tensor]:
    """Rotated index queries [T, heads, dim] and scaled head weights [T, heads] float32."""
    wq_b, weights_proj = matrices
    queries = linear(qr, wq_b, numbers.dtype).view(x.shape[0], numbers.index_heads, -1)
    scale = float(queries.shape[-1] * numbers.index_heads) ** -0.5
    weights = functional.linear(x.float(), weights_proj) * scale
    return apply_rope(queries, table), weights


def project_outputs(
    outputs: Tensor, wo_a: Tensor, wo_b: Tensor, table: RopeTable, numbers: Numbers
) -> Tensor:
    """Attention outputs [T, H, d], rotated back and through the grouped projection: [T, D]."""
    turned = apply_rope(outputs, table, inverse=True)
    groups = turned.reshape(turned.shape[0], numbers.groups, -1)
    matrices = wo_a.view(numbers.groups, -1, wo_a.shape[1])
    parts = [linear(groups[:, g], matrices[g], numbers.dtype) for g in range(numbers.groups)]
    return linear(torch.cat(parts, dim=-1), wo_b, numbers.dtype)


def shared_expert(
    x: Tensor, matrices: tuple[Tensor, Tensor, Tensor], limit: float, dtype: torch.dtype
) -> Tensor:
    """The expert that every token uses; matrices w1, w3, w2."""
    w1, w3, w2 = matrices
    return linear(swiglu(linear(x, w1, dtype), linear(x, w3, dtype), limit), w2, dtype).float()


@dataclass(frozen=True)
class DraftTensors:
    """What the MTP block has in front of its layer."""

    enorm: Tensor
    hnorm: Tensor
    e_proj: Tensor
    h_proj: Tensor


def make_draft_streams(
    token: Tensor, streams: Tensor, tensors: DraftTensors, numbers: Numbers
) -> Tensor:
    """Streams [T, hc, D] for the MTP layer, of embeddings [T, D] and streams [T, hc, D]."""
    eps, dtype = numbers.hyper.norm_eps, numbers.dtype
    projected = linear(rms_norm(token, tensors.enorm, eps), tensors.e_proj, dtype)
    hidden = linear(rms_norm(streams, tensors.hnorm, eps), tensors.h_proj, dtype)
    return projected.float()[:, None, :] + hidden.float()


def head_logits(
    streams: Tensor, hyper: HyperTensors, norm: Tensor, head: Tensor, numbers: Numbers
) -> Tensor:
    """Logits [T, V] float32 of streams [T, hc, D]."""
    pre = head_mix(streams, hyper.fn, hyper.base, hyper.scale, numbers.hyper)
    y = rms_norm(read_streams(streams, pre), norm, numbers.hyper.norm_eps)
    return functional.linear(y.float(), head)


def head_loss(
    streams: Tensor,
    hyper: HyperTensors,
    norm_and_head: tuple[Tensor, Tensor],
    numbers: Numbers,
    targets: Tensor,
    weights: Tensor,
) -> tuple[Tensor, Tensor]:
    """Weighted sum of the cross entropy, and how much of the weight was predicted right."""
    logits = head_logits(streams, hyper, *norm_and_head, numbers)
    right = (logits.detach().argmax(dim=-1) == targets) * weights
    return weighted_cross_entropy(logits, targets, weights), right.sum()


class Pieces:
    """The parts, compiled or not. A part that cannot be compiled runs as it is and is reported."""

    def __init__(self, mode: CompileMode = "off") -> None:
        self.mode = mode
        if mode == "auto":
            # One version per shape: the ratios, the phases' lengths, with and without gradient.
            torch._dynamo.config.recompile_limit = 64
        self.read_sublayer = self._piece(read_sublayer)
        self.write_sublayer = self._piece(write_sublayer)
        self.make_queries = self._piece(make_queries)
        self.make_rows = self._piece(make_rows)
        self.make_index_queries = self._piece(make_index_queries)
        self.attend = self._piece(attend)
        self.project_outputs = self._piece(project_outputs)
        self.route = self._piece(route)
        self.dense_experts = self._piece(dense_experts)
        self.shared_expert = self._piece(shared_expert)
        self.make_draft_streams = self._piece(make_draft_streams)
        self.head_loss = self._piece(head_loss)

    def _piece(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return function if self.mode == "off" else _CompiledPiece(function)


class _CompiledPiece:
    """A compiled function that becomes the plain one when compiling it fails."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._plain = function
        self._run: Callable[..., Any] = torch.compile(function, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._run is self._plain:
            return self._plain(*args, **kwargs)
        try:
            return self._run(*args, **kwargs)
        except torch.cuda.OutOfMemoryError:
            raise
        # Whatever the compiler raises, the function itself is right; it is announced once.
        except Exception:
            logger.warning("%s runs uncompiled", self._plain.__name__, exc_info=True)
            self._run = self._plain
            return self._plain(*args, **kwargs)

"""The reference network in its training form: whole batches, gradients, no cache.

Weights are leaf tensors under their official names; the routed experts of a layer are stacked as
`layers.N.ffn.experts.w1` [E, F, D]. With the same weights it computes what `edgedsv4.model` does
(tests hold the logits together). The indexer sees detached inputs, so that it learns from its own
loss only, and the trunk from the language model only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from edgedsv4.kernels.mhc import HyperConstants
from edgedsv4.kernels.rope import RopeTable, rope_frequencies, rope_table
from edgedsv4.model.layer_plan import LayerPlan, RopePlan, draft_plan, layer_plans
from pocket import fake_quant
from pocket.losses import sequence_balance
from pocket.pieces import (
    CompressorTensors,
    DraftTensors,
    HyperTensors,
    Numbers,
    Pieces,
    QueryTensors,
    head_logits,
)
from pocket.training_attention import (
    PADDED,
    Attended,
    CompressedRows,
    IndexFeatures,
    WindowRows,
    query_block,
    window_rows,
)
from pocket.training_moe import ExpertPath, ExpertStack, run_experts

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

Weights = Mapping[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Mode:
    """How a forward runs; nothing here is a weight."""

    dtype: torch.dtype = torch.float32
    """Of products; everything else is float32."""
    selection: Literal["dense", "sparse", "random"] = "sparse"
    """Attend to all visible compressed rows, to those that the indexer selects, or (to show that
    it matters) to as many drawn by lot."""
    is_quantised: bool = False
    """Round experts, rows and index keys as the shipped model stores them."""
    expert_path: ExpertPath = "loop"
    """How the experts are run."""
    query_block: int | None = None
    """Queries attended at once, recomputed in the backward pass; None takes all and keeps them."""


@dataclass
class Watched:
    """What a forward leaves beside its result, one entry per layer that has it."""

    divergences: list[Tensor] = field(default_factory=list)
    """Mean KL of each indexer, scalars."""
    loads: dict[int, Tensor] = field(default_factory=dict)
    """Layer -> tokens per expert [E]."""
    balances: list[Tensor] = field(default_factory=list)
    """Sequence balance of each layer routed by score, scalars."""


@dataclass(frozen=True)
class Sequences:
    """A batch on its way through the layers."""

    tokens: Tensor
    """[B, S] int64, S a multiple of the window."""
    documents: Tensor
    """[B, S] int32."""
    mode: Mode
    watched: Watched


class Network:
    """Trunk, head and MTP block of one model."""

    def __init__(self, config: ModelConfig, weights: Weights, pieces: Pieces | None = None) -> None:
        self.config = config
        self.weights = dict(weights)
        self.pieces = pieces or Pieces()
        self.plans = layer_plans(config)
        self.draft_plan = draft_plan(config)
        self._tables: dict[tuple[RopePlan, int, int, int], RopeTable] = {}

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.weights["embed.weight"].device

    def sequences(self, tokens: Tensor, mode: Mode, *, has_document_mask: bool = True) -> Sequences:
        """Pad a batch to whole chunks and find its documents.

        Args:
            tokens: [B, S] int64.
            mode: how to run.
            has_document_mask: a document starts at every BOS; else a row is one document.
        """
        documents = torch.zeros_like(tokens, dtype=torch.int32)
        if has_document_mask:
            documents = tokens.eq(self.config.bos_id or 0).cumsum(dim=1, dtype=torch.int32)
        padding = -tokens.shape[1] % self.config.window
        return Sequences(
            functional.pad(tokens, (0, padding), value=self.config.pad_id or 0),
            functional.pad(documents, (0, padding), value=PADDED),
            mode,
            Watched(),
        )

    def trunk(self, batch: Sequences) -> Tensor:
        """Streams after the last layer, [B * S, hc, D] float32."""
        embedded = functional.embedding(batch.tokens.flatten(), self.weights["embed.weight"])
        streams = embedded[:, None, :].expand(-1, self.config.hc_streams, -1)
        for plan in self.plans:
            streams = self._layer(streams, f"layers.{plan.layer}", plan, batch)
        return streams

    def draft(self, streams: Tensor, next_ids: Tensor, batch: Sequences) -> Tensor:
        """Streams of the MTP block, [B * S, hc, D].

        Args:
            streams: of the trunk, or of the block itself for a further step.
            next_ids: [B, S] int64, the token after each position.
            batch: the same sequences.
        """
        weights = self.weights
        token = functional.embedding(next_ids.flatten(), weights["embed.weight"])
        tensors = DraftTensors(
            enorm=weights["mtp.0.enorm.weight"],
            hnorm=weights["mtp.0.hnorm.weight"],
            e_proj=weights["mtp.0.e_proj.weight"],
            h_proj=weights["mtp.0.h_proj.weight"],
        )
        numbers = self._numbers(batch.mode.dtype)
        mixed = self.pieces.make_draft_streams(token, streams, tensors, numbers)
        return self._layer(mixed, "mtp.0", self.draft_plan, batch)

    def logits(self, streams: Tensor, *, is_draft: bool = False) -> Tensor:
        """Logits [T, V] float32 of streams [T, hc, D]."""
        hyper, norm_and_head = self._head(is_draft=is_draft)
        return head_logits(streams, hyper, *norm_and_head, self._numbers(torch.float32))

    def head_loss(
        self, streams: Tensor, targets: Tensor, weights: Tensor, *, is_draft: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Weighted sum of the cross entropy, and of the targets that got the largest logit.

        Args:
            streams: [T, hc, D].
            targets: [T] int64.
            weights: [T] float32.
            is_draft: use the MTP block's own mix and norm.
        """
        hyper, norm_and_head = self._head(is_draft=is_draft)
        loss, right = self.pieces.head_loss(
            streams, hyper, norm_and_head, self._numbers(torch.float32), targets, weights
        )
        return loss, right

    def _head(self, *, is_draft: bool) -> tuple[HyperTensors, tuple[Tensor, Tensor]]:
        place = "mtp.0." if is_draft else ""
        norm = self.weights[f"{place}norm.weight"]
        return self._hyper(f"{place}hc_head"), (norm, self.weights["head.weight"])

    def _layer(self, streams: Tensor, place: str, plan: LayerPlan, batch: Sequences) -> Tensor:
        pieces, weights, numbers = self.pieces, self.weights, self._numbers(batch.mode.dtype)
        hyper = self._hyper(f"{place}.hc_attn")
        norm = weights[f"{place}.attn_norm.weight"]
        x, post, comb = pieces.read_sublayer(streams, hyper, norm, numbers)
        output = self._attention(x, f"{place}.attn", plan, batch)
        streams = pieces.write_sublayer(streams, output, post, comb)
        hyper = self._hyper(f"{place}.hc_ffn")
        norm = weights[f"{place}.ffn_norm.weight"]
        x, post, comb = pieces.read_sublayer(streams, hyper, norm, numbers)
        output = self._moe(x, f"{place}.ffn", plan, batch)
        written: Tensor = pieces.write_sublayer(streams, output, post, comb)
        return written

    def _attention(self, x: Tensor, place: str, plan: LayerPlan, batch: Sequences) -> Tensor:
        weights, numbers = self.weights, self._numbers(batch.mode.dtype)
        size, length = batch.tokens.shape
        window = self.config.window
        chunks = (size, length // window, window)
        table = self._table(plan.rope, size, length, 1)
        tensors = QueryTensors(
            wq_a=weights[f"{place}.wq_a.weight"],
            q_norm=weights[f"{place}.q_norm.weight"],
            wq_b=weights[f"{place}.wq_b.weight"],
            wkv=weights[f"{place}.wkv.weight"],
            kv_norm=weights[f"{place}.kv_norm.weight"],
        )
        q, qr, kv = self.pieces.make_queries(x, tensors, table, numbers)
        if batch.mode.is_quantised:
            kv = fake_quant.fp8_rows(kv, self.config.rope_dim)
        keys = window_rows(kv.view(size, length, -1), batch.documents, window)
        compressed = self._compressed(x, f"{place}.compressor", plan, batch)
        index = None
        if compressed is not None and plan.index_source is not None:
            index = self._index(x.detach(), qr.detach(), f"{place}.indexer", plan, batch)
        attended = self._attend(
            q.view(*chunks, self.config.num_heads, -1),
            keys,
            weights[f"{place}.attn_sink"],
            (compressed, index),
            batch,
        )
        if index is not None:
            mean = attended.divergence / attended.rows.clamp(min=1)
            batch.watched.divergences.append(mean)
        projected: Tensor = self.pieces.project_outputs(
            attended.outputs.flatten(0, 2),
            weights[f"{place}.wo_a.weight"],
            weights[f"{place}.wo_b.weight"],
            table,
            numbers,
        )
        return projected

    def _attend(
        self,
        q: Tensor,
        keys: WindowRows,
        sink: Tensor,
        far: tuple[CompressedRows | None, IndexFeatures | None],
        batch: Sequences,
    ) -> Attended:
        compressed, index = far
        window = self.config.window
        documents = batch.documents.view(q.shape[:3])
        block = batch.mode.query_block
        if block is None or block >= q.shape[1] * window:
            whole: Attended = self.pieces.attend(q, documents, keys, sink, compressed, index)
            return whole
        parts: list[Attended] = []
        step = max(1, block // window)
        for start in range(0, q.shape[1], step):
            part = slice(start, start + step)
            attended = checkpoint(
                self.pieces.attend,
                q[:, part],
                documents[:, part],
                WindowRows(keys.keys[:, part], keys.documents[:, part], start * window),
                sink,
                compressed,
                query_block(index, part),
                use_reentrant=False,
            )
            parts.append(attended)
        return Attended(
            torch.cat([part.outputs for part in parts], dim=1),
            torch.stack([part.divergence for part in parts]).sum(),
            torch.stack([part.rows for part in parts]).sum(),
        )

    def _compressed(
        self, x: Tensor, place: str, plan: LayerPlan, batch: Sequences
    ) -> CompressedRows | None:
        count = plan.visible_rows(batch.tokens.shape[1])
        if not count:
            return None
        rows = self._rows(x, place, plan, batch)
        if batch.mode.is_quantised:
            rows = fake_quant.fp8_rows(rows, self.config.rope_dim)
        last = batch.documents[:, plan.ratio - 1 :: plan.ratio][:, :count]
        return CompressedRows(rows, last, plan.ratio)

    def _rows(self, x: Tensor, place: str, plan: LayerPlan, batch: Sequences) -> Tensor:
        """Compressed rows [B, n, c] of a compressor."""
        size, length = batch.tokens.shape
        count = plan.visible_rows(length)
        tensors = CompressorTensors(
            wkv=self.weights[f"{place}.wkv.weight"],
            wgate=self.weights[f"{place}.wgate.weight"],
            ape=self.weights[f"{place}.ape"],
            norm=self.weights[f"{place}.norm.weight"],
        )
        used = x.view(size, length, -1)[:, : count * plan.ratio]
        table = self._table(plan.rope, size, count, plan.ratio)
        own = own_tokens(batch.documents[:, : count * plan.ratio], plan)
        rows: Tensor = self.pieces.make_rows(
            used, tensors, table, own, self._numbers(batch.mode.dtype)
        )
        return rows

    def _index(
        self, x: Tensor, qr: Tensor, place: str, plan: LayerPlan, batch: Sequences
    ) -> IndexFeatures:
        size, length = batch.tokens.shape
        table = self._table(plan.rope, size, length, 1)
        matrices = (
            self.weights[f"{place}.wq_b.weight"],
            self.weights[f"{place}.weights_proj.weight"],
        )
        queries, weights = self.pieces.make_index_queries(
            x, qr, matrices, table, self._numbers(batch.mode.dtype)
        )
        keys = self._rows(x, f"{place}.compressor", plan, batch)
        if batch.mode.is_quantised:
            queries, keys = fake_quant.fp4_index(queries), fake_quant.fp4_index(keys)
        if batch.mode.selection == "random":
            queries, keys = torch.randn_like(queries), torch.randn_like(keys)
        chunks = (size, length // self.config.window, self.config.window, self.config.index_heads)
        return IndexFeatures(
            queries=queries.view(*chunks, -1),
            keys=keys,
            weights=weights.view(chunks),
            topk=self.config.index_topk,
            is_sparse=batch.mode.selection != "dense",
        )

    def _moe(self, x: Tensor, place: str, plan: LayerPlan, batch: Sequences) -> Tensor:
        weights, mode, config = self.weights, batch.mode, self.config
        selection = weights.get(f"{place}.gate.bias")
        if selection is None:
            selection = weights[f"{place}.gate.tid2eid"][batch.tokens.flatten()]
        routing = self.pieces.route(
            x,
            weights[f"{place}.gate.weight"],
            selection,
            config.experts_per_token,
            config.routed_scale,
        )
        stack = self._experts(place, plan, mode)
        if mode.expert_path == "dense":
            gates = torch.zeros_like(routing.scores).scatter(1, routing.ids, routing.factors)
            output = self.pieces.dense_experts(x.to(mode.dtype), gates, stack)
        else:
            output = run_experts(x, routing, stack, mode.expert_path, mode.dtype)
        batch.watched.loads[plan.layer] = routing.chosen.sum(dim=0)
        if not plan.is_hash_routed:
            mean = sequence_balance(routing.scores, routing.chosen, batch.tokens.shape[0])
            batch.watched.balances.append(mean / batch.tokens.shape[0])
        if config.num_shared_experts:
            shared = f"{place}.shared_experts"
            matrices = tuple(weights[f"{shared}.{part}.weight"] for part in ("w1", "w3", "w2"))
            limit = plan.shared_swiglu_limit
            output = output + self.pieces.shared_expert(x, matrices, limit, mode.dtype)
        result: Tensor = output
        return result

    def _experts(self, place: str, plan: LayerPlan, mode: Mode) -> ExpertStack:
        w1, w3, w2 = (self.weights[f"{place}.experts.{part}"] for part in ("w1", "w3", "w2"))
        if mode.is_quantised:
            w1, w3, w2 = (fake_quant.fp4_weights(stack) for stack in (w1, w3, w2))
        return ExpertStack(w1, w3, w2, plan.swiglu_limit)

    def _hyper(self, place: str) -> HyperTensors:
        return HyperTensors(*(self.weights[f"{place}_{part}"] for part in ("fn", "base", "scale")))

    def _numbers(self, dtype: torch.dtype) -> Numbers:
        config = self.config
        hyper = HyperConstants(config.hc_sinkhorn_iterations, config.hc_eps, config.rms_norm_eps)
        return Numbers(hyper, config.num_heads, config.output_groups, config.index_heads, dtype)

    def _table(self, rope: RopePlan, sequences: int, count: int, stride: int) -> RopeTable:
        """Rotation of positions 0, stride, ... of `count` rows, repeated for every sequence."""
        key = (rope, sequences, count, stride)
        if key not in self._tables:
            frequencies = rope_frequencies(self.config.rope_dim, rope.theta, rope.scaling)
            positions = torch.arange(count, device=self.device) * stride
            table = rope_table(positions, frequencies.to(self.device), torch.float32)
            self._tables[key] = RopeTable(
                table.cos.repeat(sequences, 1), table.sin.repeat(sequences, 1)
            )
        return self._tables[key]


def own_tokens(documents: Tensor, plan: LayerPlan) -> Tensor:
    """Which tokens belong to the document of the compressed row they are pooled into.

    Args:
        documents: [B, n * m] int32.
        plan: of the layer.

    Returns:
        [B, n, m, series] bool. With overlap, series A of a window goes into the next window's row.
    """
    windows = documents.view(documents.shape[0], -1, plan.ratio)
    last = windows[..., -1:]
    current = windows == last
    if not plan.has_overlap:
        return current[..., None]
    following = torch.cat((last[:, 1:], last[:, -1:]), dim=1)
    return torch.stack((windows == following, current), dim=-1)

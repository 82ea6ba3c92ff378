"""A `Model` straight from arrays, without a file in between, and the ways tests run it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quant_matmul import QuantMatrix
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.model import Model
from edgedsv4.model.native_model import NativeModel
from edgedsv4.model.weights import (
    AttentionWeights,
    CompressorWeights,
    DraftWeights,
    ExpertWeights,
    HyperWeights,
    IndexerWeights,
    LayerWeights,
    ModelWeights,
    MoeWeights,
)

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, Profile
    from edgedsv4.model.hooks import ForwardHooks
    from edgedsv4.model.kv_cache import KvCache
    from edgedsv4.model.moe import ExpertSource

BACKENDS = ("reference", "native")

Tensors = Mapping[str, np.ndarray]


def matrix(array: np.ndarray) -> QuantMatrix:
    """An F32 matrix record of [rows, columns] values."""
    values = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))
    rows, columns = values.shape
    data = values.view(torch.uint8)
    return QuantMatrix(BLOCK_TYPES["F32"], rows, columns, data, None)


class ArrayExperts:
    """Routed experts held as arrays; records which were fetched."""

    def __init__(self, config: ModelConfig, tensors: Tensors) -> None:
        blocks = [f"layers.{i}" for i in range(config.num_layers)]
        blocks += [f"mtp.{i}" for i in range(config.num_draft_layers)]
        self._experts = [
            [
                ExpertWeights(
                    **{p: matrix(tensors[f"{b}.ffn.experts.{e}.{p}.weight"]) for p in _PARTS}
                )
                for e in range(config.num_experts)
            ]
            for b in blocks
        ]

    is_resident = True

    def check_unchanged(self) -> None:
        """There is no file."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Weights of some experts of one layer; the draft block comes after the last layer."""
        return [self._experts[layer][expert] for expert in expert_ids]


_PARTS = ("w1", "w3", "w2")


class _Reader:
    """Tensors below one name, as weight records."""

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self._tensors, self._prefix = tensors, prefix

    def has(self, name: str) -> bool:
        return self._prefix + name in self._tensors

    def matrix(self, name: str) -> QuantMatrix:
        return matrix(self._tensors[f"{self._prefix}{name}.weight"])

    def vector(self, name: str) -> torch.Tensor:
        return torch.from_numpy(np.asarray(self._tensors[self._prefix + name], dtype=np.float32))

    def norm(self, name: str) -> torch.Tensor:
        return self.vector(f"{name}.weight")

    def hyper(self, name: str) -> HyperWeights:
        return HyperWeights(*(self.vector(f"{name}_{part}") for part in ("fn", "base", "scale")))

    def compressor(self, name: str) -> CompressorWeights:
        return CompressorWeights(
            wkv=self.matrix(f"{name}.wkv"),
            wgate=self.matrix(f"{name}.wgate"),
            ape=self.vector(f"{name}.ape"),
            norm=self.norm(f"{name}.norm"),
        )

    def indexer(self) -> IndexerWeights:
        return IndexerWeights(
            wq_b=self.matrix("attn.indexer.wq_b"),
            weights_proj=self.matrix("attn.indexer.weights_proj"),
            compressor=self.compressor("attn.indexer.compressor"),
        )

    def attention(self) -> AttentionWeights:
        matrices = {n: self.matrix(f"attn.{n}") for n in ("wq_a", "wq_b", "wkv", "wo_a", "wo_b")}
        has_compressor = self.has("attn.compressor.ape")
        return AttentionWeights(
            **matrices,
            q_norm=self.norm("attn.q_norm"),
            kv_norm=self.norm("attn.kv_norm"),
            sink=self.vector("attn.attn_sink"),
            compressor=self.compressor("attn.compressor") if has_compressor else None,
            indexer=self.indexer() if self.has("attn.indexer.wq_b.weight") else None,
        )

    def moe(self) -> MoeWeights:
        table = self._tensors.get(f"{self._prefix}ffn.gate.tid2eid")
        shared = "ffn.shared_experts"
        return MoeWeights(
            router=self.matrix("ffn.gate"),
            bias=self.vector("ffn.gate.bias") if self.has("ffn.gate.bias") else None,
            expert_table=None if table is None else torch.from_numpy(table),
            shared_w1=self.matrix(f"{shared}.w1"),
            shared_w2=self.matrix(f"{shared}.w2"),
            shared_w3=self.matrix(f"{shared}.w3"),
        )

    def layer(self) -> LayerWeights:
        return LayerWeights(
            attn_norm=self.norm("attn_norm"),
            ffn_norm=self.norm("ffn_norm"),
            hc_attn=self.hyper("hc_attn"),
            hc_ffn=self.hyper("hc_ffn"),
            attention=self.attention(),
            moe=self.moe(),
        )

    def draft(self) -> DraftWeights:
        return DraftWeights(
            e_proj=self.matrix("e_proj"),
            h_proj=self.matrix("h_proj"),
            enorm=self.norm("enorm"),
            hnorm=self.norm("hnorm"),
            norm=self.norm("norm"),
            hc_head=self.hyper("hc_head"),
            layer=self.layer(),
        )


def model_of(
    config: ModelConfig,
    tensors: Tensors,
    *,
    profile: Profile = "exact",
    dtype: torch.dtype = torch.float32,
    backend: str = "reference",
) -> Model:
    """A CPU model that computes with exactly these values.

    Args:
        config: shape of the model.
        tensors: official name -> array.
        profile: how the timeline stores its rows.
        dtype: compute type.
        backend: one of `BACKENDS`.
    """
    root = _Reader(tensors, "")
    weights = ModelWeights(
        embed=root.matrix("embed"),
        norm=root.norm("norm"),
        head=root.matrix("head"),
        hc_head=root.hyper("hc_head"),
        layers=tuple(_Reader(tensors, f"layers.{i}.").layer() for i in range(config.num_layers)),
        draft=_Reader(tensors, "mtp.0.").draft() if config.num_draft_layers else None,
    )
    experts = ArrayExperts(config, tensors)
    numerics = Numerics(profile=profile, dtype=dtype, device=torch.device("cpu"))
    return computed_by(backend, config, weights, experts, numerics)


def computed_by(
    backend: str,
    config: ModelConfig,
    weights: ModelWeights,
    experts: ExpertSource,
    numerics: Numerics,
) -> Model:
    """The same weights under either backend."""
    kind = NativeModel if backend == "native" else Model
    return kind(config, weights, experts, numerics)


def ids_tensor(token_ids: Iterable[int] | np.ndarray) -> torch.Tensor:
    """Token ids as the model takes them, [T] int64."""
    return torch.from_numpy(np.asarray(token_ids, dtype=np.int64))


def chunk_sizes(count: int, chunk: int) -> list[int]:
    """`count` tokens in chunks of `chunk`; the last may be shorter."""
    return [min(chunk, count - first) for first in range(0, count, chunk)]


def evaluate(
    model: Model,
    token_ids: np.ndarray,
    *,
    cache: KvCache | None = None,
    sizes: Sequence[int] | None = None,
    hooks: ForwardHooks | None = None,
) -> torch.Tensor:
    """Logits of all positions, [T, V].

    Args:
        model: what to run.
        token_ids: [T].
        cache: timeline to continue; None makes one.
        sizes: chunk lengths; None evaluates everything at once.
        hooks: passed on to every forward.
    """
    ids = ids_tensor(token_ids)
    timeline = cache if cache is not None else model.new_cache(len(ids))
    pieces = ids.split(list(sizes) if sizes is not None else [len(ids)])
    results = [model.forward(p, timeline, logits="all", hooks=hooks).logits for p in pieces]
    return torch.cat([logits for logits in results if logits is not None])


def state_of(model: Model, cache: KvCache) -> dict[str, torch.Tensor]:
    """Everything a timeline could still read, by name: compressed rows, index keys and ring rows.

    Ring rows are those that evaluating the next token, or the last one again, would read.
    """
    state: dict[str, torch.Tensor] = {}
    for index, layer in cache.layers.items():
        parts: list[tuple[str, Any]] = [
            ("compressor", layer.compressor),
            ("indexer", layer.indexer),
        ]
        for name, part in parts:
            if part is None:
                continue
            count = model.plans[index].visible_rows(cache.length)
            for place, stored in enumerate(part.rows.stored(count)):
                state[f"layer {index} {name} rows[{place}]"] = stored.clone()
        for place, ring in enumerate(layer.rings()):
            first = layer.first_needed(ring, max(0, cache.length - 1))
            for item, stored in enumerate(ring.stored(first, cache.length)):
                state[f"layer {index} ring {place}[{item}]"] = stored
    return state

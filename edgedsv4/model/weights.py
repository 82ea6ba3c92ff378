"""The weights of one model as the forward sees them: matrices as stored, small parameters in float32.

Every shape and type has been checked (`weight_table`) before a record of this module exists. Matrices are `QuantMatrix`
views of the mapped file, so loading copies only norms, biases and other vectors.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from edgedsv4.kernels.quant_matmul import QuantMatrix


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Hyper-connection parameters of one sublayer, or of a head; all float32."""

    fn: Tensor
    """[(2 + hc) * hc, hc * D] for a sublayer (pre, post, comb rows), [hc, hc * D] for a head."""
    base: Tensor
    """[(2 + hc) * hc], or [hc] for a head."""
    scale: Tensor
    """[3], or [1] for a head."""


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Pools m tokens into one row of width c; coff is 2 (overlapping windows) for m = 4, else 1."""

    wkv: QuantMatrix
    """[coff * c, D]."""
    wgate: QuantMatrix
    """[coff * c, D]."""
    ape: Tensor
    """[m, coff * c] float32, added to the gate by position within the window."""
    norm: Tensor
    """[c] float32."""


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The lightning indexer of a ratio-4 layer."""

    wq_b: QuantMatrix
    """[index_heads * index_dim, Rq]."""
    weights_proj: QuantMatrix
    """[index_heads, D]."""
    compressor: CompressorWeights
    """The indexer's own compressor, c = index_dim."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention of one layer."""

    wq_a: QuantMatrix
    """[Rq, D]."""
    q_norm: Tensor
    """[Rq] float32."""
    wq_b: QuantMatrix
    """[H * d, Rq]."""
    wkv: QuantMatrix
    """[d, D]."""
    kv_norm: Tensor
    """[d] float32."""
    sink: Tensor
    """[H] float32, a raw logit per head."""
    wo_a: QuantMatrix
    """[G * Ro, (H / G) * d]; rows [g * Ro, (g + 1) * Ro) act on head group g only."""
    wo_b: QuantMatrix
    """[D, G * Ro]."""
    compressor: CompressorWeights | None
    """None where the ratio is 0."""
    indexer: IndexerWeights | None
    """None unless the ratio is 4."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and shared expert of one layer; the routed experts are in `RoutedExperts`."""

    router: QuantMatrix
    """[E, D]."""
    bias: Tensor | None
    """[E] float32, used for the selection only; None on hash layers."""
    expert_table: Tensor | None
    """[V, k] int64, expert ids by token id; None on layers that select by score."""
    shared_w1: QuantMatrix | None
    """[num_shared_experts * F, D]; the three are None in a model without a shared expert."""
    shared_w2: QuantMatrix | None
    """[D, num_shared_experts * F]."""
    shared_w3: QuantMatrix | None
    """[num_shared_experts * F, D]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: Tensor
    """[D] float32."""
    ffn_norm: Tensor
    """[D] float32."""
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The MTP block: a window-only layer fed with the main model's streams and the next token's embedding."""

    e_proj: QuantMatrix
    """[D, D], applied to the normalised embedding."""
    h_proj: QuantMatrix
    """[D, D], applied to each normalised stream."""
    enorm: Tensor
    """[D] float32."""
    hnorm: Tensor
    """[D] float32."""
    norm: Tensor
    """[D] float32, before the (shared) head."""
    hc_head: HyperWeights
    """The block's own head mix, not the main model's."""
    layer: LayerWeights
    """Its routed experts are layer index L of `RoutedExperts`."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything but the routed experts."""

    embed: QuantMatrix
    """[V, D]."""
    norm: Tensor
    """[D] float32."""
    head: QuantMatrix
    """[V, D]."""
    hc_head: HyperWeights
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None
    """None when the file holds no MTP block."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert: w2(silu(w1 x) * w3 x)."""

    w1: QuantMatrix
    """[F, D], the gate."""
    w3: QuantMatrix
    """[F, D], the up projection."""
    w2: QuantMatrix
    """[D, F], the down projection."""

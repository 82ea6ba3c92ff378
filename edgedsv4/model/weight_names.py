"""The table of weights: role -> names in every dialect, dims, kind, and the layers that have it.

A role is the weight's place in the network, spelled like the official checkpoint. GGUF stems come
without `.weight`, because early files lack that suffix; official and transformers names are whole.
Names of a layer come without the layer's prefix. Dims are written as expressions that `dimensions`
evaluates, so that a message can show them.

Source: the DeepSeek-V4 checkpoints and their reference code; llama.cpp `src/models/deepseek4.cpp`;
the weight conversion mapping of transformers 5; antirez/ds4 for `mtp.0.*` inside GGUF.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig


class Kind(Enum):
    """What a weight is used as, which decides the storage types it may have."""

    MATRIX = "matrix"
    """Multiplied as stored; any block type."""
    PARAMETER = "parameter"
    """Small, turned into float32 at load; a vector must be of a float type."""
    TABLE = "table"
    """Integers, int32 or int64."""


@dataclass(frozen=True, slots=True)
class LayerTraits:
    """What decides which weights a layer has."""

    ratio: int
    """Tokens per compressed row, 0 for none."""
    is_hash: bool
    """Experts follow from the token id."""
    has_shared: bool
    """There is a shared expert."""

    @classmethod
    def of(cls, config: ModelConfig, layer: int) -> LayerTraits:
        """Traits of one layer; index `num_layers` is the MTP block."""
        if layer == config.num_layers:
            return cls(ratio=0, is_hash=False, has_shared=config.num_shared_experts > 0)
        return cls(
            ratio=config.compress_ratios[layer],
            is_hash=layer < config.num_hash_layers,
            has_shared=config.num_shared_experts > 0,
        )


@dataclass(frozen=True, slots=True)
class FusedPart:
    """A weight that may also be stored as rows of a larger matrix."""

    gguf: str | None
    official: str
    """Whole name."""
    dims: tuple[str, ...]
    """Rows of every part of the larger matrix, in order."""
    index: int
    """Which part this weight is."""


@dataclass(frozen=True, slots=True)
class WeightRow:
    """One line of the table."""

    role: str
    dims: tuple[str, ...]
    """Row-major, outputs first."""
    gguf: str
    official: str
    transformers: str
    kind: Kind = Kind.MATRIX
    fused: FusedPart | None = None
    present: Callable[[LayerTraits], bool] = lambda _: True


_P = Kind.PARAMETER


def _is_compressed(traits: LayerTraits) -> bool:
    return traits.ratio != 0


def _is_indexed(traits: LayerTraits) -> bool:
    return traits.ratio == 4


def _is_hash(traits: LayerTraits) -> bool:
    return traits.is_hash


def _has_bias(traits: LayerTraits) -> bool:
    return not traits.is_hash


def _has_shared(traits: LayerTraits) -> bool:
    return traits.has_shared


ROOT_ROWS: Final = (
    WeightRow(
        "embed",
        ("vocab_size", "hidden_size"),
        "token_embd",
        "embed.weight",
        "model.embed_tokens.weight",
    ),
    WeightRow("norm", ("hidden_size",), "output_norm", "norm.weight", "model.norm.weight", _P),
    WeightRow("head", ("vocab_size", "hidden_size"), "output", "head.weight", "lm_head.weight"),
    WeightRow(
        "hc_head_fn",
        ("hc_streams", "hc_streams * hidden_size"),
        "output_hc_fn",
        "hc_head_fn",
        "model.hc_head.hc_fn",
        _P,
    ),
    WeightRow(
        "hc_head_base",
        ("hc_streams",),
        "output_hc_base",
        "hc_head_base",
        "model.hc_head.hc_base",
        _P,
    ),
    WeightRow(
        "hc_head_scale", ("1",), "output_hc_scale", "hc_head_scale", "model.hc_head.hc_scale", _P
    ),
)


def _hyper(site: str, transformers: str) -> tuple[WeightRow, ...]:
    return (
        WeightRow(
            f"{site}_fn",
            ("hc_rows", "hc_streams * hidden_size"),
            f"{site}_fn",
            f"{site}_fn",
            f"{transformers}.fn",
            _P,
        ),
        WeightRow(
            f"{site}_base", ("hc_rows",), f"{site}_base", f"{site}_base", f"{transformers}.base", _P
        ),
        WeightRow(
            f"{site}_scale", ("3",), f"{site}_scale", f"{site}_scale", f"{transformers}.scale", _P
        ),
    )


_QKV = ("q_lora_rank", "head_dim")
_ATTENTION = (
    WeightRow(
        "attn.wq_a",
        ("q_lora_rank", "hidden_size"),
        "attn_q_a",
        "attn.wq_a.weight",
        "self_attn.q_a_proj.weight",
        fused=FusedPart(None, "attn.wqkv_a.weight", _QKV, 0),
    ),
    WeightRow(
        "attn.q_norm",
        ("q_lora_rank",),
        "attn_q_a_norm",
        "attn.q_norm.weight",
        "self_attn.q_a_norm.weight",
        _P,
    ),
    WeightRow(
        "attn.wq_b",
        ("num_heads * head_dim", "q_lora_rank"),
        "attn_q_b",
        "attn.wq_b.weight",
        "self_attn.q_b_proj.weight",
    ),
    WeightRow(
        "attn.wkv",
        ("head_dim", "hidden_size"),
        "attn_kv",
        "attn.wkv.weight",
        "self_attn.kv_proj.weight",
        fused=FusedPart(None, "attn.wqkv_a.weight", _QKV, 1),
    ),
    WeightRow(
        "attn.kv_norm",
        ("head_dim",),
        "attn_kv_a_norm",
        "attn.kv_norm.weight",
        "self_attn.kv_norm.weight",
        _P,
    ),
    WeightRow(
        "attn.attn_sink", ("num_heads",), "attn_sinks", "attn.attn_sink", "self_attn.sinks", _P
    ),
    WeightRow(
        "attn.wo_a",
        ("output_groups * output_lora_rank", "num_heads / output_groups * head_dim"),
        "attn_output_a",
        "attn.wo_a.weight",
        "self_attn.o_a_proj.weight",
    ),
    WeightRow(
        "attn.wo_b",
        ("hidden_size", "output_groups * output_lora_rank"),
        "attn_output_b",
        "attn.wo_b.weight",
        "self_attn.o_b_proj.weight",
    ),
)


def _compressor(
    role: str, gguf: str, transformers: str, width: str, present: Callable[[LayerTraits], bool]
) -> tuple[WeightRow, ...]:
    rows = f"windows * {width}"
    fused = f"{role}.wkv_gate.weight"
    return (
        WeightRow(
            f"{role}.wkv",
            (rows, "hidden_size"),
            f"{gguf}_kv",
            f"{role}.wkv.weight",
            f"{transformers}.kv_proj.weight",
            fused=FusedPart(None, fused, (rows, rows), 0),
            present=present,
        ),
        WeightRow(
            f"{role}.wgate",
            (rows, "hidden_size"),
            f"{gguf}_gate",
            f"{role}.wgate.weight",
            f"{transformers}.gate_proj.weight",
            fused=FusedPart(None, fused, (rows, rows), 1),
            present=present,
        ),
        WeightRow(
            f"{role}.ape",
            ("compress_ratio", rows),
            f"{gguf}_ape",
            f"{role}.ape",
            f"{transformers}.position_bias",
            _P,
            present=present,
        ),
        WeightRow(
            f"{role}.norm",
            (width,),
            f"{gguf}_norm",
            f"{role}.norm.weight",
            f"{transformers}.kv_norm.weight",
            _P,
            present=present,
        ),
    )


_INDEXER = (
    WeightRow(
        "attn.indexer.wq_b",
        ("index_heads * index_dim", "q_lora_rank"),
        "indexer.attn_q_b",
        "attn.indexer.wq_b.weight",
        "self_attn.compressor.indexer.q_b_proj.weight",
        present=_is_indexed,
    ),
    WeightRow(
        "attn.indexer.weights_proj",
        ("index_heads", "hidden_size"),
        "indexer.proj",
        "attn.indexer.weights_proj.weight",
        "self_attn.compressor.indexer.scorer.weights_proj.weight",
        present=_is_indexed,
    ),
)


_GATE_UP = ("num_shared_experts * expert_width",) * 2
_MOE = (
    WeightRow(
        "ffn.gate",
        ("num_experts", "hidden_size"),
        "ffn_gate_inp",
        "ffn.gate.weight",
        "mlp.gate.weight",
    ),
    WeightRow(
        "ffn.gate.bias",
        ("num_experts",),
        "exp_probs_b",
        "ffn.gate.bias",
        "mlp.gate.e_score_correction_bias",
        _P,
        present=_has_bias,
    ),
    WeightRow(
        "ffn.gate.tid2eid",
        ("vocab_size", "experts_per_token"),
        "ffn_gate_tid2eid",
        "ffn.gate.tid2eid",
        "mlp.gate.tid2eid",
        Kind.TABLE,
        present=_is_hash,
    ),
    WeightRow(
        "ffn.shared_experts.w1",
        ("num_shared_experts * expert_width", "hidden_size"),
        "ffn_gate_shexp",
        "ffn.shared_experts.w1.weight",
        "mlp.shared_experts.gate_proj.weight",
        fused=FusedPart(None, "ffn.shared_experts.gate_up.weight", _GATE_UP, 0),
        present=_has_shared,
    ),
    WeightRow(
        "ffn.shared_experts.w3",
        ("num_shared_experts * expert_width", "hidden_size"),
        "ffn_up_shexp",
        "ffn.shared_experts.w3.weight",
        "mlp.shared_experts.up_proj.weight",
        fused=FusedPart(None, "ffn.shared_experts.gate_up.weight", _GATE_UP, 1),
        present=_has_shared,
    ),
    WeightRow(
        "ffn.shared_experts.w2",
        ("hidden_size", "num_shared_experts * expert_width"),
        "ffn_down_shexp",
        "ffn.shared_experts.w2.weight",
        "mlp.shared_experts.down_proj.weight",
        present=_has_shared,
    ),
)

LAYER_ROWS: Final = (
    WeightRow(
        "attn_norm", ("hidden_size",), "attn_norm", "attn_norm.weight", "input_layernorm.weight", _P
    ),
    WeightRow(
        "ffn_norm",
        ("hidden_size",),
        "ffn_norm",
        "ffn_norm.weight",
        "post_attention_layernorm.weight",
        _P,
    ),
    *_hyper("hc_attn", "attn_hc"),
    *_hyper("hc_ffn", "ffn_hc"),
    *_ATTENTION,
    *_compressor(
        "attn.compressor", "attn_compressor", "self_attn.compressor", "head_dim", _is_compressed
    ),
    *_INDEXER,
    *_compressor(
        "attn.indexer.compressor",
        "indexer_compressor",
        "self_attn.compressor.indexer",
        "index_dim",
        _is_indexed,
    ),
    *_MOE,
)

EXPERT_ROWS: Final = (
    WeightRow(
        "w1",
        ("expert_width", "hidden_size"),
        "ffn_gate_exps",
        "w1.weight",
        "gate_up_proj",
        fused=FusedPart("ffn_gate_up_exps", "gate_up.weight", ("expert_width",) * 2, 0),
    ),
    WeightRow(
        "w3",
        ("expert_width", "hidden_size"),
        "ffn_up_exps",
        "w3.weight",
        "gate_up_proj",
        fused=FusedPart("ffn_gate_up_exps", "gate_up.weight", ("expert_width",) * 2, 1),
    ),
    WeightRow("w2", ("hidden_size", "expert_width"), "ffn_down_exps", "w2.weight", "down_proj"),
)
"""Matrices of one routed expert; GGUF stacks all experts in one tensor."""

DRAFT_ROWS: Final = (
    WeightRow("e_proj", ("hidden_size", "hidden_size"), "nextn.e_proj", "e_proj.weight", ""),
    WeightRow("h_proj", ("hidden_size", "hidden_size"), "nextn.h_proj", "h_proj.weight", ""),
    WeightRow("enorm", ("hidden_size",), "nextn.enorm", "enorm.weight", "", _P),
    WeightRow("hnorm", ("hidden_size",), "nextn.hnorm", "hnorm.weight", "", _P),
    WeightRow("norm", ("hidden_size",), "nextn.shared_head_norm", "norm.weight", "", _P),
    WeightRow(
        "hc_head_fn",
        ("hc_streams", "hc_streams * hidden_size"),
        "nextn.hc_head_fn",
        "hc_head_fn",
        "",
        _P,
    ),
    WeightRow("hc_head_base", ("hc_streams",), "nextn.hc_head_base", "hc_head_base", "", _P),
    WeightRow("hc_head_scale", ("1",), "nextn.hc_head_scale", "hc_head_scale", "", _P),
)
"""What the MTP block has besides a layer, the two projections first. `nextn.hc_head_*` is the name
under which `attach_draft` lists a sidecar's `output_hc_*`, so that they cannot be taken for the
main model's."""

DRAFT_JOINED: Final = "nextn.eh_proj"
"""GGUF stem of [e_proj | h_proj], joined on the input dim."""


def dimensions(config: ModelConfig, ratio: int) -> Mapping[str, int]:
    """Value of every dim expression of the table, for a layer of this ratio."""
    windows = 2 if ratio == 4 else 1
    inner = config.output_groups * config.output_lora_rank
    return {
        "1": 1,
        "3": 3,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "hc_streams": config.hc_streams,
        "hc_rows": config.hc_rows,
        "hc_streams * hidden_size": config.hc_streams * config.hidden_size,
        "num_heads": config.num_heads,
        "num_heads * head_dim": config.num_heads * config.head_dim,
        "num_heads / output_groups * head_dim": config.group_width,
        "head_dim": config.head_dim,
        "q_lora_rank": config.q_lora_rank,
        "output_groups * output_lora_rank": inner,
        "compress_ratio": ratio,
        "windows * head_dim": windows * config.head_dim,
        "windows * index_dim": windows * config.index_dim,
        "index_dim": config.index_dim,
        "index_heads": config.index_heads,
        "index_heads * index_dim": config.index_heads * config.index_dim,
        "num_experts": config.num_experts,
        "experts_per_token": config.experts_per_token,
        "expert_width": config.expert_width,
        "num_shared_experts * expert_width": config.num_shared_experts * config.expert_width,
    }

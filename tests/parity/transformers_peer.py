"""The same random model in `transformers`, as an independent opinion on logits and on every
selection.

`Peer` loads official tensors into `DeepseekV4ForCausalLM` and runs one float32 prefill with eager
attention. It records what was selected, and by which scores, so that a near tie can be told from
a mistake.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
from transformers.models.deepseek_v4 import modeling_deepseek_v4

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

_LAYER_TYPES = {
    0: "sliding_attention",
    4: "compressed_sparse_attention",
    128: "heavily_compressed_attention",
}

_ROOT_NAMES = {
    "embed.weight": "model.embed_tokens.weight",
    "head.weight": "lm_head.weight",
    "norm.weight": "model.norm.weight",
    "hc_head_fn": "model.hc_head.hc_fn",
    "hc_head_base": "model.hc_head.hc_base",
    "hc_head_scale": "model.hc_head.hc_scale",
}

_COMPRESSOR_NAMES = {
    "wkv.weight": "kv_proj.weight",
    "wgate.weight": "gate_proj.weight",
    "ape": "position_bias",
    "norm.weight": "kv_norm.weight",
}

_LAYER_NAMES = {
    "attn_norm.weight": "input_layernorm.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    **{f"hc_attn_{part}": f"attn_hc.{part}" for part in ("fn", "base", "scale")},
    **{f"hc_ffn_{part}": f"ffn_hc.{part}" for part in ("fn", "base", "scale")},
    "attn.attn_sink": "self_attn.sinks",
    "attn.wq_a.weight": "self_attn.q_a_proj.weight",
    "attn.q_norm.weight": "self_attn.q_a_norm.weight",
    "attn.wq_b.weight": "self_attn.q_b_proj.weight",
    "attn.wkv.weight": "self_attn.kv_proj.weight",
    "attn.kv_norm.weight": "self_attn.kv_norm.weight",
    "attn.wo_a.weight": "self_attn.o_a_proj.weight",
    "attn.wo_b.weight": "self_attn.o_b_proj.weight",
    **{f"attn.compressor.{a}": f"self_attn.compressor.{b}" for a, b in _COMPRESSOR_NAMES.items()},
    "attn.indexer.wq_b.weight": "self_attn.compressor.indexer.q_b_proj.weight",
    "attn.indexer.weights_proj.weight": "self_attn.compressor.indexer.scorer.weights_proj.weight",
    **{
        f"attn.indexer.compressor.{a}": f"self_attn.compressor.indexer.{b}"
        for a, b in _COMPRESSOR_NAMES.items()
    },
    "ffn.gate.weight": "mlp.gate.weight",
    "ffn.gate.bias": "mlp.gate.e_score_correction_bias",
    "ffn.gate.tid2eid": "mlp.gate.tid2eid",
    "ffn.shared_experts.w1.weight": "mlp.shared_experts.gate_proj.weight",
    "ffn.shared_experts.w3.weight": "mlp.shared_experts.up_proj.weight",
    "ffn.shared_experts.w2.weight": "mlp.shared_experts.down_proj.weight",
}


def peer_config(config: ModelConfig) -> DeepseekV4Config:
    """The `transformers` configuration of the same model."""
    # transformers truncates head_dim * factor; the half keeps the quotient from falling short.
    factor = (config.rope_dim + 0.5) / config.head_dim
    main = {
        "rope_type": "default",
        "rope_theta": config.rope_theta,
        "partial_rotary_factor": factor,
    }
    compress: dict[str, Any] = {**main, "rope_theta": config.compress_rope_theta}
    if config.rope_scaling is not None:
        compress |= {
            "rope_type": "yarn",
            "factor": config.rope_scaling.factor,
            "original_max_position_embeddings": config.rope_scaling.original_context,
            "beta_fast": config.rope_scaling.beta_fast,
            "beta_slow": config.rope_scaling.beta_slow,
            "attention_factor": 1.0,
        }
    hash_layers = config.num_hash_layers
    scaling = config.rope_scaling
    # Only a warning depends on it here: transformers compares it with the YaRN factor.
    positions = int(scaling.factor * scaling.original_context) if scaling else config.max_context
    return DeepseekV4Config(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        moe_intermediate_size=config.expert_width,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        head_dim=config.head_dim,
        partial_rotary_factor=factor,
        q_lora_rank=config.q_lora_rank,
        num_experts_per_tok=config.experts_per_token,
        n_routed_experts=config.num_experts,
        n_shared_experts=config.num_shared_experts,
        routed_scaling_factor=config.routed_scale,
        max_position_embeddings=positions,
        rope_theta=config.rope_theta,
        compress_rope_theta=config.compress_rope_theta,
        rope_parameters={"main": main, "compress": compress},
        layer_types=[_LAYER_TYPES[ratio] for ratio in config.compress_ratios],
        mlp_layer_types=["hash_moe"] * hash_layers + ["moe"] * (config.num_layers - hash_layers),
        hc_mult=config.hc_streams,
        hc_sinkhorn_iters=config.hc_sinkhorn_iterations,
        hc_eps=config.hc_eps,
        rms_norm_eps=config.rms_norm_eps,
        swiglu_limit=config.swiglu_limits[0],
        sliding_window=config.window,
        o_groups=config.output_groups,
        o_lora_rank=config.output_lora_rank,
        index_n_heads=config.index_heads,
        index_head_dim=config.index_dim,
        index_topk=config.index_topk,
        attn_implementation="eager",
        experts_implementation="eager",
    )


def peer_state(config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, torch.Tensor]:
    """Official tensors under the names and fused shapes of `transformers`, no drafter."""
    state = {theirs: _torch(tensors[ours]) for ours, theirs in _ROOT_NAMES.items()}
    for layer in range(config.num_layers):
        prefix = f"layers.{layer}."
        for ours, theirs in _LAYER_NAMES.items():
            if prefix + ours in tensors:
                state[f"model.{prefix}{theirs}"] = _torch(tensors[prefix + ours])
        stacked = {
            part: np.stack(
                [
                    tensors[f"{prefix}ffn.experts.{e}.{part}.weight"]
                    for e in range(config.num_experts)
                ]
            )
            for part in ("w1", "w2", "w3")
        }
        gate_up = np.concatenate([stacked["w1"], stacked["w3"]], axis=1)  # [E, 2F, D]
        state[f"model.{prefix}mlp.experts.gate_up_proj"] = _torch(gate_up)
        state[f"model.{prefix}mlp.experts.down_proj"] = _torch(stacked["w2"])
    return state


def fp8_rows(rows: torch.Tensor, rope_dim: int) -> torch.Tensor:
    """Key/value rows after the round trip that DeepSeek-V4 was trained with, [..., d] float32.

    bfloat16 first; then the dims that are not rotated in e4m3, groups of 64 with a power-of-two
    scale (a last group may be smaller).
    """
    rounded = rows.bfloat16().float()
    parts = []
    for group in rounded[..., : rows.shape[-1] - rope_dim].split(64, dim=-1):
        largest = group.abs().amax(dim=-1, keepdim=True).clamp(min=1e-4)
        scale = torch.exp2(torch.ceil(torch.log2(largest / 448)))
        parts.append((group / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat((*parts, rounded[..., rows.shape[-1] - rope_dim :]), dim=-1)


@contextmanager
def _rounding_rows(rope_dim: int) -> Iterator[None]:
    """Let every attention of `transformers` see its rows as a FP8 cache would return them."""
    plain = modeling_deepseek_v4.eager_attention_forward

    def rounding(module: Any, query: Any, key: Any, _value: Any, *args: Any, **rest: Any) -> Any:
        rows = fp8_rows(key, rope_dim)
        return plain(module, query, rows, rows, *args, **rest)

    modeling_deepseek_v4.eager_attention_forward = rounding
    try:
        yield
    finally:
        modeling_deepseek_v4.eager_attention_forward = plain


def _torch(values: np.ndarray) -> torch.Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.float() if tensor.is_floating_point() else tensor.long()


@dataclass
class PeerRun:
    """One prefill of the peer.

    Attributes:
        logits: [T, V] float32.
        topk: layer -> selected compressed rows [T, k], -1 where a slot is unused; ratio-4 layers
        only. index_scores: layer -> [T, n] float32, before causality.
        experts: layer -> selected experts [T, k]; layers that select by score only.
        router_scores: layer -> score plus bias [T, E].
    """

    logits: torch.Tensor
    topk: dict[int, torch.Tensor] = field(default_factory=dict)
    index_scores: dict[int, torch.Tensor] = field(default_factory=dict)
    experts: dict[int, torch.Tensor] = field(default_factory=dict)
    router_scores: dict[int, torch.Tensor] = field(default_factory=dict)


class Peer:
    """A `DeepseekV4ForCausalLM` that holds exactly the given weights, float32, on the CPU."""

    def __init__(self, config: ModelConfig, tensors: Mapping[str, np.ndarray]) -> None:
        self.config = config
        self.model = DeepseekV4ForCausalLM(peer_config(config)).float().eval()
        self.model.load_state_dict(peer_state(config, tensors), strict=True)

    @torch.no_grad()
    def prefill(self, token_ids: np.ndarray) -> PeerRun:
        """Evaluate all tokens at once, without a cache, and record every selection."""
        run = PeerRun(logits=torch.empty(0))
        handles = self._record(run)
        try:
            ids = torch.from_numpy(np.asarray(token_ids, dtype=np.int64))[None]
            run.logits = self.model(input_ids=ids, use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return run

    def prefill_with_fp8_rows(self, token_ids: np.ndarray) -> torch.Tensor:
        """Logits [T, V] when window and compressed rows are rounded as DeepSeek-V4 stores them."""
        with _rounding_rows(self.config.rope_dim):
            return self.prefill(token_ids).logits

    def _record(self, run: PeerRun) -> list[Any]:
        handles: list[Any] = []
        for index, layer in enumerate(self.model.model.layers):
            compressor = layer.self_attn.compressor
            if self.config.compress_ratios[index] == 4:
                handles.append(compressor.indexer.register_forward_hook(_keep(run.topk, index)))
                scorer = compressor.indexer.scorer
                handles.append(scorer.register_forward_hook(_keep(run.index_scores, index)))
            if index >= self.config.num_hash_layers:
                handles.append(layer.mlp.gate.register_forward_hook(_keep_router(run, index)))
        return handles


def _keep(store: dict[int, torch.Tensor], layer: int) -> Any:
    def hook(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
        store[layer] = output[0].clone()

    return hook


def _keep_router(run: PeerRun, layer: int) -> Any:
    def hook(module: Any, _inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        logits, _, ids = output
        run.experts[layer] = ids.clone()
        run.router_scores[layer] = module.score_fn(logits) + module.e_score_correction_bias

    return hook

"""Shapes of the pocket models, and the `config.json` of their checkpoints.

Every size is the smallest that keeps a format or a code path of the full model alive: rows of 256
for K-quants, 64 unrotated dims for one FP8 group of a cached row, 128 for the Hadamard transform of
index keys, squares of 128 for FP8 weights.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final

from edgedsv4.config import ModelConfig, RopeScaling
from edgedsv4.errors import ConfigError

VOCAB_SIZE: Final = 4096
_QUANTIZATION: Final[Mapping[str, Any]] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "scale_fmt": "ue8m0",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}


def pocket_v4() -> ModelConfig:
    """The shipped model: 20.5M parameters and an MTP block of 2.5M."""
    ratios = (0, 0, 4, 128, 4, 128, 4)
    return ModelConfig(
        architecture="deepseek_v4",
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        num_layers=len(ratios),
        num_heads=8,
        head_dim=128,
        rope_dim=64,
        q_lora_rank=256,
        output_groups=2,
        output_lora_rank=128,
        window=128,
        index_heads=8,
        index_dim=128,
        index_topk=64,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=1,
        expert_width=256,
        routed_scale=1.5,
        num_hash_layers=3,
        swiglu_limits=(10.0,) * len(ratios),
        shared_swiglu_limits=(10.0,) * len(ratios),
        hc_streams=4,
        hc_sinkhorn_iterations=20,
        hc_eps=1e-6,
        rms_norm_eps=1e-6,
        rope_theta=10_000.0,
        compress_rope_theta=160_000.0,
        rope_scaling=RopeScaling(factor=4.0, original_context=8192),
        max_context=32_768,
        compress_ratios=ratios,
        num_draft_layers=1,
        bos_id=0,
        eos_id=1,
        pad_id=2,
    )


def pocket_v4_e16() -> ModelConfig:
    """The same with 16 experts per layer, for work on expert caches."""
    return replace(pocket_v4(), num_experts=16)


def ci_v4() -> ModelConfig:
    """A model that one CPU thread trains in minutes, for rehearsals and tests."""
    ratios = (0, 4, 128, 4)
    return replace(
        pocket_v4(),
        hidden_size=128,
        num_layers=len(ratios),
        num_heads=4,
        q_lora_rank=128,
        output_lora_rank=64,
        index_heads=4,
        index_topk=32,
        num_experts=4,
        expert_width=128,
        num_hash_layers=1,
        swiglu_limits=(10.0,) * len(ratios),
        shared_swiglu_limits=(10.0,) * len(ratios),
        compress_ratios=ratios,
    )


CONFIGS: Final[Mapping[str, Callable[[], ModelConfig]]] = {
    "pocket-v4": pocket_v4,
    "pocket-v4-e16": pocket_v4_e16,
    "ci-v4": ci_v4,
}


def named_config(name: str) -> ModelConfig:
    """The configuration of this name.

    Raises:
        ConfigError: if there is none.
    """
    if name not in CONFIGS:
        raise ConfigError(f"config must be one of {', '.join(CONFIGS)}, found {name!r}")
    return CONFIGS[name]()


def config_json(config: ModelConfig, *, is_quantised: bool) -> dict[str, Any]:
    """The `config.json` of an official-style checkpoint of this model.

    Args:
        config: shape of the model; one clamp for all layers.
        is_quantised: the checkpoint holds FP8 matrices and FP4 experts.
    """
    entries: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "torch_dtype": "bfloat16",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": 1,
        "head_dim": config.head_dim,
        "qk_rope_head_dim": config.rope_dim,
        "q_lora_rank": config.q_lora_rank,
        "o_groups": config.output_groups,
        "o_lora_rank": config.output_lora_rank,
        "sliding_window": config.window,
        "compress_ratios": [*config.compress_ratios, *[0] * config.num_draft_layers],
        "num_nextn_predict_layers": config.num_draft_layers,
        "index_n_heads": config.index_heads,
        "index_head_dim": config.index_dim,
        "index_topk": config.index_topk,
        "n_routed_experts": config.num_experts,
        "num_experts_per_tok": config.experts_per_token,
        "n_shared_experts": config.num_shared_experts,
        "moe_intermediate_size": config.expert_width,
        "num_hash_layers": config.num_hash_layers,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": config.routed_scale,
        "swiglu_limit": config.swiglu_limits[0],
        "hidden_act": "silu",
        "hc_mult": config.hc_streams,
        "hc_sinkhorn_iters": config.hc_sinkhorn_iterations,
        "hc_eps": config.hc_eps,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "compress_rope_theta": config.compress_rope_theta,
        "max_position_embeddings": config.max_context,
        "rope_scaling": _scaling_json(config.rope_scaling),
        "bos_token_id": config.bos_id,
        "eos_token_id": config.eos_id,
        "pad_token_id": config.pad_id,
        "tie_word_embeddings": False,
        "attention_bias": False,
    }
    if is_quantised:
        entries["expert_dtype"] = "fp4"
        entries["quantization_config"] = dict(_QUANTIZATION)
    return entries


def _scaling_json(scaling: RopeScaling | None) -> dict[str, Any] | None:
    if scaling is None:
        return None
    return {
        "type": "yarn",
        "factor": scaling.factor,
        "original_max_position_embeddings": scaling.original_context,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
    }

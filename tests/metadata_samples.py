"""Metadata of DeepSeek-V4-Flash as files hold it, for tests that change one entry at a time."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgedsv4.formats.gguf import GgufFile

LAYERS = 43
RATIOS = [0, 0] + [4, 128] * 20 + [4] + [0]
TOKENS = ["<bos>", "<eos>", "<pad>", "a", "b", "c", "ab", "abc"]


def llamacpp_metadata() -> dict[str, Any]:
    """What llama.cpp's converter writes."""
    own = {
        "block_count": LAYERS,
        "context_length": 1048576,
        "embedding_length": 4096,
        "embedding_length_out": 16384,
        "attention.head_count": 64,
        "attention.head_count_kv": 1,
        "attention.key_length": 512,
        "attention.value_length": 512,
        "attention.layer_norm_rms_epsilon": 1e-6,
        "attention.q_lora_rank": 1024,
        "attention.sliding_window": 128,
        "attention.indexer.head_count": 64,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512,
        "attention.output_group_count": 8,
        "attention.output_lora_rank": 1024,
        "attention.compress_ratios": np.array(RATIOS, dtype=np.int32),
        "attention.compress_rope_freq_base": 160000.0,
        "rope.dimension_count": 64,
        "rope.freq_base": 10000.0,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 16.0,
        "rope.scaling.original_context_length": 65536,
        "rope.scaling.yarn_beta_fast": 32.0,
        "rope.scaling.yarn_beta_slow": 1.0,
        "expert_count": 256,
        "expert_used_count": 6,
        "expert_shared_count": 1,
        "expert_feed_forward_length": 2048,
        "expert_weights_scale": 1.5,
        "expert_weights_norm": True,
        "expert_gating_func": 4,
        "swiglu_clamp_exp": np.full(LAYERS, 10, dtype=np.float32),
        "swiglu_clamp_shexp": np.full(LAYERS, 10, dtype=np.float32),
        "hash_layer_count": 3,
        "hyper_connection.count": 4,
        "hyper_connection.sinkhorn_iterations": 20,
        "hyper_connection.epsilon": 1e-6,
        "vocab_size": 129280,
    }
    return {
        "general.architecture": "deepseek4",
        **{f"deepseek4.{key}": value for key, value in own.items()},
    }


def ds4_metadata() -> dict[str, Any]:
    """What antirez/ds4 writes: no gating function, no shared clamp, an MTP block claimed."""
    metadata = llamacpp_metadata()
    for key in ("expert_gating_func", "swiglu_clamp_shexp", "embedding_length_out"):
        del metadata[f"deepseek4.{key}"]
    metadata["deepseek4.nextn_predict_layers"] = 1
    metadata["deepseek4.attention.compress_ratios"] = np.array(RATIOS, dtype=np.uint32)
    return metadata


def tokenizer_metadata() -> dict[str, Any]:
    """A byte-level BPE vocabulary of eight tokens."""
    own = {
        "model": "gpt2",
        "pre": "joyai-llm",
        "tokens": list(TOKENS),
        "token_type": np.array([3, 3, 3, 1, 1, 1, 1, 1], dtype=np.int32),
        "merges": ["a b", "ab c"],
        "bos_token_id": 0,
        "eos_token_id": 1,
        "padding_token_id": 2,
        "add_bos_token": False,
    }
    return {
        "general.architecture": "deepseek4",
        **{f"tokenizer.ggml.{key}": value for key, value in own.items()},
    }


def opened(metadata: Mapping[str, Any], tensors: Mapping[str, Any] | None = None) -> GgufFile:
    """An opened GGUF file with this metadata, as the reader would return it."""
    return GgufFile(
        path=Path("flash.gguf"),
        version=3,
        alignment=32,
        data_offset=0,
        metadata=metadata,
        value_types={},
        tensors=tensors or {},
        warnings=(),
        files=(),
    )


def official_config() -> dict[str, Any]:
    """The config.json of the official checkpoint."""
    return {
        "architectures": ["DeepseekV4ForCausalLM"],
        "model_type": "deepseek_v4",
        "vocab_size": 129280,
        "hidden_size": 4096,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 64,
        "num_key_value_heads": 1,
        "head_dim": 512,
        "qk_rope_head_dim": 64,
        "q_lora_rank": 1024,
        "o_groups": 8,
        "o_lora_rank": 1024,
        "sliding_window": 128,
        "compress_ratios": list(RATIOS),
        "num_nextn_predict_layers": 1,
        "index_n_heads": 64,
        "index_head_dim": 128,
        "index_topk": 512,
        "n_routed_experts": 256,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 2048,
        "num_hash_layers": 3,
        "scoring_func": "sqrtsoftplus",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "swiglu_limit": 10.0,
        "hidden_act": "silu",
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "compress_rope_theta": 160000,
        "max_position_embeddings": 1048576,
        "rope_scaling": {
            "type": "yarn",
            "factor": 16,
            "original_max_position_embeddings": 65536,
            "beta_fast": 32,
            "beta_slow": 1,
        },
        "bos_token_id": 0,
        "eos_token_id": 1,
        "tie_word_embeddings": False,
    }


def write_config(directory: Path, changes: Mapping[str, Any] | None = None) -> Path:
    """Write a changed `config.json`; a change to None removes the entry."""
    entries = {**official_config(), **(changes or {})}
    path = directory / "config.json"
    path.write_text(json.dumps({k: v for k, v in entries.items() if v is not None}))
    return path

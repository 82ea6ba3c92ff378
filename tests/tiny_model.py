"""Seeded random tiny DeepSeek-V4 models of any shape, as arrays under their official names.

The values are scaled so that every part matters: logits of standard deviation 1 to 2, sinks of
order 1, clamps that bite, biased routers, indexer scores that spread. `write_official` and
`write_gguf` (`tiny_files`) make files of them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from tiny_files import Tensors, write_gguf, write_official

from edgedsv4.config import ModelConfig, RopeScaling

__all__ = [
    "Tensors",
    "random_tensors",
    "random_tokens",
    "tiny_config",
    "write_gguf",
    "write_official",
]


def tiny_config(**changes: Any) -> ModelConfig:
    """A model with all layer kinds and sizes that differ pairwise; `changes` replace single fields.

    A change of `num_layers`, of `compress_ratios` or of a clamp given as one number keeps the
    per-layer lists in step.
    """
    ratios = tuple(changes.pop("compress_ratios", (0, 4, 128, 4, 0)))
    layers = len(ratios)
    limit = changes.pop("swiglu_limit", 1.5)
    fields: dict[str, Any] = {
        "architecture": "deepseek_v4",
        "vocab_size": 384,
        "hidden_size": 96,
        "num_layers": layers,
        "num_heads": 4,
        "head_dim": 64,
        "rope_dim": 16,
        "q_lora_rank": 64,
        "output_groups": 2,
        "output_lora_rank": 32,
        "window": 32,
        "index_heads": 32,
        "index_dim": 64,
        "index_topk": 8,
        "num_experts": 8,
        "experts_per_token": 3,
        "num_shared_experts": 1,
        "expert_width": 64,
        "routed_scale": 1.5,
        "num_hash_layers": 2,
        "swiglu_limits": (limit,) * layers,
        "shared_swiglu_limits": (limit,) * layers,
        "hc_streams": 4,
        "hc_sinkhorn_iterations": 20,
        "hc_eps": 1e-6,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "compress_rope_theta": 160000.0,
        "rope_scaling": RopeScaling(factor=16.0, original_context=4096),
        "max_context": 65536,
        "compress_ratios": ratios,
        "bos_id": 0,
        "eos_id": 1,
        "pad_id": 2,
    }
    return ModelConfig(**{**fields, **changes})


class _Draw:
    """Random arrays of one tensor each, in a fixed order."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def normal(self, *shape: int, std: float = 1.0, mean: float = 0.0) -> np.ndarray:
        return (self.rng.standard_normal(shape) * std + mean).astype(np.float32)

    def linear(self, rows: int, columns: int, gain: float = 1.0) -> np.ndarray:
        """[rows, columns] that turns unit-variance inputs into outputs of deviation `gain`."""
        return self.normal(rows, columns, std=gain / math.sqrt(columns))

    def norm(self, width: int, mean: float = 1.0) -> np.ndarray:
        return self.normal(width, std=0.15, mean=mean)


def random_tensors(config: ModelConfig, seed: int) -> Tensors:
    """All weights of a model with random values.

    Args:
        config: shape of the model; `num_draft_layers` blocks `mtp.N.*` are included.
        seed: of NumPy's default generator.
    Returns:
        Official name -> float32 array (row-major, [out, in]); expert tables are int64 [V,
        experts_per_token].
    """
    draw = _Draw(seed)
    width = config.hidden_size
    tensors = {
        "embed.weight": draw.normal(config.vocab_size, width),
        "head.weight": draw.linear(config.vocab_size, width, gain=1.6),
        "norm.weight": draw.norm(width),
        **_head_mixing("hc_head", config, draw),
    }
    for index, ratio in enumerate(config.compress_ratios):
        is_hash = index < config.num_hash_layers
        tensors |= _block(f"layers.{index}", config, draw, ratio=ratio, is_hash=is_hash)
    for index in range(config.num_draft_layers):
        tensors |= _draft(f"mtp.{index}", config, draw)
    return tensors


def random_tokens(config: ModelConfig, count: int, seed: int) -> np.ndarray:
    """`count` token ids below the vocabulary size, int64."""
    return np.random.default_rng(seed).integers(0, config.vocab_size, count, dtype=np.int64)


def _head_mixing(name: str, config: ModelConfig, draw: _Draw) -> Tensors:
    streams = config.hc_streams
    return {
        f"{name}_fn": draw.linear(streams, streams * config.hidden_size),
        f"{name}_base": draw.normal(streams, std=0.5),
        f"{name}_scale": draw.normal(1, std=0.1, mean=0.8),
    }


def _block(name: str, config: ModelConfig, draw: _Draw, *, ratio: int, is_hash: bool) -> Tensors:
    tensors = {
        f"{name}.attn_norm.weight": draw.norm(config.hidden_size),
        f"{name}.ffn_norm.weight": draw.norm(config.hidden_size),
    }
    for site in ("hc_attn", "hc_ffn"):
        tensors |= {
            f"{name}.{site}_fn": draw.linear(
                config.hc_rows, config.hc_streams * config.hidden_size
            ),
            f"{name}.{site}_base": draw.normal(config.hc_rows, std=0.6),
            f"{name}.{site}_scale": draw.normal(3, std=0.15, mean=0.8),
        }
    tensors |= _attention(f"{name}.attn", config, draw, ratio)
    return tensors | _ffn(f"{name}.ffn", config, draw, is_hash=is_hash)


def _attention(name: str, config: ModelConfig, draw: _Draw, ratio: int) -> Tensors:
    width, head, rank = config.hidden_size, config.head_dim, config.q_lora_rank
    inner = config.output_groups * config.output_lora_rank
    tensors = {
        f"{name}.attn_sink": draw.normal(config.num_heads, std=0.9),
        f"{name}.wq_a.weight": draw.linear(rank, width),
        f"{name}.q_norm.weight": draw.norm(rank),
        f"{name}.wq_b.weight": draw.linear(config.num_heads * head, rank),
        f"{name}.wkv.weight": draw.linear(head, width),
        f"{name}.kv_norm.weight": draw.norm(head, mean=1.6),
        f"{name}.wo_a.weight": draw.linear(inner, config.group_width, gain=2.0),
        f"{name}.wo_b.weight": draw.linear(width, inner, gain=2.0),
    }
    if ratio:
        tensors |= _compressor(f"{name}.compressor", config, draw, ratio=ratio, head=head, mean=1.6)
    if ratio == 4:
        index = f"{name}.indexer"
        rows = config.index_heads * config.index_dim
        tensors[f"{index}.wq_b.weight"] = draw.linear(rows, rank)
        tensors[f"{index}.weights_proj.weight"] = draw.linear(config.index_heads, width)
        tensors |= _compressor(
            f"{index}.compressor", config, draw, ratio=ratio, head=config.index_dim, mean=1.0
        )
    return tensors


def _compressor(
    name: str, config: ModelConfig, draw: _Draw, *, ratio: int, head: int, mean: float
) -> Tensors:
    rows = (2 if ratio == 4 else 1) * head
    return {
        f"{name}.ape": draw.normal(ratio, rows, std=0.7),
        f"{name}.wkv.weight": draw.linear(rows, config.hidden_size),
        f"{name}.wgate.weight": draw.linear(rows, config.hidden_size),
        f"{name}.norm.weight": draw.norm(head, mean=mean),
    }


def _ffn(name: str, config: ModelConfig, draw: _Draw, *, is_hash: bool) -> Tensors:
    experts, used = config.num_experts, config.experts_per_token
    tensors = {f"{name}.gate.weight": draw.linear(experts, config.hidden_size)}
    if is_hash:
        order = np.argsort(draw.rng.random((config.vocab_size, experts)), axis=1)
        tensors[f"{name}.gate.tid2eid"] = order[:, :used].astype(np.int64)
    else:
        tensors[f"{name}.gate.bias"] = draw.normal(experts, std=0.15)
    for expert in range(experts):
        tensors |= _expert(f"{name}.experts.{expert}", config, draw, config.expert_width)
    if config.num_shared_experts:
        shared_width = config.num_shared_experts * config.expert_width
        tensors |= _expert(f"{name}.shared_experts", config, draw, shared_width)
    return tensors


def _expert(name: str, config: ModelConfig, draw: _Draw, width: int) -> Tensors:
    return {
        f"{name}.w1.weight": draw.linear(width, config.hidden_size, gain=1.8),
        f"{name}.w3.weight": draw.linear(width, config.hidden_size, gain=1.8),
        f"{name}.w2.weight": draw.linear(config.hidden_size, width, gain=1.8),
    }


def _draft(name: str, config: ModelConfig, draw: _Draw) -> Tensors:
    width = config.hidden_size
    return {
        f"{name}.e_proj.weight": draw.linear(width, width),
        f"{name}.h_proj.weight": draw.linear(width, width),
        f"{name}.enorm.weight": draw.norm(width),
        f"{name}.hnorm.weight": draw.norm(width),
        f"{name}.norm.weight": draw.norm(width),
        **_head_mixing(f"{name}.hc_head", config, draw),
        **_block(name, config, draw, ratio=0, is_hash=False),
    }

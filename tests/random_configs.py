"""Model shapes drawn from a seed, so that no two sizes of the network coincide for long."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from tiny_model import tiny_config

from edgedsv4.config import ModelConfig, RopeScaling

T = TypeVar("T")

_PATTERNS = (
    (128, 128, 4, 128, 4),  # how DeepSeek-V4-Pro begins
    (0, 0, 4, 128, 4),  # how DeepSeek-V4-Flash begins
    (4, 0, 128, 4),
    (0, 4, 128, 4, 0, 128),
    (128, 4, 4, 0),
    (4, 4, 128),
)


@dataclass(frozen=True)
class RandomCase:
    """A model shape and the length of its prompt."""

    config: ModelConfig
    token_count: int


class _Chooser:
    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def one(self, *options: T) -> T:
        return options[int(self.rng.integers(len(options)))]


def draw_case(seed: int) -> RandomCase:
    """The shape of this seed: every size and constant of the configuration is drawn.

    Index heads are at least 32, since with few of them index scores are exactly zero, and so
    tied, again and again.
    """
    pick = _Chooser(seed)
    width = pick.one(64, 96, 160, 192)
    head = pick.one(*(d for d in (48, 64, 80, 96, 128) if d != width))
    index_dim = pick.one(32, 64, 128)
    rope = pick.one(
        *(r for r in (8, 16, 24, 32) if r < min(head, index_dim) and 2 * r != index_dim)
    )
    heads = pick.one(2, 4, 6, 8)
    rank = pick.one(32, 64, 96)
    experts = pick.one(6, 8, 12, 16)
    ratios = pick.one(*_PATTERNS)
    scaling = RopeScaling(
        factor=pick.one(4.0, 16.0, 40.0),
        original_context=pick.one(256, 1024, 4096, 65536),
        beta_fast=pick.one(32.0, 8.0),
        beta_slow=pick.one(1.0, 0.5),
    )
    config = tiny_config(
        compress_ratios=ratios,
        vocab_size=pick.one(320, 512, 640),
        hidden_size=width,
        num_heads=heads,
        head_dim=head,
        rope_dim=rope,
        q_lora_rank=rank,
        output_groups=pick.one(*(g for g in (1, 2, 3, 4) if heads % g == 0)),
        output_lora_rank=pick.one(*(o for o in (32, 48, 64) if o != rank)),
        window=pick.one(8, 33, 64, 128),
        index_heads=pick.one(32, 48, 64),
        index_dim=index_dim,
        index_topk=pick.one(8, 16, 37, 64, 256, 1024),
        num_experts=experts,
        experts_per_token=pick.one(1, 2, 3, 6),
        expert_width=pick.one(32, 64, 96),
        routed_scale=pick.one(1.0, 1.5, 2.5),
        num_hash_layers=pick.one(0, 1, 2, 3),
        swiglu_limit=pick.one(0.75, 1.5, 3.0),
        hc_sinkhorn_iterations=pick.one(3, 20),
        hc_eps=pick.one(1e-6, 1e-4),
        rms_norm_eps=pick.one(1e-6, 1e-5),
        rope_theta=pick.one(10000.0, 5000.0),
        compress_rope_theta=pick.one(160000.0, 40000.0),
        rope_scaling=pick.one(scaling, scaling, scaling, None),
    )
    return RandomCase(config, token_count=pick.one(130, 300, 515, 777, 1100, 3000))

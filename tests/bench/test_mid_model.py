"""The model that speed is measured with is a real one: it opens, its logits are of order one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from mid_model import EXPERT_TYPES, build, mid_config

from edgedsv4 import Engine, EngineOptions, ModelConfig, inspect_model


def small_config() -> ModelConfig:
    """The same kinds of layers, a thousandth of the weights."""
    return dataclasses.replace(
        mid_config(),
        vocab_size=400,
        hidden_size=256,
        num_layers=4,
        num_heads=4,
        head_dim=128,
        q_lora_rank=64,
        output_groups=2,
        output_lora_rank=64,
        index_heads=4,
        index_dim=128,
        index_topk=16,
        num_experts=8,
        expert_width=256,
        compress_ratios=(0, 4, 128, 4),
        swiglu_limits=(10.0,) * 4,
        shared_swiglu_limits=(10.0,) * 4,
    )


@pytest.mark.parametrize("expert_type", EXPERT_TYPES.values())
def test_logits_are_finite_and_of_order_one(tmp_path: Path, expert_type: str) -> None:
    path = tmp_path / "small.gguf"
    build(path, small_config(), expert_type)
    options = EngineOptions(threads=1, context=256, backend="reference")
    with Engine.open(path, options) as engine, engine.new_session() as session:
        logits = session.evaluate(list(range(8, 8 + 140)), logits="all")
    assert logits is not None
    assert np.isfinite(logits).all()
    assert 0.3 < logits.std() < 3


def test_every_type_is_in_the_file(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    build(path, small_config(), "MXFP4")
    types = {name for role in inspect_model(path).roles for name in role.block_types}
    assert types == {"BF16", "F32", "I32", "MXFP4", "Q8_0"}


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        build(tmp_path / name, small_config(), "Q4_K")
    assert (tmp_path / "a.gguf").read_bytes() == (tmp_path / "b.gguf").read_bytes()

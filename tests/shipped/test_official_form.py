"""The shipped weights written as an official checkpoint: both loaders see one model.

Two forms are written from the GGUF file's tensors. One holds the same values (float32 matrices and
packed FP4 experts), the other is rounded to FP8 blocks as released checkpoints are, and comes back
as GGUF through the converter.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from greedy import TEST_OPTIONS
from pocket.checkpoint import write_safetensors
from pocket.configs import config_json
from pocket.export import checkpoint_tensors, is_expert, write_checkpoint

from edgedsv4 import (
    ConvertOptions,
    Engine,
    Message,
    ModelConfig,
    PromptOptions,
    convert_model,
    render_prompt,
)
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.model.weight_names import (
    DRAFT_ROWS,
    LAYER_ROWS,
    ROOT_ROWS,
    Kind,
    LayerTraits,
    WeightRow,
)
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.shipped_models import POCKET_V4, open_model
from edgedsv4.runtime.tensor_pieces import table_pieces, weight_pieces

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights

QUESTIONS = ("What is the capital of France?", "What does river mean?", "Who are you?")
F32 = BLOCK_TYPES["F32"]


@dataclass(frozen=True)
class Weights:
    """Values of a model under official names, experts stacked, as the trainer has them."""

    config: ModelConfig
    values: Mapping[str, torch.Tensor]


def value(weight: BoundTensor, kind: Kind = Kind.MATRIX) -> torch.Tensor:
    if kind is Kind.TABLE:
        data = np.concatenate([piece.reshape(-1) for piece in table_pieces(weight)])
        return torch.from_numpy(data.view("<i4").astype(np.int64).reshape(weight.shape))
    data = np.concatenate([piece.reshape(-1) for piece in weight_pieces(weight, F32)])
    return torch.from_numpy(data.view("<f4").reshape(weight.shape))


def layer_values(bound: BoundWeights, layer: int) -> dict[str, torch.Tensor]:
    is_draft = layer == bound.config.num_layers
    role, name = ("draft", "mtp.0") if is_draft else (f"layers.{layer}",) * 2
    rows: list[WeightRow] = [
        row for row in LAYER_ROWS if row.present(LayerTraits.of(bound.config, layer))
    ]
    if is_draft:
        rows += DRAFT_ROWS
    found = {
        f"{name}.{row.official}": value(bound.tensors[f"{role}.{row.role}"], row.kind)
        for row in rows
    }
    return found | expert_values(bound, layer)


def expert_values(bound: BoundWeights, layer: int) -> dict[str, torch.Tensor]:
    place = "mtp.0" if layer == bound.config.num_layers else f"layers.{layer}"
    experts = bound.experts[layer]
    return {
        f"{place}.ffn.experts.{part}": torch.stack(
            [value(experts.expert(expert)[index]) for expert in range(experts.count)]
        )
        for index, part in enumerate(("w1", "w3", "w2"))
    }


@pytest.fixture(scope="module")
def weights() -> Weights:
    with open_model(POCKET_V4) as checkpoint:
        bound = bind_weights(checkpoint)
        values = {row.official: value(bound.tensors[row.role], row.kind) for row in ROOT_ROWS}
        for layer in range(checkpoint.config.num_layers + 1):
            values |= layer_values(bound, layer)
        return Weights(checkpoint.config, values)


def write_same_values(folder: Path, weights: Weights) -> None:
    record = config_json(weights.config, is_quantised=False) | {"expert_dtype": "fp4"}
    (folder / "config.json").write_text(json.dumps(record), encoding="utf-8")
    plain = dict(checkpoint_tensors(weights.values, "f32"))
    packed = dict(checkpoint_tensors(weights.values, "fp4"))
    kept = {name: plain.get(name, tensor) for name, tensor in packed.items()}
    kept |= {name: tensor for name, tensor in packed.items() if is_expert(name)}
    write_safetensors(folder / "model.safetensors", list(kept.items()))


def answers(model: str | Path) -> list[list[int]]:
    """Greedy replies as token ids; the prompts are the shipped tokenizer's."""
    with Engine.open(POCKET_V4, TEST_OPTIONS) as shipped:
        tokenizer = shipped.tokenizer
    said = []
    with Engine.open(model, TEST_OPTIONS) as engine:
        for question in QUESTIONS:
            options = PromptOptions(thinking="none")
            prompt = render_prompt([Message("user", question)], variant="v4", options=options)
            with engine.new_session() as session:
                session.sync(tokenizer.encode_pieces(prompt.pieces))
                reply: list[int] = []
                while not reply or (reply[-1] != tokenizer.eos_id and len(reply) < 40):
                    reply.append(int(session.logits().argmax()))
                    session.sync([*session.token_ids, reply[-1]])
                said.append(reply)
    return said


def logits(model: str | Path) -> np.ndarray:
    ids = np.random.default_rng(5).integers(3, 4000, 200).tolist()
    with Engine.open(model, TEST_OPTIONS) as engine, engine.new_session() as session:
        found = session.evaluate(ids, logits="all")
    assert found is not None
    return found


@pytest.fixture(scope="module")
def shipped_answers() -> list[list[int]]:
    return answers(POCKET_V4)


def test_same_values_in_the_official_form_compute_the_same(
    weights: Weights, shipped_answers: list[list[int]], tmp_path: Path
) -> None:
    write_same_values(tmp_path, weights)
    np.testing.assert_allclose(logits(tmp_path), logits(POCKET_V4), atol=1e-3)
    assert answers(tmp_path) == shipped_answers


def test_expert_values_survive_the_way_there_and_back(weights: Weights, tmp_path: Path) -> None:
    write_same_values(tmp_path, weights)
    convert_model(tmp_path, tmp_path / "back.gguf", ConvertOptions(mtp="inside"))
    with open_model(tmp_path / "back.gguf") as back:
        bound = bind_weights(back)
        for layer in range(weights.config.num_layers + 1):
            for name, values in expert_values(bound, layer).items():
                assert torch.equal(values, weights.values[name])


def test_fp8_form_is_one_model_for_both_loaders_and_still_answers(
    weights: Weights, shipped_answers: list[list[int]], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "official", weights.config, weights.values, "official")
    convert_model(tmp_path / "official", tmp_path / "m.gguf", ConvertOptions(fp8="BF16"))
    official, gguf = logits(tmp_path / "official"), logits(tmp_path / "m.gguf")
    np.testing.assert_allclose(official, gguf, atol=1e-3)
    said = answers(tmp_path / "official")
    assert answers(tmp_path / "m.gguf") == said
    # Three mantissa bits more or less do not change what the model knows.
    assert said == shipped_answers

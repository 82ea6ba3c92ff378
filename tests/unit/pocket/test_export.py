"""Trained weights as a checkpoint that the runtime loads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from file_model import open_model
from memory_model import ids_tensor
from pocket.configs import CONFIGS, config_json
from pocket.export import Form, fp8_blocks, with_rounded_experts, write_checkpoint
from pocket.network import Mode, Network
from pocket.parameters import from_official
from tiny_model import random_tensors, tiny_config

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.formats.metadata import config_from_json
from edgedsv4.kernels.quant_matmul import dequantize

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

Case = tuple["ModelConfig", dict[str, torch.Tensor]]


@pytest.fixture(scope="module")
def case() -> Case:
    config = tiny_config(num_draft_layers=1, index_heads=4, index_topk=64)
    arrays = random_tensors(config, 2)
    return config, from_official(config, {n: torch.from_numpy(a) for n, a in arrays.items()})


def logits(path: Path, ids: np.ndarray) -> torch.Tensor:
    model = open_model(path)
    result = model.forward(ids_tensor(ids), model.new_cache(len(ids)), logits="all").logits
    assert result is not None
    return result


def test_plain_form_computes_what_the_network_computes(case: Case, tmp_path: Path) -> None:
    config, weights = case
    write_checkpoint(tmp_path, config, weights, "f32")
    ids = np.random.default_rng(1).integers(3, config.vocab_size, 80)
    network = Network(config, weights)
    with torch.no_grad():
        batch = network.sequences(torch.from_numpy(ids)[None], Mode())
        want = network.logits(network.trunk(batch))[:80]
    assert (logits(tmp_path, ids) - want).abs().max() < 1e-4


def test_official_form_stores_rounded_experts_without_loss(case: Case, tmp_path: Path) -> None:
    config, weights = case
    write_checkpoint(tmp_path, config, weights, "official")
    rounded = with_rounded_experts(weights)
    model = open_model(tmp_path)
    for layer in range(config.num_layers + 1):
        place = "mtp.0" if layer == config.num_layers else f"layers.{layer}"
        for expert, found in enumerate(model.experts.fetch(layer, range(config.num_experts))):
            for part in ("w1", "w3", "w2"):
                want = rounded[f"{place}.ffn.experts.{part}"][expert]
                assert torch.equal(dequantize(getattr(found, part)), want)


def test_official_form_stays_near_the_trained_weights(case: Case, tmp_path: Path) -> None:
    config, weights = case
    write_checkpoint(tmp_path / "official", config, weights, "official")
    write_checkpoint(tmp_path / "plain", config, with_rounded_experts(weights), "f32")
    ids = np.random.default_rng(1).integers(3, config.vocab_size, 80)
    got, want = (logits(tmp_path / form, ids) for form in ("official", "plain"))
    p, q = want.log_softmax(dim=-1), got.log_softmax(dim=-1)
    # Three mantissa bits move every weight by up to 6 %; random weights amplify that.
    assert (p.exp() * (p - q)).sum(dim=-1).mean() < 0.15


@pytest.mark.parametrize("form", ["official", "bf16", "f32"])
def test_checkpoint_says_what_it_is(case: Case, tmp_path: Path, form: Form) -> None:
    config, weights = case
    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}", encoding="utf-8")
    write_checkpoint(tmp_path / form, config, weights, form, tokenizer)
    with open_checkpoint(tmp_path / form) as checkpoint:
        assert checkpoint.config == config
        assert checkpoint.tokenizer == tmp_path / form / "tokenizer.json"
        kinds = {record.block_type.name for record in checkpoint.tensors.values()}
    expected = {
        "official": {"FP8_E4M3", "E8M0", "I8", "BF16", "F32", "I64"},
        "bf16": {"BF16", "F32", "I64"},
        "f32": {"F32", "I64"},
    }
    assert kinds == expected[form]


def test_fp8_scales_are_the_smallest_that_fit() -> None:
    matrix = torch.zeros(130, 200)
    matrix[0, 0], matrix[129, 0], matrix[0, 199] = 448.0, -449.0, 3.0
    codes, scales = fp8_blocks(matrix)
    assert scales[:, 0].tolist() == [127, 128]
    assert scales[0, 1] == 127 - 7  # 3 / 2^-7 = 384 fits, 3 / 2^-8 does not
    factors = torch.exp2(scales.float() - 127).repeat_interleave(128, 0).repeat_interleave(128, 1)
    values = codes.float() * factors[:130, :200]
    assert values[0, 0] == 448.0
    assert values[0, 199] == 3.0
    assert values[129, 0] == -448.0


@pytest.mark.parametrize("name", list(CONFIGS))
def test_named_configuration_survives_its_json(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config_json(config, is_quantised=True)), encoding="utf-8")
    assert config_from_json(path) == config

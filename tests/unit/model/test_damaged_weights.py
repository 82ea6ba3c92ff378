"""A weight that is NaN or infinite never ends in an answer, whatever its role.

Most spread into the logits. Some are hidden on the way: a saturating function takes an infinite
scale, a selection leaves NaN out, FP4 has no code for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from memory_model import BACKENDS, computed_by
from tiny_model import random_tensors, random_tokens, tiny_config, write_official

from edgedsv4.errors import FormatError, NumericError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.weights import load_weights

if TYPE_CHECKING:
    from pathlib import Path

    from edgedsv4.config import Profile

CONFIG = tiny_config()
# Every role once: layer 0 routes by table, 1 and 3 are indexed, 2 routes by score.
NAMES = sorted(
    name
    for name, array in random_tensors(CONFIG, seed=3).items()
    if np.issubdtype(array.dtype, np.floating)
    and (name.startswith(("layers.1.", "layers.2.")) or not name.startswith("layers."))
    and (".experts." not in name or ".experts.0." in name)
)
COUNT = max(4 * CONFIG.index_topk + 4, 128)
"""Tokens after which the indexer has to choose and every compressor has a row."""


def evaluate(
    folder: Path, name: str, value: float, profile: Profile, backend: str
) -> torch.Tensor | None:
    tensors = random_tensors(CONFIG, seed=3)
    tensors[name][...] = value
    write_official(folder, CONFIG, tensors)
    with open_checkpoint(folder) as checkpoint:
        weights, experts = load_weights(checkpoint)
        numerics = Numerics(profile=profile, dtype=torch.float32, device=torch.device("cpu"))
        model = computed_by(backend, checkpoint.config, weights, experts, numerics)
        ids = torch.from_numpy(random_tokens(CONFIG, COUNT, 1))
        return model.forward(ids, model.new_cache(COUNT)).logits


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("profile", ["exact", "default"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", NAMES)
def test_damaged_weight_is_an_error(
    tmp_path: Path, name: str, value: float, profile: Profile, backend: str
) -> None:
    with pytest.raises((FormatError, NumericError)):
        evaluate(tmp_path, name, value, profile, backend)


def test_damaged_parameters_are_listed_with_tensor_and_place(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG, seed=3)
    tensors["layers.2.ffn.gate.bias"][1] = np.nan
    tensors["hc_head_scale"][0] = np.inf
    write_official(tmp_path, CONFIG, tensors)
    with open_checkpoint(tmp_path) as checkpoint, pytest.raises(FormatError) as caught:
        load_weights(checkpoint)
    assert caught.value.problems == (
        "tensor hc_head_scale holds inf at element 0",
        "tensor layers.2.ffn.gate.bias holds nan at element 1",
    )


@pytest.mark.parametrize("name", ["layers.1.attn.attn_sink", "layers.2.ffn.gate.bias"])
def test_minus_infinity_switches_a_sink_or_an_expert_off(tmp_path: Path, name: str) -> None:
    tensors = random_tensors(CONFIG, seed=3)
    assert name in tensors
    half = np.where(np.arange(tensors[name].size) == 0, -np.inf, tensors[name])
    tensors[name][...] = half
    write_official(tmp_path, CONFIG, tensors)
    with open_checkpoint(tmp_path) as checkpoint:
        weights, _ = load_weights(checkpoint)
    values = weights.layers[1].attention.sink if "sink" in name else weights.layers[2].moe.bias
    assert values is not None
    assert bool(torch.isneginf(values[0]))

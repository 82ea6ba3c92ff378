"""The whole network by Triton kernels against the reference."""

from __future__ import annotations

import pytest
import torch
from gpu_models import both
from memory_model import evaluate, ids_tensor, state_of
from tiny_model import random_tensors, random_tokens, tiny_config
from triton_device import DEVICE

SEED = 5
COUNT = 45 if DEVICE == "cpu" else 300
LIMIT = {"exact": 2e-4, "default": 0.1}


@pytest.mark.parametrize("profile", ["exact", "default"])
def test_chunk_then_tokens_give_the_logits_of_the_reference(profile: str) -> None:
    config = tiny_config(compress_ratios=(0, 4, 128))
    reference, model = both(config, random_tensors(config, SEED), profile)
    ids = random_tokens(config, COUNT, SEED)
    sizes = [COUNT - 4, 1, 1, 2]
    expected = evaluate(reference, ids, sizes=sizes)
    cache = model.new_cache(COUNT + 8)
    found = evaluate(model, ids, cache=cache, sizes=sizes).cpu()
    error = (found - expected).abs().amax(1)
    print(error)
    assert float(error.max()) < LIMIT[profile]

"""The weights of a model arranged for GPUs: nothing is lost, however the file has them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from memory_model import model_of
from tiny_model import random_tensors, tiny_config

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.model.gpu_network import NetworkLoader, side_by_side, stacked
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.shipped_models import SHIPPED_MODELS

if TYPE_CHECKING:
    from edgedsv4.model.gpu_network import DeviceNetwork

CPU = torch.device("cpu")
POCKET = Path(__file__).parents[3] / "edgedsv4" / "data" / "pocket-v4" / "pocket-v4.gguf"


def planes_of(network: DeviceNetwork) -> list[torch.Tensor]:
    return [plane for _, matrix in network.matrices() for plane in matrix.planes]


def test_stacked_experts_are_copied_like_single_ones() -> None:
    with open_checkpoint(POCKET) as checkpoint:
        weights, experts = load_weights(checkpoint)
        assert experts.stacks(0) is not None
        fast = NetworkLoader(checkpoint.config, CPU, "BF16", experts.stacks).load(weights, experts)
        slow = NetworkLoader(checkpoint.config, CPU, "BF16").load(weights, experts)
    pairs = list(zip(planes_of(fast), planes_of(slow), strict=True))
    assert len(pairs) > 50
    assert all(torch.equal(left, right) for left, right in pairs)
    assert "pocket-v4" in SHIPPED_MODELS


def test_progress_counts_layers_and_may_stop() -> None:
    config = tiny_config()
    model = model_of(config, random_tensors(config, 3))
    seen: list[tuple[int, int]] = []
    NetworkLoader(config, CPU, "F32").load(
        model.weights, model.experts, lambda done, total: seen.append((done, total))
    )
    assert seen == [(i + 1, config.num_layers) for i in range(config.num_layers)]

    def stop(done: int, _total: int) -> None:
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        NetworkLoader(config, CPU, "F32").load(model.weights, model.experts, stop)


def test_results_stand_where_the_columns_say() -> None:
    config = tiny_config()
    model = model_of(config, random_tensors(config, 4))
    network = NetworkLoader(config, CPU, "F32").load(model.weights, model.experts)
    layer, attention = network.layers[1], model.weights.layers[1].attention
    assert attention.indexer is not None
    whole = torch.cat([matrix.planes[0] for matrix in layer.entrance.matrices])
    for name, weight in (("qr", attention.wq_a), ("index_weights", attention.indexer.weights_proj)):
        torch.testing.assert_close(whole[layer.entrance.columns[name]], dequantize(weight))
    assert layer.entrance.width == whole.shape[0]


def test_matrices_of_two_types_are_two_stacks() -> None:
    config = tiny_config()
    model = model_of(config, random_tensors(config, 4))
    network = NetworkLoader(config, CPU, "F32").load(model.weights, model.experts)
    first, other = network.layers[0].wo_b, network.layers[1].wo_b
    parts = [("a", first), ("b", other)]
    assert len(stacked(parts).matrices) == 1
    assert len(side_by_side(parts).matrices) == 2
    assert stacked(parts).columns == side_by_side(parts).columns

"""Mapped experts: views in the order asked for, and errors that say which expert."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from edgedsv4.errors import ExpertReadError, FormatError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.expert_store import MappedExperts
from edgedsv4.runtime.random_model import build_random_model

CPU = torch.device("cpu")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.gguf"
    build_random_model(path)
    return path


def test_experts_come_in_the_order_asked_for(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        _, routed = load_weights(checkpoint)
        found = MappedExperts(routed, CPU).fetch(2, [5, 0, 5])
        stacked = checkpoint.tensors["blk.2.ffn_down_exps.weight"]
        raw = torch.from_numpy(stacked.data().view("<u2").astype("int32").copy())
        values = (raw << 16).view(torch.float32).view(stacked.shape)
    for expert, expert_id in zip(found, (5, 0, 5), strict=True):
        torch.testing.assert_close(dequantize(expert.w2), values[expert_id], rtol=0, atol=0)


def test_nothing_asked_for_gives_nothing(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        assert MappedExperts(load_weights(checkpoint)[1], CPU).fetch(0, []) == []


@pytest.mark.parametrize(("layer", "expert_id"), [(0, 8), (0, -1), (4, 0)])
def test_unknown_expert_is_named(path: Path, layer: int, expert_id: int) -> None:
    with open_checkpoint(path) as checkpoint:
        store = MappedExperts(load_weights(checkpoint)[1], CPU)
        with pytest.raises(ExpertReadError, match=f"expert {expert_id} of layer {layer}"):
            store.fetch(layer, [expert_id])


def test_changed_file_is_a_format_error(path: Path) -> None:
    with open_checkpoint(path) as checkpoint:
        store = MappedExperts(load_weights(checkpoint)[1], CPU)
        os.utime(path, ns=(1, 1))
        with pytest.raises(FormatError, match="changed while open"):
            store.fetch(0, [0])

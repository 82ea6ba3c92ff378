"""Extents of routed experts: reading them apart gives what the mapping gives."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tiny_model import random_tensors, tiny_config, write_gguf, write_official

from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.model.weights import load_weights

CONFIG = tiny_config(
    compress_ratios=(0, 4), num_hash_layers=1, num_draft_layers=1, hidden_size=256, expert_width=256
)
KINDS = ("f32", "a", "b", "official", "official-fp4")


def write(kind: str, folder: Path) -> Path:
    tensors = random_tensors(CONFIG, seed=5)
    if kind.startswith("official"):
        write_official(folder, CONFIG, tensors, quantised=kind == "official-fp4")
        return folder
    write_gguf(folder / "model.gguf", CONFIG, tensors, types=kind)
    return folder / "model.gguf"


@pytest.mark.parametrize("kind", KINDS)
def test_bytes_at_the_extents_are_the_experts(kind: str, tmp_path: Path) -> None:
    with open_checkpoint(write(kind, tmp_path)) as checkpoint:
        _, experts = load_weights(checkpoint)
        assert experts.has_extents
        for layer in range(experts.num_layers):
            for expert_id in (0, 3, experts.experts_of(layer) - 1):
                parts = [
                    np.fromfile(e.file.path, np.uint8, e.nbytes, offset=e.offset)
                    for e in experts.extents(layer, expert_id)
                ]
                read, mapped = (
                    experts.over(layer, expert_id, parts),
                    experts.expert(layer, expert_id),
                )
                for name in ("w1", "w3", "w2"):
                    ours, theirs = getattr(read, name), getattr(mapped, name)
                    assert ours.scale_block == theirs.scale_block
                    assert torch.equal(dequantize(ours), dequantize(theirs))


@pytest.mark.parametrize(("layer", "expert_id"), [(0, 8), (0, -1), (9, 0)])
def test_no_such_expert(layer: int, expert_id: int, tmp_path: Path) -> None:
    with open_checkpoint(write("f32", tmp_path)) as checkpoint, pytest.raises(IndexError):
        load_weights(checkpoint)[1].extents(layer, expert_id)

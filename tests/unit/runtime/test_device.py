"""Devices by name, and weight records that move as a whole."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.weights import ModelWeights, load_weights
from edgedsv4.runtime.device import (
    available_devices,
    place_weights,
    resident_bytes,
    resolve_device,
)
from edgedsv4.runtime.random_model import build_random_model


@pytest.fixture
def weights(tmp_path: Path) -> ModelWeights:
    build_random_model(tmp_path / "tiny.gguf")
    with open_checkpoint(tmp_path / "tiny.gguf") as checkpoint:
        return load_weights(checkpoint)[0]


def tensors(value: object) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, tuple):
        return [tensor for part in value for tensor in tensors(part)]
    if is_dataclass(value):
        return [t for field in fields(value) for t in tensors(getattr(value, field.name))]
    return []


@pytest.mark.parametrize("name", ["auto", "cpu"])
def test_auto_is_the_cpu_without_a_gpu(name: str) -> None:
    assert resolve_device(name) == torch.device("cpu")


@pytest.mark.parametrize("name", ["", "CPU", "cuda:x", "cuda:99", "tpu"])
def test_unknown_device_lists_the_known_ones(name: str) -> None:
    with pytest.raises(BackendUnavailableError) as caught:
        resolve_device(name)
    assert all(known in str(caught.value) for known in available_devices())


def test_on_the_cpu_weights_stay_the_same_records(weights: ModelWeights) -> None:
    assert place_weights(weights, torch.device("cpu")) is weights


def test_every_tensor_moves(weights: ModelWeights) -> None:
    moved = place_weights(weights, torch.device("meta"))
    before, after = tensors(weights), tensors(moved)
    assert [t.shape for t in after] == [t.shape for t in before]
    assert {t.device.type for t in after} == {"meta"}


def test_resident_bytes_leave_out_views_of_the_file(weights: ModelWeights) -> None:
    total = sum(tensor.numel() * tensor.element_size() for tensor in tensors(weights))
    matrices = sum(t.nbytes for t in tensors(weights) if t.dtype in (torch.bfloat16, torch.uint8))
    assert resident_bytes(weights) == total - matrices

"""The memory plan of a model on a GPU: everything is there, and the figures are what is made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from pathlib import Path

import pytest
import torch
from tiny_model import tiny_config

from edgedsv4.config import EngineOptions
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.model.gpu_network import DeviceNetwork, NetworkLoader
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.device_weights import FALLBACK, device_weight_items
from edgedsv4.runtime.expert_store import MappedExperts
from edgedsv4.runtime.memory_plan import (
    DRAFT,
    EXPERTS,
    SCORE_BYTES,
    TILE_BYTES,
    device_workspace_bytes,
    plan_memory,
)
from edgedsv4.runtime.shipped_models import model_path

GIB = 1 << 30
STRUCTURE = Path(__file__).parents[2] / "data" / "structure" / "official"
WEIGHTS = {"attention": GIB, EXPERTS: 20 * GIB, DRAFT: 2 * GIB}


def loaded(path: Path) -> tuple[dict[str, int], DeviceNetwork]:
    """Planned bytes, and the network as it is copied to a device."""
    with open_checkpoint(path) as checkpoint:
        bound = bind_weights(checkpoint)
        weights, experts = load_weights(bound)
        device = torch.device("cpu")
        loader = NetworkLoader(bound.config, device, FALLBACK)
        source = MappedExperts(experts, device)
        return device_weight_items(bound), loader.load(weights, source)


def tensors(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of some records."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        yield from (tensor for part in value for tensor in tensors(part))
    elif is_dataclass(value):
        yield from (t for field in fields(value) for t in tensors(getattr(value, field.name)))


def test_planned_weights_are_those_of_the_network() -> None:
    with model_path("random-tiny") as path:
        planned, network = loaded(path)
    banks = [m for part, m in network.matrices() if part == EXPERTS]
    assert planned[EXPERTS] == sum(plane.nbytes for bank in banks for plane in bank.planes)
    assert sum(planned.values()) == sum(tensor.nbytes for tensor in tensors(network))


def test_planned_weights_of_an_official_checkpoint_are_those_of_the_network() -> None:
    planned, network = loaded(STRUCTURE)
    assert sum(planned.values()) == sum(tensor.nbytes for tensor in tensors(network))


def test_routed_experts_have_to_fit() -> None:
    def plan(available: int, *, on_gpu: bool) -> bool:
        found = plan_memory(
            tiny_config(), WEIGHTS, EngineOptions(), available_bytes=available, on_gpu=on_gpu
        )
        return found.fits

    assert plan(20 * GIB, on_gpu=False)
    assert not plan(20 * GIB, on_gpu=True)
    assert plan(22 * GIB + device_workspace_bytes(tiny_config(), 256), on_gpu=True)


def test_experts_are_what_does_not_fit() -> None:
    plan = plan_memory(
        tiny_config(), WEIGHTS, EngineOptions(), available_bytes=20 * GIB, on_gpu=True
    )
    assert plan.limiting_item == EXPERTS
    assert plan.largest_context == 0


@pytest.mark.parametrize(("draft", "is_required"), [(0, False), (2, True)])
def test_draft_block_is_there_when_it_drafts(draft: int, is_required: bool) -> None:
    plan = plan_memory(
        tiny_config(num_draft_layers=1),
        WEIGHTS,
        EngineOptions(draft=draft),
        available_bytes=99 * GIB,
        on_gpu=True,
    )
    assert {item.is_required for item in plan.items if item.name == DRAFT} == {is_required}
    assert all(item.is_required for item in plan.items if item.name != DRAFT)


def test_workspace_grows_with_the_chunk_alone() -> None:
    config = tiny_config(max_context=1 << 20)
    longer = replace(config, max_context=1 << 24)
    assert device_workspace_bytes(config, 256) == device_workspace_bytes(longer, 256)
    sizes = [device_workspace_bytes(config, chunk) for chunk in (1, 64, 256, 4096)]
    assert sizes == sorted(set(sizes))
    assert sizes[0] >= 3 * TILE_BYTES


def test_workspace_of_the_exact_profile_is_larger() -> None:
    config = tiny_config()
    assert device_workspace_bytes(config, 256, "exact") > device_workspace_bytes(config, 256)


def test_scores_have_a_bound() -> None:
    config = tiny_config(max_context=1 << 24)
    grown = device_workspace_bytes(config, 4096) - device_workspace_bytes(config, 2048)
    assert grown < SCORE_BYTES

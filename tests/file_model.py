"""A `Model` from a checkpoint file, and the same model with all its matrices decoded beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from memory_model import computed_by

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.formats.checkpoint import open_checkpoint
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.weights import ExpertWeights, load_weights

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig, Profile
    from edgedsv4.model.model import Model
    from edgedsv4.model.moe import ExpertSource


def open_model(
    path: Path,
    *,
    profile: Profile = "exact",
    dtype: torch.dtype = torch.float32,
    backend: str = "reference",
) -> Model:
    """A CPU model over a GGUF file or an official directory."""
    numerics = Numerics(profile=profile, dtype=dtype, device=torch.device("cpu"))
    with open_checkpoint(path) as checkpoint:
        weights, experts = load_weights(checkpoint)
        # The model outlives the checkpoint: its matrices keep the mapping alive.
        source = LoadedExperts(experts, checkpoint.config)
        return computed_by(backend, checkpoint.config, weights, source, numerics)


def expert_layers(config: ModelConfig) -> range:
    """Layers with routed experts, draft block included."""
    return range(config.num_layers + config.num_draft_layers)


class LoadedExperts:
    """Routed experts looked up once, so that they outlive their checkpoint."""

    def __init__(self, experts: ExpertSource, config: ModelConfig) -> None:
        ids = range(config.num_experts)
        self._layers = [list(experts.fetch(layer, ids)) for layer in expert_layers(config)]

    is_resident = True

    def check_unchanged(self) -> None:
        """Nobody writes to the files of a test."""

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Weights of some experts of one layer."""
        return [self._layers[layer][expert] for expert in expert_ids]

    def decoded(self) -> LoadedExperts:
        """The same experts as float32 matrices."""
        result = object.__new__(LoadedExperts)
        result._layers = [[decoded(e) for e in layer] for layer in self._layers]
        return result


def decoded(weights: Any) -> Any:
    """Weight records with every matrix replaced by its float32 values."""
    if isinstance(weights, QuantMatrix):
        data = dequantize(weights).contiguous()
        kind = BLOCK_TYPES["F32"]
        return QuantMatrix(kind, weights.rows, weights.columns, data.view(torch.uint8))
    if isinstance(weights, tuple):
        return tuple(decoded(item) for item in weights)
    if is_dataclass(weights) and not isinstance(weights, type):
        changes = {f.name: decoded(getattr(weights, f.name)) for f in fields(weights)}
        return replace(weights, **changes)
    return weights


def decoded_model(model: Model) -> Model:
    """The same model computing with float32 copies of its matrices, under the same backend."""
    assert isinstance(model.experts, LoadedExperts)
    experts = model.experts.decoded()
    return type(model)(model.config, decoded(model.weights), experts, model.numerics)


def values_of(model: Model) -> dict[str, torch.Tensor]:
    """Every weight of a model as numbers, by the path of its record."""
    found = dict(_values("weights", model.weights))
    for layer in expert_layers(model.config):
        experts = model.experts.fetch(layer, range(model.config.num_experts))
        found |= dict(_values(f"experts[{layer}]", tuple(experts)))
    return found


def _values(path: str, record: Any) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(record, QuantMatrix):
        yield path, dequantize(record)
    elif isinstance(record, torch.Tensor):
        yield path, record
    elif isinstance(record, tuple):
        for index, item in enumerate(record):
            yield from _values(f"{path}[{index}]", item)
    elif is_dataclass(record) and not isinstance(record, type):
        for field in fields(record):
            yield from _values(f"{path}.{field.name}", getattr(record, field.name))

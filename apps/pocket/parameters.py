"""The weights of a network: which there are, how they start, and their names in a checkpoint.

Names are the official ones; the routed experts of a layer are stacked while they are trained
(`layers.N.ffn.experts.w1` [E, F, D]) and lie one by one in a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.model.weight_names import (
    DRAFT_ROWS,
    EXPERT_ROWS,
    LAYER_ROWS,
    ROOT_ROWS,
    Kind,
    LayerTraits,
    dimensions,
)

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig

INITIAL_DEVIATION = 0.02
_STACKED = ".ffn.experts."


def weight_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every weight, routed experts stacked; expert tables and biases included."""
    shapes = {row.official: _shape(row.dims, config, 0) for row in ROOT_ROWS}
    for layer in range(config.num_layers):
        shapes |= _layer_shapes(config, f"layers.{layer}", LayerTraits.of(config, layer))
    if config.num_draft_layers:
        shapes |= {f"mtp.0.{row.official}": _shape(row.dims, config, 0) for row in DRAFT_ROWS}
        shapes |= _layer_shapes(config, "mtp.0", LayerTraits.of(config, config.num_layers))
    return shapes


def _layer_shapes(
    config: ModelConfig, place: str, traits: LayerTraits
) -> dict[str, tuple[int, ...]]:
    shapes = {
        f"{place}.{row.official}": _shape(row.dims, config, traits.ratio)
        for row in LAYER_ROWS
        if row.present(traits)
    }
    for row in EXPERT_ROWS:
        stack = (config.num_experts, *_shape(row.dims, config, 0))
        shapes[f"{place}{_STACKED}{row.role}"] = stack
    return shapes


def _shape(dims: Sequence[str], config: ModelConfig, ratio: int) -> tuple[int, ...]:
    sizes = dimensions(config, ratio)
    return tuple(sizes[name] for name in dims)


def table_names() -> frozenset[str]:
    """Ends of the names that are integers."""
    return frozenset(row.official for row in LAYER_ROWS if row.kind is Kind.TABLE)


def is_trained(name: str) -> bool:
    """Whether gradients change this weight; the others are expert tables and selection biases."""
    return not name.endswith(("gate.bias", "gate.tid2eid"))


def initial_weights(
    config: ModelConfig, seed: int, tables: Sequence[npt.ArrayLike] | npt.NDArray[np.int32]
) -> dict[str, Tensor]:
    """Weights before training, float32 on the CPU.

    Matrices are normal with deviation 0.02, those that write into the residual streams smaller by
    sqrt(2 * layers); norms and mix scales 1; sinks, biases and mix bases 0.

    Args:
        config: shape of the model.
        seed: of torch's generator.
        tables: [V, k] expert ids, one per hash layer.
    """
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if name.endswith("gate.tid2eid"):
            layer = int(name.split(".")[1])
            weights[name] = torch.from_numpy(np.array(tables[layer], dtype=np.int64))
            continue
        leaf = name.removesuffix(".weight").rpartition(".")[2]
        if leaf.endswith("norm") or leaf.endswith("_scale"):
            weights[name] = torch.ones(shape)
        elif leaf in ("attn_sink", "ape", "bias") or leaf.endswith("_base"):
            weights[name] = torch.zeros(shape)
        else:
            deviation = INITIAL_DEVIATION
            if leaf in ("wo_b", "w2"):
                deviation /= math.sqrt(2 * config.num_layers)
            weights[name] = torch.randn(shape, generator=generator) * deviation
    return weights


def to_official(weights: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Every weight under the name it has in a checkpoint, experts one by one."""
    for name, weight in weights.items():
        if _STACKED not in name:
            yield name, weight
            continue
        place, _, part = name.rpartition(".")
        for expert, matrix in enumerate(weight):
            yield f"{place}.{expert}.{part}.weight", matrix


def from_official(config: ModelConfig, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a checkpoint, experts stacked; float32, tables int64.

    Args:
        config: shape of the model.
        tensors: by official name.

    Raises:
        ShapeError: if one is missing or has another shape.
    """
    weights: dict[str, Tensor] = {}
    for name, shape in weight_shapes(config).items():
        if _STACKED in name:
            place, _, part = name.rpartition(".")
            names = [f"{place}.{expert}.{part}.weight" for expert in range(shape[0])]
            found = [_found(tensors, each, shape[1:]) for each in names]
            weights[name] = torch.stack(found)
        else:
            weights[name] = _found(tensors, name, shape)
    return weights


def _found(tensors: Mapping[str, Tensor], name: str, shape: tuple[int, ...]) -> Tensor:
    tensor = tensors.get(name)
    if tensor is None or tuple(tensor.shape) != shape:
        found = "nothing" if tensor is None else str(list(tensor.shape))
        raise ShapeError(f"weights: {name} is {found}, expected {list(shape)}")
    return tensor.to(torch.float32) if tensor.is_floating_point() else tensor.to(torch.int64)

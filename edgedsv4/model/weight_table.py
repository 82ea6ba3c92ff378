"""Finds every weight of a model in a checkpoint and checks its shape, type and scales, once.

All faults of a file come in one error: a user who holds the wrong file sees that at a glance, and
one who holds a damaged file sees how much is missing. Only the expert tables of hash layers are
read; every other check is on headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final, NamedTuple

from edgedsv4.formats.faults import FaultList
from edgedsv4.model.bound_weights import BoundExperts, BoundTensor, BoundWeights
from edgedsv4.model.weight_binder import Place, WeightBinder
from edgedsv4.model.weight_names import (
    DRAFT_ROWS,
    LAYER_ROWS,
    ROOT_ROWS,
    LayerTraits,
    WeightRow,
    dimensions,
)

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.checkpoint import Checkpoint

_NAMED_UNKNOWN: Final = 3
_UNUSED_PREFIXES: Final = ("mtp.0.emb.", "mtp.0.head.")
_UNUSED_SUFFIXES: Final = (
    ".input_scale",
    ".nextn.embed_tokens.weight",
    ".nextn.shared_head_head.weight",
)


class WeightLine(NamedTuple):
    """One line of `weight_report`."""

    role: str
    name: str
    """Name in the file; per-expert tensors of a layer are summed up under a `*`."""
    block_type: str
    nbytes: int
    """Bytes on disk, block scales included."""


def bind_weights(checkpoint: Checkpoint) -> BoundWeights:
    """Match the tensors of a checkpoint with the roles its configuration asks for.

    Args:
        checkpoint: an opened model; its dialect is taken from `kind`.

    Raises:
        FormatError: tensors are missing, have another shape, a type their role cannot use, or
            unusable scales, or an
            expert table names experts that do not exist. All of them are listed.
    """
    faults = FaultList(checkpoint.path)
    binder = WeightBinder(checkpoint.tensors, faults, is_gguf=checkpoint.kind == "gguf")
    config = checkpoint.config
    tensors: dict[str, BoundTensor] = {}
    experts: list[BoundExperts] = []
    root = Place("", gguf=("",), official=("",), transformers=("",))
    _bind_rows(binder, tensors, root, ROOT_ROWS, dimensions(config, 0))
    for layer in range(config.num_layers):
        _bind_layer(binder, tensors, experts, config, layer)
    if config.num_draft_layers:
        place = binder.draft_place(config.num_layers)
        dims = dimensions(config, 0)
        joined = binder.joined_projections(place, config.hidden_size)
        tensors |= joined or {}
        rest = DRAFT_ROWS if joined is None else DRAFT_ROWS[2:]
        _bind_rows(binder, tensors, place, rest, dims)
        _bind_layer(binder, tensors, experts, config, config.num_layers)
    faults.raise_if_any("the tensors do not fit the configuration")
    return BoundWeights(config, tensors, tuple(experts), tuple(_unknown(checkpoint, binder.used)))


def weight_report(checkpoint: Checkpoint) -> list[WeightLine]:
    """Every weight of a checkpoint with its storage, in network order.

    Raises:
        FormatError: as `bind_weights`.
    """
    bound = bind_weights(checkpoint)
    lines = [
        WeightLine(role, tensor.record.name, tensor.block_type.name, tensor.nbytes)
        for role, tensor in bound.tensors.items()
    ]
    for layer, experts in enumerate(bound.experts):
        place = "draft" if layer == bound.config.num_layers else f"layers.{layer}"
        lines += [
            _expert_line(f"{place}.ffn.experts.{name}", matrices)
            for name, matrices in (("w1", experts.w1), ("w3", experts.w3), ("w2", experts.w2))
        ]
    return lines


def _expert_line(role: str, matrices: tuple[BoundTensor, ...]) -> WeightLine:
    name = matrices[0].record.name
    if len(matrices) > 1:
        name = name.replace(".experts.0.", ".experts.*.")
    types = sorted({matrix.block_type.name for matrix in matrices})
    return WeightLine(role, name, "+".join(types), sum(matrix.nbytes for matrix in matrices))


def _bind_layer(
    binder: WeightBinder,
    tensors: dict[str, BoundTensor],
    experts: list[BoundExperts],
    config: ModelConfig,
    layer: int,
) -> None:
    traits = LayerTraits.of(config, layer)
    dims = dimensions(config, traits.ratio)
    is_draft = layer == config.num_layers
    place = binder.draft_place(layer) if is_draft else binder.layer_place(layer)
    rows = tuple(row for row in LAYER_ROWS if row.present(traits))
    _bind_rows(binder, tensors, place, rows, dims)
    if traits.is_hash:
        binder.check_table(tensors.get(f"{place.role}ffn.gate.tid2eid"), config.num_experts)
    bound = binder.experts(place, dims)
    if bound is not None:
        experts.append(bound)


def _bind_rows(
    binder: WeightBinder,
    tensors: dict[str, BoundTensor],
    place: Place,
    rows: tuple[WeightRow, ...],
    dims: Mapping[str, int],
) -> None:
    for row in rows:
        bound = binder.weight(row, place, dims)
        if bound is not None:
            tensors[place.role + row.role] = bound


def _unknown(checkpoint: Checkpoint, used: set[str]) -> list[str]:
    """One sentence about tensors that no role asked for."""
    skip_mtp = not checkpoint.config.num_draft_layers
    unknown = [
        name
        for name in checkpoint.tensors
        if name not in used
        and not name.endswith(_UNUSED_SUFFIXES)
        and not name.startswith(_UNUSED_PREFIXES)
        and not (skip_mtp and name.startswith("mtp."))
    ]
    if not unknown:
        return []
    named = ", ".join(unknown[:_NAMED_UNKNOWN])
    more = f" and {len(unknown) - _NAMED_UNKNOWN} more" if len(unknown) > _NAMED_UNKNOWN else ""
    return [f"{len(unknown)} tensors are not used: {named}{more}"]

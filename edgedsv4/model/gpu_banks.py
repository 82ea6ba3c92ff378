"""Routed experts on a GPU: banks of slots, and which experts have one.

Where all experts fit, each layer has a bank of its own with the slot of an expert at its number.
Else all layers of the same block types share one bank: first the experts that live on the card, of
any layer, then two halves for those that only pass through it. A kernel that takes slots does not
know the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ConfigError
from edgedsv4.kernels.gpu.planes import DeviceMatrix, empty_bank, fill_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.quant_matmul import QuantMatrix
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import ExpertWeights

HALVES = 2


@dataclass(frozen=True, slots=True)
class ExpertBank:
    """Routed experts, slot by slot."""

    w1: DeviceMatrix
    """[slots * F, D]."""
    w3: DeviceMatrix
    """[slots * F, D]."""
    w2: DeviceMatrix
    """[slots * D, F]."""

    @property
    def matrices(self) -> tuple[DeviceMatrix, DeviceMatrix, DeviceMatrix]:
        """In the order of `ExpertWeights`: gate, up, down."""
        return self.w1, self.w3, self.w2


@dataclass(frozen=True, slots=True)
class ExpertPlacement:
    """Which experts live on the card, decided before anything is copied."""

    resident: tuple[tuple[int, ...], ...]
    """Ids of each layer, ascending; a draft block that is used is the last."""
    staged: int
    """Experts that pass through at a time: slots of each half."""

    def __post_init__(self) -> None:
        is_sorted = all(list(ids) == sorted(set(ids)) for ids in self.resident)
        if not is_sorted or self.staged < 1:
            raise ConfigError(
                f"a placement needs ascending ids and at least one staged expert, found {self}"
            )


@dataclass(frozen=True, slots=True, eq=False)
class SharedBank:
    """The slots of layers of the same block types."""

    experts: ExpertBank
    residents: int
    """Slots of experts that live here; the halves follow."""
    half: int
    """Slots of a half."""

    def first_of_half(self, half: int) -> int:
        """First slot of one of the two halves."""
        return self.residents + half * self.half


@dataclass(slots=True, eq=False)
class PlacedLayer:
    """The experts of one layer of which a part lives on the card."""

    layer: int
    """As an `ExpertSource` counts them."""
    bank: SharedBank
    places: Tensor
    """int32 [E] on the CPU: the slot of an expert, -1 for those that live elsewhere."""
    table: Tensor
    """The same on the device."""
    missing: tuple[int, ...]
    """Ids that live elsewhere, ascending."""

    @property
    def has_residents(self) -> bool:
        """Whether any expert lives on the card."""
        return len(self.missing) < self.places.numel()

    def vacate(self, goes: int) -> int:
        """Let an expert live elsewhere; its slot. No step may be under way."""
        slot = int(self.places[goes])
        if slot < 0:
            raise ConfigError(f"expert {goes} of layer {self.layer} has no slot on the card")
        self.places[goes] = -1
        self.settle()
        return slot

    def occupy(self, comes: int, slot: int) -> None:
        """Let an expert live in a free slot, to which it was copied. No step may be under way."""
        if int(self.places[comes]) >= 0:
            raise ConfigError(f"expert {comes} of layer {self.layer} has a slot on the card")
        self.places[comes] = slot
        self.settle()

    def settle(self) -> None:
        """Let everything follow `places`."""
        self.table.copy_(self.places)
        self.missing = missing_of(self.places)


def missing_of(places: Tensor) -> tuple[int, ...]:
    """Ids of experts that live elsewhere, ascending."""
    return tuple((places < 0).nonzero().flatten().tolist())


def runs_of(ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Stretches of neighbouring ids, as (first, count)."""
    first = None
    for place, expert in enumerate(ids):
        if first is None:
            first = expert
        is_last = place + 1 == len(ids) or ids[place + 1] != expert + 1
        if is_last:
            yield first, expert + 1 - first
            first = None


class PlacedExperts:
    """Makes the shared banks of a network and fills them.

    Args:
        config: shape of the model.
        source: of the experts.
        placement: which live on the card.
        device: the card.
        fallback: type into which weights without a kernel of their own are decoded.
        stacks: all experts of a layer below one another, where the file has them so.
    """

    def __init__(
        self,
        config: ModelConfig,
        source: ExpertSource,
        placement: ExpertPlacement,
        device: torch.device,
        fallback: str,
        stacks: Callable[[int], ExpertWeights | None],
    ) -> None:
        self._source = source
        self._stacks = stacks
        self._device = device
        self._count = config.num_experts
        self._placement = placement
        self._kinds: dict[tuple[object, ...], list[int]] = {}
        for layer in range(len(placement.resident)):
            kind = tuple(_kind(matrix) for matrix in self._typical(layer))
            self._kinds.setdefault(kind, []).append(layer)
        self._layers: dict[int, PlacedLayer] = {}
        for layers in self._kinds.values():
            self._add_bank(layers, fallback)

    def fill(self, layer: int) -> PlacedLayer:
        """Copy the experts of a layer that live on the card."""
        placed = self._layers[layer]
        ids = self._placement.resident[layer]
        stack = self._stacks(layer)
        for first, count in runs_of(ids):
            slot = int(placed.places[first])
            if stack is None:
                for place in range(count):
                    (expert,) = self._source.fetch(layer, (first + place,))
                    copy_expert(placed.bank.experts, slot + place, expert)
                continue
            for bank, whole in zip(
                placed.bank.experts.matrices, (stack.w1, stack.w3, stack.w2), strict=True
            ):
                rows = whole.rows // self._count
                part = whole.data[first * rows : (first + count) * rows]
                fill_rows(bank, slot * rows, replace(whole, rows=count * rows, data=part))
        return placed

    def _typical(self, layer: int) -> list[QuantMatrix]:
        """A matrix of each role that needs what any of the layer's does.

        Files may have one factor per expert, 1 for some of them.
        """
        ids = tuple(range(self._count)) if self._stacks(layer) is None else (0,)
        experts = self._source.fetch(layer, ids)
        roles = ([e.w1 for e in experts], [e.w3 for e in experts], [e.w2 for e in experts])
        return [next((m for m in role if m.tensor_scale != 1.0), role[0]) for role in roles]

    def _add_bank(self, layers: list[int], fallback: str) -> None:
        """One bank for some layers, its slots given out in order."""
        resident = self._placement.resident
        residents, half = sum(len(resident[layer]) for layer in layers), self._placement.staged
        made = (
            _empty(residents + HALVES * half, matrix, self._device, fallback)
            for matrix in self._typical(layers[0])
        )
        bank = SharedBank(ExpertBank(*made), residents, half)
        slot = 0
        for layer in layers:
            ids = resident[layer]
            places = torch.full((self._count,), -1, dtype=torch.int32)
            if ids:
                places[list(ids)] = torch.arange(slot, slot + len(ids), dtype=torch.int32)
            slot += len(ids)
            table = places.to(self._device, copy=True)
            self._layers[layer] = PlacedLayer(layer, bank, places, table, missing_of(places))


def copy_expert(bank: ExpertBank, slot: int, expert: ExpertWeights) -> None:
    """Write an expert into a slot."""
    for matrix, weight in zip(bank.matrices, (expert.w1, expert.w3, expert.w2), strict=True):
        fill_rows(matrix, slot * weight.rows, weight)


def _kind(matrix: QuantMatrix) -> tuple[object, ...]:
    """What matrices of one bank have in common."""
    is_scaled = matrix.tensor_scale != 1.0
    return matrix.block_type.name, matrix.rows, matrix.columns, matrix.scale_block, is_scaled


def _empty(slots: int, matrix: QuantMatrix, device: torch.device, fallback: str) -> DeviceMatrix:
    name = matrix.block_type.name
    is_scaled = matrix.tensor_scale != 1.0 and name != "NVFP4"
    return empty_bank(
        fallback if is_scaled else name,
        slots,
        matrix.rows,
        matrix.columns,
        device,
        fallback=fallback,
        scale_cols=matrix.scale_block[1] if name == "FP8_E4M3" else 128,
    )

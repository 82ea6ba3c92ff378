"""The weights of a network on a GPU, arranged for its kernels.

Everything that multiplies the same input is one list of products: matrices of one block type are
stacked, so that a list is one launch with few types in it. The routed experts of a layer are three
banks of slots (`gpu_banks`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.kernels.gpu.planes import (
    DeviceMatrix,
    device_matrix,
    empty_bank,
    stack_rows,
)
from edgedsv4.model.gpu_banks import (
    ExpertBank,
    ExpertPlacement,
    PlacedExperts,
    PlacedLayer,
    copy_expert,
)
from edgedsv4.model.layer_plan import LayerPlan, draft_plan, layer_plans

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.kernels.quant_matmul import QuantMatrix
    from edgedsv4.model.gpu_hybrid import HybridExperts
    from edgedsv4.model.moe import ExpertSource
    from edgedsv4.model.weights import (
        CompressorWeights,
        ExpertWeights,
        HyperWeights,
        LayerWeights,
        ModelWeights,
    )

Progress = Callable[[int, int], None]
"""Called with (layers done, layers in all)."""
Stacks = Callable[[int], "ExpertWeights | None"]
"""All experts of a layer as three tall matrices, None where the file has them apart."""


def _no_stacks(_layer: int) -> ExpertWeights | None:
    return None


@dataclass(frozen=True, slots=True)
class Products:
    """Matrices that multiply one input, stacked by block type; the results stand side by side."""

    matrices: tuple[DeviceMatrix, ...]
    columns: Mapping[str, slice]
    """Where each result stands in a row of the output."""

    @property
    def width(self) -> int:
        """Columns of the output."""
        return sum(matrix.rows for matrix in self.matrices)


@dataclass(frozen=True, slots=True)
class DeviceHyper:
    """Hyper-connection parameters of one sublayer or head, float32."""

    fn: Tensor
    base: Tensor
    scale: Tensor


@dataclass(frozen=True, slots=True)
class DeviceCompressor:
    """What pools a window, besides its two products."""

    ape: Tensor
    """[m, s * c] float32."""
    norm: Tensor
    """[c] float32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceLayer:
    """One decoder layer."""

    plan: LayerPlan
    attn_norm: Tensor
    ffn_norm: Tensor
    hc_attn: DeviceHyper
    hc_ffn: DeviceHyper
    entrance: Products
    """Of the normalised input: `qr`, `kv`, and with compression `values`, `gates`, `index_values`,
    `index_gates`, `index_weights`."""
    q_norm: Tensor
    kv_norm: Tensor
    queries: Products
    """Of the low-rank query: `q`, `iq`."""
    compressor: DeviceCompressor | None
    indexer: DeviceCompressor | None
    sink: Tensor
    wo_a: DeviceMatrix
    wo_b: DeviceMatrix
    router: DeviceMatrix
    bias: Tensor | None
    expert_table: Tensor | None
    """[V, k] int32."""
    shared_w1: DeviceMatrix | None
    shared_w3: DeviceMatrix | None
    shared_w2: DeviceMatrix | None
    experts: ExpertBank
    """Of this layer alone, or where `placed` is set the one that it shares."""
    placed: PlacedLayer | None = None
    """None where every expert has the slot of its own number."""


@dataclass(frozen=True, slots=True)
class DeviceDraft:
    """The MTP block."""

    e_proj: DeviceMatrix
    h_proj: DeviceMatrix
    enorm: Tensor
    hnorm: Tensor
    norm: Tensor
    hc_head: DeviceHyper
    layer: DeviceLayer


@dataclass(frozen=True, slots=True)
class DeviceNetwork:
    """A network on one device."""

    embed: DeviceMatrix
    norm: Tensor
    head: DeviceMatrix
    hc_head: DeviceHyper
    layers: tuple[DeviceLayer, ...]
    draft: DeviceDraft | None
    hybrid: HybridExperts | None = None
    """Computes the routed experts of placed layers; None where there are none."""

    def matrices(self) -> Iterator[tuple[str, DeviceMatrix]]:
        """Every matrix with its part in the memory plan."""
        yield "embedding", self.embed
        yield "head", self.head
        layers = [*self.layers, *([] if self.draft is None else [self.draft.layer])]
        if self.draft is not None:
            yield from (("draft block", m) for m in (self.draft.e_proj, self.draft.h_proj))
        for layer in layers:
            dense = (*layer.entrance.matrices, *layer.queries.matrices, layer.wo_a, layer.wo_b)
            yield from (("attention", matrix) for matrix in dense)
            yield "routers", layer.router
            shared = (layer.shared_w1, layer.shared_w3, layer.shared_w2)
            yield from (("shared experts", matrix) for matrix in shared if matrix is not None)
            yield from (("routed experts", matrix) for matrix in layer.experts.matrices)

    def placed_layers(self) -> tuple[PlacedLayer, ...]:
        """Layers of which a part of the experts lives on the device, the draft block's last."""
        layers = [*self.layers, *([] if self.draft is None else [self.draft.layer])]
        return tuple(layer.placed for layer in layers if layer.placed is not None)

    def nbytes(self) -> int:
        """Bytes of all matrices."""
        planes = (plane for _, matrix in self.matrices() for plane in matrix.planes)
        sizes = {plane.data_ptr(): plane.numel() * plane.element_size() for plane in planes}
        return sum(sizes.values())


def side_by_side(parts: Sequence[tuple[str, DeviceMatrix]]) -> Products:
    """Matrices whose results stand side by side, each as it is."""
    columns: dict[str, slice] = {}
    at = 0
    for name, matrix in parts:
        columns[name] = slice(at, at + matrix.rows)
        at += matrix.rows
    return Products(tuple(matrix for _, matrix in parts), columns)


def stacked(parts: Sequence[tuple[str, DeviceMatrix]]) -> Products:
    """Stack the matrices of equal type; the order of types is that of their first part."""
    kinds: dict[tuple[str, int], list[tuple[str, DeviceMatrix]]] = {}
    for name, matrix in parts:
        kinds.setdefault((matrix.type, matrix.scale_cols), []).append((name, matrix))
    groups = [[matrix for _, matrix in group] for group in kinds.values()]
    columns = side_by_side([part for group in kinds.values() for part in group]).columns
    return Products(
        tuple(group[0] if len(group) == 1 else stack_rows(group) for group in groups), columns
    )


class NetworkLoader:
    """Copies a model's weights to a device.

    Args:
        config: shape of the model.
        device: where they go.
        fallback: block type into which weights without a kernel of their own are decoded.
        stacks: where experts lie together, which is copied faster than one by one.
        placement: which experts live on the device; None for all.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device,
        fallback: str,
        stacks: Stacks = _no_stacks,
        placement: ExpertPlacement | None = None,
    ) -> None:
        self._config = config
        self._placement = placement
        self._placed: PlacedExperts | None = None
        self._stacks = stacks
        self._device = device
        self._fallback = fallback

    def load(
        self,
        weights: ModelWeights,
        experts: ExpertSource,
        on_progress: Progress | None = None,
        *,
        has_draft: bool = True,
    ) -> DeviceNetwork:
        """Copy everything, the draft block only if wanted; `on_progress` may raise to stop."""
        config = self._config
        plans = layer_plans(config)
        block = weights.draft if has_draft else None
        total = len(plans) + (block is not None)
        if self._placement is not None:
            self._placed = PlacedExperts(
                config, experts, self._placement, self._device, self._fallback, self._stacks
            )
        layers = []
        for index, (layer, plan) in enumerate(zip(weights.layers, plans, strict=True)):
            layers.append(self._layer(layer, plan, experts))
            if on_progress is not None:
                on_progress(index + 1, total)
        draft = None
        if block is not None:
            draft = DeviceDraft(
                e_proj=self._matrix(block.e_proj),
                h_proj=self._matrix(block.h_proj),
                enorm=self._vector(block.enorm),
                hnorm=self._vector(block.hnorm),
                norm=self._vector(block.norm),
                hc_head=self._hyper(block.hc_head),
                layer=self._layer(block.layer, draft_plan(config), experts),
            )
        return DeviceNetwork(
            embed=self._matrix(weights.embed),
            norm=self._vector(weights.norm),
            head=self._matrix(weights.head),
            hc_head=self._hyper(weights.hc_head),
            layers=tuple(layers),
            draft=draft,
        )

    def _matrix(self, weight: QuantMatrix) -> DeviceMatrix:
        return device_matrix(weight, self._device, fallback=self._fallback)

    def _vector(self, values: Tensor) -> Tensor:
        return values.to(device=self._device, dtype=torch.float32).contiguous()

    def _hyper(self, hyper: HyperWeights) -> DeviceHyper:
        parts = (self._vector(part) for part in (hyper.fn, hyper.base, hyper.scale))
        return DeviceHyper(*parts)

    def _layer(self, layer: LayerWeights, plan: LayerPlan, experts: ExpertSource) -> DeviceLayer:
        attention, moe = layer.attention, layer.moe
        entrance = [("qr", attention.wq_a), ("kv", attention.wkv)]
        queries = [("q", attention.wq_b)]
        if attention.compressor is not None:
            entrance += [
                ("values", attention.compressor.wkv),
                ("gates", attention.compressor.wgate),
            ]
        if attention.indexer is not None:
            entrance += [
                ("index_values", attention.indexer.compressor.wkv),
                ("index_gates", attention.indexer.compressor.wgate),
                ("index_weights", attention.indexer.weights_proj),
            ]
            queries.append(("iq", attention.indexer.wq_b))
        indexer = None if attention.indexer is None else attention.indexer.compressor
        shared = [
            None if weight is None else self._matrix(weight)
            for weight in (moe.shared_w1, moe.shared_w3, moe.shared_w2)
        ]
        table = None
        if moe.expert_table is not None:
            table = moe.expert_table.to(device=self._device, dtype=torch.int32).contiguous()
        placed = None if self._placed is None else self._placed.fill(plan.layer)
        return DeviceLayer(
            plan=plan,
            attn_norm=self._vector(layer.attn_norm),
            ffn_norm=self._vector(layer.ffn_norm),
            hc_attn=self._hyper(layer.hc_attn),
            hc_ffn=self._hyper(layer.hc_ffn),
            entrance=stacked([(name, self._matrix(weight)) for name, weight in entrance]),
            q_norm=self._vector(attention.q_norm),
            kv_norm=self._vector(attention.kv_norm),
            queries=side_by_side([(name, self._matrix(weight)) for name, weight in queries]),
            compressor=self._compressor(attention.compressor),
            indexer=self._compressor(indexer),
            sink=self._vector(attention.sink),
            wo_a=self._matrix(attention.wo_a),
            wo_b=self._matrix(attention.wo_b),
            router=self._matrix(moe.router),
            bias=None if moe.bias is None else self._vector(moe.bias),
            expert_table=table,
            shared_w1=shared[0],
            shared_w3=shared[1],
            shared_w2=shared[2],
            experts=self._bank(plan.layer, experts) if placed is None else placed.bank.experts,
            placed=placed,
        )

    def _compressor(self, weights: CompressorWeights | None) -> DeviceCompressor | None:
        if weights is None:
            return None
        return DeviceCompressor(self._vector(weights.ape), self._vector(weights.norm))

    def _bank(self, layer: int, experts: ExpertSource) -> ExpertBank:
        stack = self._stacks(layer)
        if stack is not None:
            whole = (self._matrix(weight) for weight in (stack.w1, stack.w3, stack.w2))
            return ExpertBank(*whole)
        count = self._config.num_experts
        (first,) = experts.fetch(layer, (0,))
        made = (self._empty_bank(count, weight) for weight in (first.w1, first.w3, first.w2))
        bank = ExpertBank(*made)
        for expert_id in range(count):
            (expert,) = experts.fetch(layer, (expert_id,))
            copy_expert(bank, expert_id, expert)
        return bank

    def _empty_bank(self, slots: int, weight: QuantMatrix) -> DeviceMatrix:
        scale_cols = weight.scale_block[1] if weight.block_type.name == "FP8_E4M3" else 128
        return empty_bank(
            weight.block_type.name,
            slots,
            weight.rows,
            weight.columns,
            self._device,
            fallback=self._fallback,
            scale_cols=scale_cols,
        )

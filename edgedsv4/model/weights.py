"""The weights of one model as the forward sees them: matrices as stored, vectors in float32.

Every shape and type has been checked (`weight_table`) before a record of this module exists.
Matrices are `QuantMatrix` views of the mapped file, so loading copies only norms, biases and other
small parameters, and reads no more than those.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from edgedsv4.formats.faults import FaultList
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize, matrix_from_numpy
from edgedsv4.model.bound_weights import BoundExperts, BoundTensor, BoundWeights
from edgedsv4.model.weight_names import LayerTraits
from edgedsv4.model.weight_table import bind_weights

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.formats.expert_extents import Extent
    from edgedsv4.formats.mapped_file import MappedFile
    from edgedsv4.model.bound_weights import Bytes


_MAY_SWITCH_OFF = (".attn_sink", ".gate.bias")
"""Ends of the roles in which -inf has a meaning: no sink, an expert that is never chosen."""


@dataclass(frozen=True, slots=True)
class HyperWeights:
    """Hyper-connection parameters of one sublayer, or of a head; all float32."""

    fn: Tensor
    """[(2 + hc) * hc, hc * D] for a sublayer (pre, post, comb rows), [hc, hc * D] for a head."""
    base: Tensor
    """[(2 + hc) * hc], or [hc] for a head."""
    scale: Tensor
    """[3], or [1] for a head."""


@dataclass(frozen=True, slots=True)
class CompressorWeights:
    """Pools m tokens into one row of width c; coff is 2 (overlapping windows) for m = 4, else 1."""

    wkv: QuantMatrix
    """[coff * c, D]."""
    wgate: QuantMatrix
    """[coff * c, D]."""
    ape: Tensor
    """[m, coff * c] float32, added to the gate by position within the window."""
    norm: Tensor
    """[c] float32."""


@dataclass(frozen=True, slots=True)
class IndexerWeights:
    """The lightning indexer of a ratio-4 layer."""

    wq_b: QuantMatrix
    """[index_heads * index_dim, Rq]."""
    weights_proj: QuantMatrix
    """[index_heads, D]."""
    compressor: CompressorWeights
    """The indexer's own compressor, c = index_dim."""


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """Attention of one layer."""

    wq_a: QuantMatrix
    """[Rq, D]."""
    q_norm: Tensor
    """[Rq] float32."""
    wq_b: QuantMatrix
    """[H * d, Rq]."""
    wkv: QuantMatrix
    """[d, D]."""
    kv_norm: Tensor
    """[d] float32."""
    sink: Tensor
    """[H] float32, a raw logit per head."""
    wo_a: QuantMatrix
    """[G * Ro, (H / G) * d]; rows [g * Ro, (g + 1) * Ro) act on head group g only."""
    wo_b: QuantMatrix
    """[D, G * Ro]."""
    compressor: CompressorWeights | None
    """None where the ratio is 0."""
    indexer: IndexerWeights | None
    """None unless the ratio is 4."""


@dataclass(frozen=True, slots=True)
class MoeWeights:
    """Router and shared expert of one layer; the routed experts are in `RoutedExperts`."""

    router: QuantMatrix
    """[E, D]."""
    bias: Tensor | None
    """[E] float32, used for the selection only; None on hash layers."""
    expert_table: Tensor | None
    """[V, k] int64, expert ids by token id; None on layers that select by score."""
    shared_w1: QuantMatrix | None
    """[num_shared_experts * F, D]; the three are None in a model without a shared expert."""
    shared_w2: QuantMatrix | None
    """[D, num_shared_experts * F]."""
    shared_w3: QuantMatrix | None
    """[num_shared_experts * F, D]."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One decoder layer."""

    attn_norm: Tensor
    """[D] float32."""
    ffn_norm: Tensor
    """[D] float32."""
    hc_attn: HyperWeights
    hc_ffn: HyperWeights
    attention: AttentionWeights
    moe: MoeWeights


@dataclass(frozen=True, slots=True)
class DraftWeights:
    """The MTP block: a window-only layer fed with main streams and the next token."""

    e_proj: QuantMatrix
    """[D, D], applied to the normalised embedding."""
    h_proj: QuantMatrix
    """[D, D], applied to each normalised stream."""
    enorm: Tensor
    """[D] float32."""
    hnorm: Tensor
    """[D] float32."""
    norm: Tensor
    """[D] float32, before the (shared) head."""
    hc_head: HyperWeights
    """The block's own head mix, not the main model's."""
    layer: LayerWeights
    """Its routed experts are layer index L of `RoutedExperts`."""


@dataclass(frozen=True, slots=True)
class ModelWeights:
    """Everything but the routed experts."""

    embed: QuantMatrix
    """[V, D]."""
    norm: Tensor
    """[D] float32."""
    head: QuantMatrix
    """[V, D]."""
    hc_head: HyperWeights
    layers: tuple[LayerWeights, ...]
    draft: DraftWeights | None
    """None when the file holds no MTP block."""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """One routed expert: w2(silu(w1 x) * w3 x)."""

    w1: QuantMatrix
    """[F, D], the gate."""
    w3: QuantMatrix
    """[F, D], the up projection."""
    w2: QuantMatrix
    """[D, F], the down projection."""


class RoutedExperts:
    """The routed experts of every layer, looked up in the mapped file when they are asked for.

    The checkpoint must stay open as long as experts are asked for. The records of experts once used
    are kept (views, 4 KB each): making them anew costs more than 0.1 ms per expert and token.
    """

    def __init__(self, bound: BoundWeights) -> None:
        self._layers = bound.experts
        self._files = tuple(_files(experts) for experts in bound.experts)
        self._all_files = tuple(dict.fromkeys(file for files in self._files for file in files))
        self._known: dict[tuple[int, int], ExpertWeights] = {}

    @property
    def num_layers(self) -> int:
        """Layers with routed experts; an MTP block is the last."""
        return len(self._layers)

    @property
    def is_resident(self) -> bool:
        """Experts stay where they are in the mapping."""
        return True

    def check_unchanged(self) -> None:
        """Raise `FormatError` if a file that holds experts changed since it was opened."""
        for file in self._all_files:
            file.check_unchanged()

    def expert(self, layer: int, expert_id: int) -> ExpertWeights:
        """Views of one expert's matrices; nothing is read before they are used.

        Raises:
            IndexError: no such layer or expert.
            FormatError: the file changed since it was opened.
        """
        return self.fetch(layer, (expert_id,))[0]

    def fetch(self, layer: int, expert_ids: Sequence[int]) -> list[ExpertWeights]:
        """Views of some experts of one layer, in the order asked for; see `expert`."""
        for file in self._files[layer]:
            file.check_unchanged()
        return [self._record(layer, expert_id) for expert_id in expert_ids]

    @property
    def has_extents(self) -> bool:
        """Whether each matrix of every expert is one range of bytes, as `extents` needs it."""
        return all(experts.has_extents for experts in self._layers)

    @property
    def layers(self) -> tuple[BoundExperts, ...]:
        """Where the experts of each layer are."""
        return self._layers

    @property
    def files(self) -> tuple[MappedFile, ...]:
        """The files that hold experts, each once."""
        return self._all_files

    def form(self, layer: int) -> tuple[object, ...] | None:
        """What all experts of a layer have in common; see `BoundExperts.form`."""
        return self._layers[layer].form

    def experts_of(self, layer: int) -> int:
        """Routed experts of a layer."""
        return self._layers[layer].count

    def extents(self, layer: int, expert_id: int) -> tuple[Extent, ...]:
        """Where w1, w3, w2 of an expert lie, then their block scales where those are apart.

        Raises:
            IndexError: no such layer or expert.
        """
        return self._layers[layer].extents(expert_id)

    def over(self, layer: int, expert_id: int, parts: Sequence[Bytes]) -> ExpertWeights:
        """One expert's matrices over bytes that were read elsewhere, which are not copied.

        Args:
            layer: of the expert.
            expert_id: which one.
            parts: uint8, the bytes of each of its extents, in that order.

        Raises:
            IndexError: no such layer or expert.
            FormatError: a factor of a whole matrix is not finite, or its file changed.
        """
        bound = self._layers[layer].expert(expert_id)
        scales = iter(parts[len(bound) :])
        w1, w3, w2 = (
            matrix_from_numpy(
                part,
                tensor.block_type,
                tensor.rows,
                tensor.columns,
                None if tensor.scale is None else next(scales).reshape(tensor.scale.rows, -1),
                tensor.tensor_scale_value(),
            )
            for tensor, part in zip(bound, parts, strict=False)
        )
        return ExpertWeights(w1=w1, w3=w3, w2=w2)

    def stacks(self, layer: int) -> ExpertWeights | None:
        """All experts of a layer below one another, where the file has them so; else None.

        `w1` is then [E * F, D], and so on.

        Raises:
            FormatError: the file changed since it was opened.
        """
        experts = self._layers[layer]
        whole = [_stack(tensors, experts.count) for tensors in (experts.w1, experts.w3, experts.w2)]
        w1, w3, w2 = whole
        if w1 is None or w3 is None or w2 is None:
            return None
        return ExpertWeights(w1=_matrix(w1), w3=_matrix(w3), w2=_matrix(w2))

    def _record(self, layer: int, expert_id: int) -> ExpertWeights:
        known = self._known.get((layer, expert_id))
        if known is None:
            w1, w3, w2 = self._layers[layer].expert(expert_id)
            known = ExpertWeights(w1=_matrix(w1), w3=_matrix(w3), w2=_matrix(w2))
            self._known[layer, expert_id] = known
        return known


def _stack(tensors: tuple[BoundTensor, ...], count: int) -> BoundTensor | None:
    """A stacked tensor as one matrix; None for parts of one, with gaps or with scales apart."""
    tensor = tensors[0]
    is_whole = (
        len(tensor.shape) == 3
        and tensor.record.shape[1] == tensor.shape[1]
        and tensor.stored_columns == tensor.columns
        and tensor.scale is None
        and tensor.tensor_scale is None
        and not tensor.record.stride
    )
    if not is_whole:
        return None
    return replace(tensor, shape=(count * tensor.shape[1], tensor.shape[2]))


def _files(experts: BoundExperts) -> tuple[MappedFile, ...]:
    """The files that hold a layer's experts, each once."""
    tensors = (*experts.w1, *experts.w3, *experts.w2)
    records = [tensor.record for tensor in tensors]
    records += [tensor.scale.record for tensor in tensors if tensor.scale is not None]
    return tuple(dict.fromkeys(record.file for record in records))


def load_weights(source: Checkpoint | BoundWeights) -> tuple[ModelWeights, RoutedExperts]:
    """Make the weight records of a model.

    Args:
        source: an opened checkpoint, or its weights already bound.

    Returns:
        Everything but the routed experts, and those. Matrices point into the mapped file; those of
        the first part stay valid when the checkpoint is closed.

    Raises:
        FormatError: the tensors do not fit the configuration, a parameter is NaN or infinite (all
            faults are listed), or the file changed since it was opened.
    """
    bound = source if isinstance(source, BoundWeights) else bind_weights(source)
    roles = _Roles(bound)
    config = bound.config
    draft = None
    if config.num_draft_layers:
        draft = _draft(roles, LayerTraits.of(config, config.num_layers))
    weights = ModelWeights(
        embed=roles.matrix("embed"),
        norm=roles.parameter("norm"),
        head=roles.matrix("head"),
        hc_head=roles.hyper("hc_head"),
        layers=tuple(
            _layer(roles, f"layers.{index}.", LayerTraits.of(config, index))
            for index in range(config.num_layers)
        ),
        draft=draft,
    )
    roles.check()
    return weights, RoutedExperts(bound)


class _Roles:
    """Turns bound weights into tensors, by role."""

    def __init__(self, bound: BoundWeights) -> None:
        self._tensors = bound.tensors
        # The file of a tensor is only known with the tensor; a checkpoint has several.
        self._faults: FaultList | None = None

    def check(self) -> None:
        """Raise `FormatError` if a parameter asked for so far is NaN or infinite."""
        if self._faults is not None:
            self._faults.raise_if_any("the parameters are damaged")

    def matrix(self, role: str) -> QuantMatrix:
        return _matrix(self._tensors[role])

    def parameter(self, role: str) -> Tensor:
        """A float32 copy in the weight's own shape.

        One that is not finite is a fault: a bias or a scale can hide it behind a sigmoid or a
        selection, and the reply would look sound.
        """
        bound = self._tensors[role]
        values = dequantize(_matrix(bound)).reshape(bound.shape).clone()
        is_sound = torch.isfinite(values)
        if role.endswith(_MAY_SWITCH_OFF):
            is_sound |= torch.isneginf(values)
        if not bool(is_sound.all()):
            place = int(is_sound.flatten().logical_not().nonzero()[0])
            found = float(values.flatten()[place])
            self._faults = self._faults or FaultList(bound.record.file.path)
            self._faults.add(f"tensor {bound.record.name} holds {found} at element {place}")
        return values

    def table(self, role: str) -> Tensor:
        """An int64 copy."""
        bound = self._tensors[role]
        kind = "<i8" if bound.block_type.name == "I64" else "<i4"
        ids = bound.record.data().view(kind).reshape(bound.shape)
        return torch.from_numpy(ids.astype(np.int64))

    def hyper(self, role: str) -> HyperWeights:
        return HyperWeights(
            fn=self.parameter(f"{role}_fn"),
            base=self.parameter(f"{role}_base"),
            scale=self.parameter(f"{role}_scale"),
        )

    def compressor(self, role: str) -> CompressorWeights:
        return CompressorWeights(
            wkv=self.matrix(f"{role}.wkv"),
            wgate=self.matrix(f"{role}.wgate"),
            ape=self.parameter(f"{role}.ape"),
            norm=self.parameter(f"{role}.norm"),
        )


def _matrix(bound: BoundTensor) -> QuantMatrix:
    return matrix_from_numpy(
        bound.data(),
        bound.block_type,
        bound.rows,
        bound.columns,
        None if bound.scale is None else bound.scale.data(),
        bound.tensor_scale_value(),
    )


def _layer(roles: _Roles, place: str, traits: LayerTraits) -> LayerWeights:
    return LayerWeights(
        attn_norm=roles.parameter(f"{place}attn_norm"),
        ffn_norm=roles.parameter(f"{place}ffn_norm"),
        hc_attn=roles.hyper(f"{place}hc_attn"),
        hc_ffn=roles.hyper(f"{place}hc_ffn"),
        attention=_attention(roles, f"{place}attn", traits),
        moe=_moe(roles, f"{place}ffn", traits),
    )


def _attention(roles: _Roles, place: str, traits: LayerTraits) -> AttentionWeights:
    compressor = indexer = None
    if traits.ratio:
        compressor = roles.compressor(f"{place}.compressor")
    if traits.ratio == 4:
        indexer = IndexerWeights(
            wq_b=roles.matrix(f"{place}.indexer.wq_b"),
            weights_proj=roles.matrix(f"{place}.indexer.weights_proj"),
            compressor=roles.compressor(f"{place}.indexer.compressor"),
        )
    return AttentionWeights(
        wq_a=roles.matrix(f"{place}.wq_a"),
        q_norm=roles.parameter(f"{place}.q_norm"),
        wq_b=roles.matrix(f"{place}.wq_b"),
        wkv=roles.matrix(f"{place}.wkv"),
        kv_norm=roles.parameter(f"{place}.kv_norm"),
        sink=roles.parameter(f"{place}.attn_sink"),
        wo_a=roles.matrix(f"{place}.wo_a"),
        wo_b=roles.matrix(f"{place}.wo_b"),
        compressor=compressor,
        indexer=indexer,
    )


def _moe(roles: _Roles, place: str, traits: LayerTraits) -> MoeWeights:
    def shared(name: str) -> QuantMatrix | None:
        return roles.matrix(f"{place}.shared_experts.{name}") if traits.has_shared else None

    return MoeWeights(
        router=roles.matrix(f"{place}.gate"),
        bias=None if traits.is_hash else roles.parameter(f"{place}.gate.bias"),
        expert_table=roles.table(f"{place}.gate.tid2eid") if traits.is_hash else None,
        shared_w1=shared("w1"),
        shared_w2=shared("w2"),
        shared_w3=shared("w3"),
    )


def _draft(roles: _Roles, traits: LayerTraits) -> DraftWeights:
    return DraftWeights(
        e_proj=roles.matrix("draft.e_proj"),
        h_proj=roles.matrix("draft.h_proj"),
        enorm=roles.parameter("draft.enorm"),
        hnorm=roles.parameter("draft.hnorm"),
        norm=roles.parameter("draft.norm"),
        hc_head=roles.hyper("draft.hc_head"),
        layer=_layer(roles, "draft.", traits),
    )

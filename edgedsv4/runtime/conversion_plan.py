"""Which tensors a converted model has: names, shapes and types, each with the way to its bytes.

The plan is made from the table of weights (`model/weight_names.py`), so a file of any dialect
becomes one with llama.cpp's names, and a weight that the table does not know is left out. Nothing
is read or computed before the tensor is written.

Source: llama.cpp `conversion/deepseek.py` for names and types; antirez/ds4 for `mtp.0.*`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import TYPE_CHECKING, Final

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.gguf_stream import StreamedTensor
from edgedsv4.model.weight_names import (
    DRAFT_JOINED,
    DRAFT_ROWS,
    EXPERT_ROWS,
    LAYER_ROWS,
    ROOT_ROWS,
    Kind,
    LayerTraits,
    WeightRow,
)
from edgedsv4.runtime.tensor_pieces import (
    Bytes,
    joined_pieces,
    raw_pieces,
    table_pieces,
    weight_pieces,
)

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights

_F32: Final = BLOCK_TYPES["F32"]
_SMALLER_BLOCKS: Final = ("Q8_0", "BF16")
_ROLES_OF_ROOT: Final = ("embed", "norm", "head")
# Small or sensitive matrices that published files keep in 16 bits; some quantize the compressors.
_KEPT_LEAVES: Final = ("ffn.gate", "weights_proj")
_COMPRESSOR_LEAVES: Final = ("compressor.wkv", "compressor.wgate")


class WeightClass(Enum):
    """Matrices that get their storage type together."""

    EXPERTS = "experts"
    """The routed experts, nearly all of a model's bytes."""
    DENSE = "dense"
    """Attention, index queries, shared experts and the MTP block's projections."""
    HEAD = "head"
    EMBED = "embed"
    COMPRESSORS = "compressors"
    """Projections of the compressors, the indexer's included."""
    KEPT = "kept"
    """The router and the index head weights; never quantized."""


TypeRule = Callable[[WeightClass, BlockType], BlockType]
"""Class and storage type of a matrix -> the type to write."""


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Tensors of the files to write."""

    main: tuple[StreamedTensor, ...]
    draft: tuple[StreamedTensor, ...]
    """Tensors of the MTP block's own file; empty when there is none."""
    notes: tuple[str, ...]
    """Every type that was not the one asked for."""

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.main, *self.draft))


def plan_conversion(
    bound: BoundWeights,
    rule: TypeRule,
    *,
    mtp: str,
    importance: Mapping[str, Tensor] | None = None,
) -> ConversionPlan:
    """Decide what to write.

    Args:
        bound: the weights of the source; its files must stay open until everything is written.
        rule: types of the matrices; parameters are always F32, expert tables I32.
        mtp: where the MTP block goes: `separate`, `inside` or `none`.
        importance: tensor name -> f32 [columns], or [experts, columns] for routed experts.

    Raises:
        ShapeError: an importance does not fit its tensor.
    """
    planner = _Planner(bound, rule, importance or {})
    has_draft = bound.config.num_draft_layers > 0
    main = [*planner.root(_ROLES_OF_ROOT), *planner.head_mix("", "output_hc_")]
    for layer in range(bound.config.num_layers):
        main += planner.layer(layer, f"layers.{layer}.", f"blk.{layer}.")
    draft: list[StreamedTensor] = []
    if has_draft and mtp == "inside":
        main += planner.draft_inside()
    elif has_draft and mtp == "separate":
        draft += planner.draft_file()
    return ConversionPlan(tuple(main), tuple(draft), planner.notes())


class _Planner:
    """Turns lines of the weight table into tensors to write."""

    def __init__(
        self, bound: BoundWeights, rule: TypeRule, importance: Mapping[str, Tensor]
    ) -> None:
        self._bound = bound
        self._rule = rule
        self._importance = importance
        self._replaced: Counter[tuple[str, str]] = Counter()

    def root(self, roles: tuple[str, ...]) -> Iterator[StreamedTensor]:
        """Embedding, last norm and head."""
        for row in ROOT_ROWS:
            if row.role in roles:
                yield from self._weight(row, self._bound.tensors[row.role], f"{row.gguf}.weight")

    def head_mix(self, place: str, prefix: str) -> Iterator[StreamedTensor]:
        """The three parameters that mix the streams before a head."""
        for row in ROOT_ROWS:
            if row.role.startswith("hc_head_"):
                name = f"{prefix}{row.role.removeprefix('hc_head_')}.weight"
                yield from self._weight(row, self._bound.tensors[f"{place}{row.role}"], name)

    def layer(self, index: int, place: str, prefix: str) -> Iterator[StreamedTensor]:
        """One decoder layer; index `num_layers` is the MTP block's."""
        traits = LayerTraits.of(self._bound.config, index)
        for row in (row for row in LAYER_ROWS if row.present(traits)):
            suffix = "bias" if row.gguf == "exp_probs_b" else "weight"
            name = f"{prefix}{row.gguf}.{suffix}"
            yield from self._weight(row, self._bound.tensors[f"{place}{row.role}"], name)
        for row in EXPERT_ROWS:
            yield from self._experts(index, row, f"{prefix}{row.gguf}.weight")

    def draft_inside(self) -> Iterator[StreamedTensor]:
        """The MTP block under ds4's names, which no other tensor of the file has."""
        yield from self.layer(self._bound.config.num_layers, "draft.", "mtp.0.")
        yield from self.head_mix("draft.", "mtp.0.hc_head_")
        for row in DRAFT_ROWS:
            if not row.role.startswith("hc_head"):
                name = f"mtp.0.{row.role}.weight"
                yield from self._weight(row, self._bound.tensors[f"draft.{row.role}"], name)

    def draft_file(self) -> Iterator[StreamedTensor]:
        """The MTP block as llama.cpp's file of its own, with the model's embedding and head."""
        index = self._bound.config.num_layers
        yield from self.root(_ROLES_OF_ROOT)
        yield from self.head_mix("draft.", "output_hc_")
        yield from self.layer(index, "draft.", f"blk.{index}.")
        halves = [self._bound.tensors[f"draft.{row.role}"] for row in DRAFT_ROWS[:2]]
        kind = self._fitting(self._rule(WeightClass.DENSE, halves[0].block_type), halves[0].columns)
        shape = (halves[0].rows, sum(half.columns for half in halves))
        name = f"blk.{index}.{DRAFT_JOINED}.weight"
        yield StreamedTensor(name, shape, kind, partial(joined_pieces, halves, kind))
        for row in DRAFT_ROWS[2:]:
            if not row.role.startswith("hc_head"):
                name = f"blk.{index}.{row.gguf}.weight"
                yield from self._weight(row, self._bound.tensors[f"draft.{row.role}"], name)

    def notes(self) -> tuple[str, ...]:
        """What was stored in another type than asked for."""
        return tuple(
            f"stored as {used} instead of {wanted}, because their rows are no multiple of"
            f" {BLOCK_TYPES[wanted].block_elements}: {count} tensors"
            for (wanted, used), count in self._replaced.items()
        )

    def _weight(self, row: WeightRow, bound: BoundTensor, name: str) -> Iterator[StreamedTensor]:
        if row.kind is Kind.TABLE:
            yield StreamedTensor(
                name, bound.shape, BLOCK_TYPES["I32"], partial(table_pieces, bound)
            )
            return
        kind, importance = _F32, None
        if row.kind is Kind.MATRIX:
            kind = self._fitting(self._rule(_class_of(row.role), bound.block_type), bound.columns)
            importance = self._importance_of(name, (bound.columns,))
        pieces = partial(weight_pieces, bound, kind, importance)
        yield StreamedTensor(name, bound.shape, kind, pieces)
        yield from _companion(bound, name, kind)

    def _experts(self, layer: int, row: WeightRow, name: str) -> Iterator[StreamedTensor]:
        experts = self._bound.experts[layer]
        place = ("w1", "w3", "w2").index(row.role)
        first = experts.expert(0)[place]
        wanted = self._rule(WeightClass.EXPERTS, first.block_type)
        kind = self._fitting(wanted, first.columns)
        count = experts.count
        importance = self._importance_of(name, (first.columns,), (count, first.columns))

        def pieces() -> Iterator[Bytes]:
            for index in range(count):
                own = importance
                if own is not None and own.dim() == 2:
                    own = own[index]
                yield from weight_pieces(experts.expert(index)[place], kind, own)

        yield StreamedTensor(name, (count, *first.shape), kind, pieces)
        yield from _companion(first, name, kind)

    def _importance_of(self, name: str, *shapes: tuple[int, ...]) -> Tensor | None:
        found = self._importance.get(name)
        if found is not None and tuple(found.shape) not in shapes:
            expected = " or ".join(str(list(shape)) for shape in shapes)
            raise ShapeError(
                f"the importance of tensor {name} must be {expected}, found {list(found.shape)}"
            )
        return None if found is None else found.float()

    def _fitting(self, wanted: BlockType, columns: int) -> BlockType:
        """The wanted type, or the nearest one whose blocks fit the rows."""
        if columns % wanted.block_elements == 0:
            return wanted
        used = next(
            BLOCK_TYPES[name]
            for name in _SMALLER_BLOCKS
            if columns % BLOCK_TYPES[name].block_elements == 0
        )
        self._replaced[wanted.name, used.name] += 1
        return used


def _class_of(role: str) -> WeightClass:
    if role in ("head", "embed"):
        return WeightClass(role)
    if role.endswith(_COMPRESSOR_LEAVES):
        return WeightClass.COMPRESSORS
    return WeightClass.KEPT if role.endswith(_KEPT_LEAVES) else WeightClass.DENSE


def _companion(bound: BoundTensor, name: str, kind: BlockType) -> Iterator[StreamedTensor]:
    """The factor of an NVFP4 matrix that keeps its type; others have it multiplied in."""
    scale = bound.tensor_scale
    if scale is None or kind != bound.block_type:
        return
    yield StreamedTensor(
        name.removesuffix(".weight") + ".scale",
        scale.shape or (1,),
        _F32,
        partial(raw_pieces, scale.data()),
    )

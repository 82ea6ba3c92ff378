"""Looks up one weight at a time: its names, its shape, its type and its scales.

Whatever does not fit becomes a fault and the search goes on, so that one pass finds everything.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, TypeVar

import numpy as np

from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.model.bound_weights import BlockScale, BoundExperts, BoundTensor
from edgedsv4.model.weight_names import DRAFT_JOINED, EXPERT_ROWS, Kind, WeightRow

if TYPE_CHECKING:
    from edgedsv4.formats.faults import FaultList
    from edgedsv4.formats.tensor_record import TensorRecord

T = TypeVar("T")

_FLOATS: Final = frozenset({"F32", "F16", "BF16"})
_TABLES: Final = frozenset({"I32", "I64"})
_NOT_WEIGHTS: Final = frozenset(
    ("I8", "I16", "I32", "I64", "U8", "U16", "U32", "U64", "BOOL", "E8M0", "FP8_E5M2", "F4")
)
_MATRICES: Final = frozenset(
    name for name, kind in BLOCK_TYPES.items() if kind.is_decodable and name not in _NOT_WEIGHTS
)
_PACKED: Final = frozenset({"I8", "U8"})
_FP4: Final = BLOCK_TYPES["FP4_E2M1"]
_FP4_GROUP: Final = 32
_SCALE_TYPES: Final = frozenset({"E8M0", "U8"})
_SCALE_SUFFIXES: Final = (".scale", ".weight_scale", ".weight_scale_inv")
_BLOCK_SIZES: Final = (128, 32)


@dataclass(frozen=True, slots=True)
class Place:
    """Where in the model a group of weights belongs: the prefixes of their roles and names."""

    role: str
    gguf: tuple[str, ...] = ()
    official: tuple[str, ...] = ()
    transformers: tuple[str, ...] = ()

    def names(self, row: WeightRow) -> Iterator[str]:
        """Every name the weight may have, the usual one first."""
        for prefix in self.gguf:
            if row.gguf == "exp_probs_b":
                yield f"{prefix}{row.gguf}.bias"
            yield f"{prefix}{row.gguf}.weight"
            yield f"{prefix}{row.gguf}"
        for prefix in self.official:
            yield f"{prefix}{row.official}"
            if self.gguf and not row.official.endswith(".weight"):
                yield f"{prefix}{row.official}.weight"
        if row.transformers:
            for prefix in self.transformers:
                yield f"{prefix}{row.transformers}"

    def fused_names(self, row: WeightRow) -> Iterator[str]:
        """Names of the larger matrix that may hold the weight."""
        if row.fused is None:
            return
        if row.fused.gguf is not None:
            for prefix in self.gguf:
                yield f"{prefix}{row.fused.gguf}.weight"
        for prefix in self.official:
            yield f"{prefix}{row.fused.official}"


class WeightBinder:
    """The tensors of one checkpoint, and which of them have been used."""

    def __init__(
        self, tensors: Mapping[str, TensorRecord], faults: FaultList, *, is_gguf: bool
    ) -> None:
        self._tensors = tensors
        self._faults = faults
        self._is_gguf = is_gguf
        self.used: set[str] = set()

    def layer_place(self, layer: int) -> Place:
        """Prefixes of a layer of the main model."""
        if self._is_gguf:
            return Place(f"layers.{layer}.", gguf=(f"blk.{layer}.",))
        prefix = f"layers.{layer}."
        return Place(prefix, official=(prefix,), transformers=(f"model.{prefix}",))

    def draft_place(self, layer: int) -> Place:
        """Prefixes of the MTP block, which llama.cpp numbers as the layer after the last."""
        if self._is_gguf:
            return Place("draft.", gguf=("mtp.0.", f"blk.{layer}."), official=("mtp.0.",))
        return Place("draft.", official=("mtp.0.",))

    def weight(self, row: WeightRow, place: Place, dims: Mapping[str, int]) -> BoundTensor | None:
        """Find and check one weight; None when it has a fault."""
        shape = tuple(dims[name] for name in row.dims)
        record = self._find(place.names(row))
        if record is not None:
            return self._bind(record, shape, row)
        record = self._find(place.fused_names(row))
        if record is not None:
            return self._bind_fused(record, shape, row, dims)
        self._missing(next(place.names(row)), shape, row.dims)
        return None

    def joined_projections(self, place: Place, width: int) -> dict[str, BoundTensor] | None:
        """`e_proj` and `h_proj` as the column halves of one tensor; None when not stored so."""
        record = self._find(f"{prefix}{DRAFT_JOINED}.weight" for prefix in place.gguf)
        if record is None:
            return None
        row = WeightRow("", ("hidden_size", "2 * hidden_size"), "", "", "")
        whole = self._bind(record, (width, 2 * width), row)
        roles = (f"{place.role}e_proj", f"{place.role}h_proj")
        if whole is None:
            return {}
        if width % whole.block_type.block_elements:
            self._faults.add(
                f"tensor {record.name} cannot be split: {width} columns are not a whole number of"
                f" {whole.block_type.name} blocks"
            )
            return {}
        return {
            role: replace(whole, shape=(width, width), first_column=index * width)
            for index, role in enumerate(roles)
        }

    def experts(self, place: Place, dims: Mapping[str, int]) -> BoundExperts | None:
        """Find and check the routed experts of a layer; None when one of them has a fault."""
        count = dims["num_experts"]
        found = {row.role: self._expert_matrices(row, place, dims) for row in EXPERT_ROWS}
        w1, w3, w2 = found["w1"], found["w3"], found["w2"]
        if w1 is None or w3 is None or w2 is None:
            return None
        return BoundExperts(w1=w1, w3=w3, w2=w2, count=count)

    def check_table(self, table: BoundTensor | None, num_experts: int) -> None:
        """Read an expert table and report an id that no expert has."""
        if table is None:
            return
        kind = "<i8" if table.block_type.name == "I64" else "<i4"
        ids = table.record.data().view(kind).reshape(table.shape)
        if int(ids.min()) >= 0 and int(ids.max()) < num_experts:
            return
        token, slot = (int(i) for i in np.argwhere((ids < 0) | (ids >= num_experts))[0])
        self._faults.add(
            f"tensor {table.record.name} sends token {token} to expert {ids[token, slot]},"
            f" expected 0..{num_experts - 1}"
        )

    def _find(self, names: Iterator[str]) -> TensorRecord | None:
        for name in names:
            record = self._tensors.get(name)
            if record is not None:
                self.used.add(name)
                return record
        return None

    def _expert_matrices(
        self, row: WeightRow, place: Place, dims: Mapping[str, int]
    ) -> tuple[BoundTensor, ...] | None:
        stacked = self._stacked(row, place, dims)
        if stacked is not None:
            return stacked or None
        matrices = []
        for index in range(dims["num_experts"]):
            single = Place("", official=tuple(f"{p}ffn.experts.{index}." for p in place.official))
            names = [*single.names(row), *single.fused_names(row)]
            if not any(name in self._tensors for name in names):
                # One fault per layer: a claim of 4096 experts must not become a loop.
                first = next(place.names(row)) if self._is_gguf else names[0]
                self._missing(first, tuple(dims[name] for name in row.dims), row.dims)
                return None
            matrices.append(self.weight(row, single, dims))
        sound = tuple(matrix for matrix in matrices if matrix is not None)
        return sound if len(sound) == len(matrices) else None

    def _stacked(
        self, row: WeightRow, place: Place, dims: Mapping[str, int]
    ) -> tuple[BoundTensor, ...] | None:
        """All experts in one tensor: None if there is no such tensor, empty if it has a fault."""
        shape = (dims["num_experts"], *(dims[name] for name in row.dims))
        stack_row = replace(row, dims=("num_experts", *row.dims))
        gguf = Place("", gguf=place.gguf)
        packed = [f"{prefix}ffn.experts.{row.official}" for prefix in place.official]
        record = self._find(iter([*gguf.names(stack_row), *packed]))
        if record is not None:
            bound = self._bind(record, shape, stack_row)
            return () if bound is None else (bound,)
        fused = [f"{prefix}mlp.experts.{row.transformers}" for prefix in place.transformers]
        record = self._find(iter([*gguf.fused_names(stack_row), *fused]))
        if record is None:
            return None
        bound = self._bind_fused(record, shape, stack_row, dims)
        return () if bound is None else (bound,)

    def _bind(
        self, record: TensorRecord, shape: tuple[int, ...], row: WeightRow
    ) -> BoundTensor | None:
        return self._bind_parts(record, shape, row, (shape[-2] if len(shape) > 1 else 1,), 0)

    def _bind_fused(
        self,
        record: TensorRecord,
        shape: tuple[int, ...],
        row: WeightRow,
        dims: Mapping[str, int],
    ) -> BoundTensor | None:
        fused = row.fused
        if fused is None:
            return self._bind(record, shape, row)
        parts = tuple(dims[name] for name in fused.dims)
        return self._bind_parts(record, shape, row, parts, fused.index)

    def _bind_parts(
        self,
        record: TensorRecord,
        shape: tuple[int, ...],
        row: WeightRow,
        parts: tuple[int, ...],
        index: int,
    ) -> BoundTensor | None:
        """Bind part `index` of a tensor whose rows are `parts`, one after the other."""
        block_type, stored = self._logical(record)
        whole = (*shape[:-2], sum(parts), shape[-1]) if len(shape) > 1 else shape
        if stored != whole and not (whole == (1,) and stored == ()):
            self._faults.add(
                f"tensor {record.name} is {self._shown(stored)},"
                f" expected {self._shown(whole)} ({', '.join(self._order(row.dims))})"
            )
            return None
        if not self._is_type_usable(record, block_type, row, len(shape)):
            return None
        bound = BoundTensor(record, block_type, shape, shape[-1], first_row=sum(parts[:index]))
        if block_type.name in ("FP8_E4M3", "FP4_E2M1"):
            scale = self._block_scale(record, block_type, parts, shape[-1], index)
            return None if scale is None else replace(bound, scale=scale)
        if self._is_gguf and row.kind is Kind.MATRIX:
            return self._with_tensor_scale(bound)
        return bound

    def _logical(self, record: TensorRecord) -> tuple[BlockType, tuple[int, ...]]:
        """Type and shape in elements: bytes with a scale beside them are packed FP4."""
        if record.block_type.name == "F4":
            return _FP4, record.shape
        is_packed = record.block_type.name in _PACKED and len(record.shape) == 2
        if is_packed and not self._is_gguf and self._scale_record(record) is not None:
            return _FP4, (record.shape[0], 2 * record.shape[1])
        return record.block_type, record.shape

    def _is_type_usable(
        self, record: TensorRecord, block_type: BlockType, row: WeightRow, rank: int
    ) -> bool:
        allowed, words = _MATRICES, "a weight type"
        if row.kind is Kind.TABLE:
            allowed, words = _TABLES, "I32 or I64"
        elif rank == 1:
            allowed, words = _FLOATS, "F32, F16 or BF16"
        if block_type.name in allowed:
            return True
        self._faults.add(
            f"tensor {record.name} is of type {block_type.name}, expected {words}"
            + (" (packed FP4 needs a scale tensor)" if block_type.name in _PACKED else "")
        )
        return False

    def _scale_record(self, record: TensorRecord) -> TensorRecord | None:
        stem = record.name.removesuffix(".weight")
        for suffix in _SCALE_SUFFIXES:
            scale = self._tensors.get(stem + suffix)
            if scale is not None:
                return scale
        return None

    def _block_scale(
        self,
        record: TensorRecord,
        block_type: BlockType,
        parts: tuple[int, ...],
        columns: int,
        index: int,
    ) -> BlockScale | None:
        scale = self._scale_record(record)
        if scale is None:
            name = record.name.removesuffix(".weight") + _SCALE_SUFFIXES[0]
            self._faults.add(f"tensor {name} is missing, scales of {record.name}")
            return None
        self.used.add(scale.name)
        if scale.block_type.name not in _SCALE_TYPES:
            self._faults.add(
                f"tensor {scale.name} is of type {scale.block_type.name}, expected E8M0"
            )
            return None
        rows = _scale_rows(block_type, parts, columns, scale.shape)
        if rows is None:
            self._faults.add(
                f"tensor {scale.name} is {self._shown(scale.shape)}, expected"
                f" {_expected_scale(block_type, parts, columns)}"
            )
            return None
        return BlockScale(scale, first_row=sum(rows[:index]), rows=rows[index])

    def _with_tensor_scale(self, bound: BoundTensor) -> BoundTensor | None:
        """Attach `X.scale` of a GGUF matrix `X.weight`: a float32 factor, or one per expert."""
        record = bound.record
        if not record.name.endswith(".weight"):
            return bound
        scale = self._tensors.get(record.name.removesuffix(".weight") + ".scale")
        if scale is None:
            return bound
        self.used.add(scale.name)
        experts = bound.shape[0] if len(bound.shape) == 3 else 1
        if scale.block_type.name != "F32" or scale.shape not in ((), (1,), (experts,)):
            self._faults.add(
                f"tensor {scale.name} is {scale.block_type.name} {self._shown(scale.shape)},"
                f" expected F32 [{experts}]"
            )
            return None
        return replace(bound, tensor_scale=scale)

    def _missing(self, name: str, shape: tuple[int, ...], dims: tuple[str, ...]) -> None:
        self._faults.add(
            f"tensor {name} is missing, expected {self._shown(shape)}"
            f" ({', '.join(self._order(dims))})"
        )

    def _shown(self, shape: tuple[int, ...]) -> str:
        return f"[{', '.join(str(size) for size in self._order(shape))}]"

    def _order(self, dims: tuple[T, ...]) -> tuple[T, ...]:
        """Dims in the order of the file's own format: GGUF writes the fastest one first."""
        return dims[::-1] if self._is_gguf else dims


def _scale_rows(
    block_type: BlockType, parts: tuple[int, ...], columns: int, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Rows of scales per part, or None when the shape fits no block size."""
    if len(shape) != 2:
        return None
    if block_type.name == "FP4_E2M1":
        fits = columns % _FP4_GROUP == 0 and shape == (sum(parts), columns // _FP4_GROUP)
        return parts if fits else None
    for size in _BLOCK_SIZES:
        rows = tuple(-(-part // size) for part in parts)
        if shape == (sum(rows), -(-columns // size)):
            return rows
    return None


def _expected_scale(block_type: BlockType, parts: tuple[int, ...], columns: int) -> str:
    if block_type.name == "FP4_E2M1":
        return f"[{sum(parts)}, {columns // _FP4_GROUP}] (one per {_FP4_GROUP} inputs)"
    rows = sum(-(-part // 128) for part in parts)
    return f"one per square block, [{rows}, {-(-columns // 128)}] for 128 x 128"

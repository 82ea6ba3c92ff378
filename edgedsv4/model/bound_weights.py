"""Weights that have been found and checked, still on disk: which rows of which tensor each role is.

A role may be a whole tensor, some rows of a fused one, half the columns of the MTP block's joined
projection, or one expert of a stack. `BoundTensor` says so and gives the bytes as a view; nothing
here knows torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import FormatError
from edgedsv4.formats.expert_extents import Extent

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.block_types import BlockType
    from edgedsv4.formats.tensor_record import TensorRecord

Bytes = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class BlockScale:
    """The power-of-two scales of an FP8 or FP4 matrix, E8M0 bytes."""

    record: TensorRecord
    first_row: int
    rows: int

    def data(self) -> Bytes:
        """uint8 [rows, scale columns], read-only and not copied."""
        return self.record.data().reshape(self.record.shape)[
            self.first_row : self.first_row + self.rows
        ]

    @property
    def nbytes(self) -> int:
        """Bytes of these rows."""
        return self.rows * self.record.shape[1]

    def extent(self) -> Extent:
        """Where these rows lie."""
        first = self.record.offset + self.first_row * self.record.shape[1]
        return Extent(self.record.file, first, self.nbytes)


@dataclass(frozen=True, slots=True)
class BoundTensor:
    """One weight: a rectangle of a stored tensor, and the scales that belong to it."""

    record: TensorRecord
    block_type: BlockType
    """How the elements are coded; differs from the record's type for FP4 stored as bytes."""
    shape: tuple[int, ...]
    """Elements of this weight, row-major."""
    stored_columns: int
    """Elements per row of the stored tensor."""
    first_row: int = 0
    first_column: int = 0
    scale: BlockScale | None = None
    tensor_scale: TensorRecord | None = None
    """One float32 per matrix (NVFP4), or one per expert of a stack."""
    expert: int = 0
    """Position in the stack, 0 for tensors that are none."""

    @property
    def rows(self) -> int:
        """Rows when seen as a matrix; a vector is one row."""
        return 1 if len(self.shape) < 2 else self.shape[-2]

    @property
    def columns(self) -> int:
        """Elements per row of this weight."""
        return self.shape[-1]

    @property
    def nbytes(self) -> int:
        """Bytes of this weight on disk, block scales included."""
        rows = 1
        for size in self.shape[:-1]:
            rows *= size
        own = rows * self.block_type.row_bytes(self.columns)
        return own + (self.scale.nbytes if self.scale else 0)

    def data(self) -> Bytes:
        """The stored rows, uint8 [rows, row bytes], read-only and not copied.

        Raises:
            FormatError: if the file changed since it was opened.
        """
        row_bytes = self.block_type.row_bytes
        matrix = self.record.data().reshape(-1, row_bytes(self.stored_columns))
        start = row_bytes(self.first_column)
        stop = start + row_bytes(self.columns)
        return matrix[self.first_row : self.first_row + self.rows, start:stop]

    @property
    def has_whole_rows(self) -> bool:
        """Whether this weight is whole rows of the stored tensor, one range of bytes."""
        return self.first_column == 0 and self.columns == self.stored_columns

    def extent(self) -> Extent:
        """Where the rows lie, without block scales; for a weight that `has_whole_rows`."""
        row_bytes = self.block_type.row_bytes(self.stored_columns)
        first = self.record.offset + self.first_row * row_bytes
        return Extent(self.record.file, first, self.rows * row_bytes)

    def tensor_scale_value(self) -> float:
        """The factor on the whole matrix; 1 without one.

        Raises:
            FormatError: if it is not a finite number.
        """
        if self.tensor_scale is None:
            return 1.0
        values = self.tensor_scale.data().view("<f4")
        value = float(values[self.expert if values.size > 1 else 0])
        if not np.isfinite(value):
            raise FormatError(
                f"tensor {self.tensor_scale.name} holds {value}, expected a finite scale",
                path=self.tensor_scale.file.path,
                offset=self.tensor_scale.offset,
            )
        return value


@dataclass(frozen=True, slots=True)
class BoundExperts:
    """The routed experts of one layer: one stacked tensor per matrix, or one tensor per expert.

    Take experts by `expert`: the parts of a stack need not follow each other.
    """

    w1: tuple[BoundTensor, ...]
    w3: tuple[BoundTensor, ...]
    w2: tuple[BoundTensor, ...]
    count: int

    def expert(self, index: int) -> tuple[BoundTensor, BoundTensor, BoundTensor]:
        """(w1, w3, w2) of one expert.

        Raises:
            IndexError: if `index` is not in [0, count).
        """
        if not 0 <= index < self.count:
            raise IndexError(f"expert {index} of {self.count}")
        return _pick(self.w1, index), _pick(self.w3, index), _pick(self.w2, index)

    @property
    def has_extents(self) -> bool:
        """Whether every matrix is one range of bytes."""
        return all(tensor.has_whole_rows for tensor in (*self.w1, *self.w3, *self.w2))

    @property
    def form(self) -> tuple[object, ...] | None:
        """What all experts have in common but for their bytes: types and shapes.

        Layers of equal form give equal records over equal bytes; None where experts differ.
        """
        found: list[object] = []
        for group in (self.w1, self.w3, self.w2):
            forms = {(t.block_type.name, t.shape[-2:], t.scale is None) for t in group}
            if len(forms) > 1 or any(tensor.tensor_scale is not None for tensor in group):
                return None
            found += forms
        return tuple(found)

    def extents(self, index: int) -> tuple[Extent, ...]:
        """Where w1, w3, w2 of one expert lie, then their block scales where those are apart.

        Raises:
            IndexError: if `index` is not in [0, count).
        """
        matrices = self.expert(index)
        scales = [matrix.scale.extent() for matrix in matrices if matrix.scale is not None]
        return (*(matrix.extent() for matrix in matrices), *scales)


def _pick(matrices: tuple[BoundTensor, ...], index: int) -> BoundTensor:
    if len(matrices[0].record.shape) == 2:
        return matrices[index]
    stack = matrices[0]
    if stack.record.stride:
        part = stack.record.part(index)
        return replace(stack, record=part, shape=stack.shape[1:], expert=index)
    stored_rows = stack.record.shape[1]
    return replace(
        stack,
        shape=stack.shape[1:],
        first_row=index * stored_rows + stack.first_row,
        expert=index,
    )


@dataclass(frozen=True)
class BoundWeights:
    """Every weight of a model by role."""

    config: ModelConfig
    tensors: Mapping[str, BoundTensor]
    """Role -> weight; layers as `layers.N.attn.wq_a`, the MTP block as `draft.attn.wq_a`."""
    experts: tuple[BoundExperts, ...]
    """Per layer; the MTP block's follow at index `num_layers`."""
    warnings: tuple[str, ...]

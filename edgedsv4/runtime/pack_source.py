"""The routed experts of an opened model as an expert pack holds them.

Whatever the source, a matrix comes as bytes of a GGML block type: copied where it is stored so,
moved bit by bit from packed FP4 to MXFP4. Nothing is rounded; what has no such type is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from edgedsv4.errors import FormatError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES, BlockType
from edgedsv4.formats.expert_pack_header import ROLES
from edgedsv4.formats.expert_pack_index import PackShape
from edgedsv4.kernels.find_bad_scales import find_bad_scales
from edgedsv4.kernels.quant_matmul import matrix_from_numpy
from edgedsv4.runtime.tensor_pieces import weight_pieces

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights

Bytes = npt.NDArray[np.uint8]

_MXFP4: Final = BLOCK_TYPES["MXFP4"]


@dataclass(frozen=True, slots=True)
class StackedRole:
    """All experts of one role of one layer, as a GGUF file would stack them."""

    name: str
    block_type: BlockType
    nbytes: int
    """Of one expert."""
    offset: int
    """Of expert 0 in the source file; 0 where the source has no such tensor."""


class PackSource:
    """Experts of one model, layer by layer.

    Args:
        bound: the weights; its files must stay open.

    Raises:
        UnsupportedModelError: a storage type that a pack cannot hold, or experts of one layer that
            differ in type.
    """

    def __init__(self, bound: BoundWeights) -> None:
        self._experts = bound.experts[: bound.config.num_layers]
        self.config = bound.config
        self.roles = tuple(
            tuple(self._role(layer, role) for role in range(len(ROLES)))
            for layer in range(bound.config.num_layers)
        )
        """[layers][3]."""

    @property
    def shape(self) -> PackShape:
        """Dims and storage types."""
        types = tuple(
            (gate.block_type, up.block_type, down.block_type) for gate, up, down in self.roles
        )
        return PackShape(self.config.hidden_size, self.config.expert_width, types)

    @property
    def is_uniform(self) -> bool:
        """Whether version 1 can hold the pack: MXFP4 throughout."""
        return all(role.block_type == _MXFP4 for roles in self.roles for role in roles)

    def pieces(self, layer: int, expert: int, role: int) -> Iterator[Bytes]:
        """The bytes of one matrix, as contiguous pieces of whole rows.

        Raises:
            FormatError: a scale is NaN or infinite, or the file changed since it was opened.
        """
        weight = self._matrix(layer, expert, role)
        target = self.roles[layer][role].block_type
        if weight.block_type == target:
            _require_finite(weight)
        yield from weight_pieces(weight, target)

    def _matrix(self, layer: int, expert: int, role: int) -> BoundTensor:
        return self._experts[layer].expert(expert)[role]

    def _role(self, layer: int, role: int) -> StackedRole:
        experts = self._experts[layer]
        first = self._matrix(layer, 0, role)
        stored = first.block_type
        own = (experts.w1, experts.w3, experts.w2)[role]
        if any(matrix.block_type != stored for matrix in own):
            raise UnsupportedModelError(
                f"experts of layer {layer} differ in storage type, a pack has one per layer and"
                " role; make them alike with `edgedsv4 quantize`",
                path=first.record.file.path,
            )
        target = _MXFP4 if stored.name == "FP4_E2M1" else stored
        if target.ggml_id is None:
            raise UnsupportedModelError(
                f"experts stored as {stored.name} cannot be packed without rounding; convert or"
                " quantize the model first",
                path=first.record.file.path,
            )
        # Rows of a fused tensor are no stack of their own.
        is_stack = len(first.record.shape) == 3 and first.record.shape[1] == first.rows
        return StackedRole(
            name=f"blk.{layer}.ffn_{ROLES[role]}_exps.weight",
            block_type=target,
            nbytes=first.rows * target.row_bytes(first.columns),
            offset=first.record.offset if is_stack and target == stored else 0,
        )


def _require_finite(weight: BoundTensor) -> None:
    matrix = matrix_from_numpy(weight.data(), weight.block_type, weight.rows, weight.columns)
    bad = find_bad_scales(matrix, limit=1)
    if bad:
        row, block = bad[0]
        raise FormatError(
            f"tensor {weight.record.name}, row {weight.first_row + row}, block {block}: the scale"
            " is NaN or infinite; the file is damaged, fetch it again",
            path=weight.record.file.path,
            offset=weight.record.offset,
        )

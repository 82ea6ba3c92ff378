"""Reading a whole model to find weights that no number stands behind: scales of NaN or infinity."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from edgedsv4.errors import FormatError
from edgedsv4.kernels.find_bad_scales import find_bad_scales
from edgedsv4.kernels.quant_matmul import matrix_from_numpy

if TYPE_CHECKING:
    from pathlib import Path

    from edgedsv4.model.bound_weights import BoundTensor, BoundWeights

LISTED = 64
"""Bad blocks reported at most."""
SHOWN = 8
"""Bad blocks named in the message; the others are in `FormatError.problems`."""
_TABLES = ("I32", "I64")


def verify_weights(
    bound: BoundWeights, path: Path, on_progress: Callable[[int, int], None]
) -> None:
    """Read every weight once.

    Args:
        bound: the weights of a model.
        path: of the model, for the message.
        on_progress: told (weights read, weights in all).

    Raises:
        FormatError: names tensor, row and block of every bad scale (up to `LISTED`).
    """
    tensors = [tensor for tensor in _all(bound) if tensor.block_type.name not in _TABLES]
    problems: list[str] = []
    for done, tensor in enumerate(tensors, start=1):
        problems += _bad_blocks(tensor, LISTED - len(problems))
        on_progress(done, len(tensors))
        if len(problems) >= LISTED:
            break
    if problems:
        shown = "; ".join(problems[:SHOWN])
        more = f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else ""
        raise FormatError(
            f"weights are damaged: {shown}{more}; fetch the file again",
            path=path,
            problems=tuple(problems),
        )


def _all(bound: BoundWeights) -> Iterator[BoundTensor]:
    yield from bound.tensors.values()
    for layer in bound.experts:
        for index in range(layer.count):
            yield from layer.expert(index)


def _bad_blocks(tensor: BoundTensor, limit: int) -> list[str]:
    matrix = matrix_from_numpy(
        tensor.data(),
        tensor.block_type,
        tensor.rows,
        tensor.columns,
        None if tensor.scale is None else tensor.scale.data(),
        tensor.tensor_scale_value(),
    )
    return [
        f"tensor {tensor.record.name}, row {tensor.first_row + row}, block {block}:"
        " the scale is NaN or infinite"
        for row, block in find_bad_scales(matrix, limit=limit)
    ]

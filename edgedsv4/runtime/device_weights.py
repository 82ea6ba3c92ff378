"""How many bytes a model's weights take on a GPU, before any is copied there.

Matrices keep the size that they have in the file, apart from types without a form on a GPU, which
are decoded; vectors and parameters of the hyper-connections become float32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from edgedsv4.kernels.gpu.planes import SUPPORTED, matrix_bytes
from edgedsv4.runtime.expert_placement import LayerExperts
from edgedsv4.runtime.memory_plan import weight_items

if TYPE_CHECKING:
    from edgedsv4.model.bound_weights import BoundExperts, BoundTensor, BoundWeights

FALLBACK = "BF16"
"""Type into which matrices without a form on a GPU are decoded."""
_PARAMETERS = re.compile(r"hc_|(^|\.)ape$")


def device_weight_items(bound: BoundWeights, fallback: str = FALLBACK) -> dict[str, int]:
    """Bytes by item of the memory plan of everything that is copied to a GPU.

    Args:
        bound: the model's weights.
        fallback: type into which matrices without a form on a GPU are decoded.
    """
    return weight_items(_sizes(bound, fallback))


def expert_layers(bound: BoundWeights, *, has_draft: bool) -> tuple[LayerExperts, ...]:
    """Sizes of the routed experts of each layer, for placing them; a draft block's last.

    Args:
        bound: the model's weights.
        has_draft: whether the draft block is used.
    """
    layers = bound.experts if has_draft else bound.experts[: bound.config.num_layers]
    return tuple(_layer_experts(experts, bound.config.num_experts) for experts in layers)


def _layer_experts(experts: BoundExperts, count: int) -> LayerExperts:
    matrices = (*experts.w1, *experts.w3, *experts.w2)
    card = sum(_device_bytes("experts.w", matrix, FALLBACK) for matrix in matrices)
    kind = tuple(
        (part[0].block_type.name, part[0].shape[-2:], part[0].tensor_scale is not None)
        for part in (experts.w1, experts.w3, experts.w2)
    )
    stored = sum(matrix.nbytes for matrix in matrices)
    return LayerExperts(kind=kind, card_bytes=-(-card // count), stored_bytes=-(-stored // count))


def _sizes(bound: BoundWeights, fallback: str) -> Iterator[tuple[str, int]]:
    for role, tensor in bound.tensors.items():
        yield role, _device_bytes(role, tensor, fallback)
    for layer, experts in enumerate(bound.experts):
        place = "draft" if layer == bound.config.num_layers else f"layers.{layer}"
        for matrix in (*experts.w1, *experts.w3, *experts.w2):
            name = f"{place}.ffn.experts.w"
            yield name, _device_bytes(name, matrix, fallback)


def _device_bytes(role: str, tensor: BoundTensor, fallback: str) -> int:
    columns, rows = tensor.columns, 1
    for size in tensor.shape[:-1]:
        rows *= size
    stored = tensor.block_type.name
    if len(tensor.shape) < 2 or stored in ("I32", "I64") or _PARAMETERS.search(role):
        return 4 * rows * columns
    is_scaled = tensor.tensor_scale is not None and stored != "NVFP4"
    held = "MXFP4" if stored == "FP4_E2M1" else stored
    if is_scaled or held not in SUPPORTED:
        held = fallback
    if held == "FP8_E4M3" and tensor.scale is not None:
        return rows * (columns + tensor.scale.record.shape[1])
    return matrix_bytes(held, rows, columns)

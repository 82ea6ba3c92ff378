"""Blocks of a storage type to f32: every type's formula, vectorised over blocks in PyTorch.

This is the definition that faster kernels are compared with, and what runs where they do not. Every
decoder equals ggml's bit for bit (NaN payloads aside). Separate scale tensors (FP8_E4M3, FP4_E2M1)
and NVFP4's tensor scale are applied by `edgedsv4.kernels.quant_matmul`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError, UnsupportedModelError
from edgedsv4.kernels.dequantize import float_blocks, iq_blocks, k_blocks, small_blocks

if TYPE_CHECKING:
    from edgedsv4.formats.block_types import BlockType

_DECODERS: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        "F32": float_blocks.f32,
        "F16": float_blocks.f16,
        "BF16": float_blocks.bf16,
        "F64": float_blocks.f64,
        "FP8_E4M3": float_blocks.fp8_e4m3,
        "FP8_E5M2": float_blocks.fp8_e5m2,
        "E8M0": float_blocks.e8m0,
        "FP4_E2M1": float_blocks.fp4_e2m1,
        "F4": float_blocks.fp4_e2m1,
        "MXFP4": float_blocks.mxfp4,
        "NVFP4": float_blocks.nvfp4,
        "Q8_0": small_blocks.q8_0,
        "Q4_0": small_blocks.q4_0,
        "Q4_1": small_blocks.q4_1,
        "Q5_0": small_blocks.q5_0,
        "Q5_1": small_blocks.q5_1,
        "IQ4_NL": small_blocks.iq4_nl,
        "TQ1_0": small_blocks.tq1_0,
        "TQ2_0": small_blocks.tq2_0,
        "Q2_K": k_blocks.q2_k,
        "Q3_K": k_blocks.q3_k,
        "Q4_K": k_blocks.q4_k,
        "Q5_K": k_blocks.q5_k,
        "Q6_K": k_blocks.q6_k,
        "IQ4_XS": k_blocks.iq4_xs,
        "IQ1_S": iq_blocks.iq1_s,
        "IQ1_M": iq_blocks.iq1_m,
        "IQ2_XXS": iq_blocks.iq2_xxs,
        "IQ2_XS": iq_blocks.iq2_xs,
        "IQ2_S": iq_blocks.iq2_s,
        "IQ3_XXS": iq_blocks.iq3_xxs,
        "IQ3_S": iq_blocks.iq3_s,
    }
)

DECODABLE_TYPES = frozenset(_DECODERS)
"""Names of the types that a weight matrix may have."""


def decode_blocks(data: Tensor, block_type: BlockType) -> Tensor:
    """Decode many blocks; working memory is a few times the result, so pass tiles of a matrix.

    Args:
        data: uint8 [n, block_bytes], any alignment and row stride; never written to.
        block_type: storage type, one of `DECODABLE_TYPES`.

    Returns:
        f32 [n, block_elements], a fresh tensor. Types with a separate scale come out unscaled.

    Raises:
        ShapeError: if data is not uint8 [n, block_bytes].
        UnsupportedModelError: if the type has no decoder.
    """
    decoder = _DECODERS.get(block_type.name)
    if decoder is None:
        raise UnsupportedModelError(f"weights of type {block_type.name} cannot be decoded")
    if data.dtype != torch.uint8 or data.dim() != 2 or data.shape[1] != block_type.block_bytes:
        raise ShapeError(
            f"blocks of {block_type.name} must be uint8 [n, {block_type.block_bytes}],"
            f" found {data.dtype} {list(data.shape)}"
        )
    if len(data) == 0:
        return torch.empty(0, block_type.block_elements, dtype=torch.float32, device=data.device)
    return decoder(data)

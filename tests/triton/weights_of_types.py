"""Stored matrices of every type with random contents."""

from __future__ import annotations

import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quant_matmul import QuantMatrix

# Where the half-precision scales of a block are.
_HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_XS"), (0,)),
    **dict.fromkeys(("Q4_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
}
_FLOATS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def random_weight(
    name: str, rows: int, cols: int, seed: int = 0, *, is_finite: bool = False
) -> QuantMatrix:
    """A matrix of random bytes with finite scales; `is_finite` clears upper bits."""
    kind = BLOCK_TYPES[name]
    generator = torch.Generator().manual_seed(seed)
    if name in _FLOATS:
        values = torch.randn(rows, cols, generator=generator).to(_FLOATS[name])
        values[-1, :3] = torch.tensor([2.0**-130 if name == "BF16" else 2.0**-24, -0.0, 1.0])
        return QuantMatrix(kind, rows, cols, values.view(torch.uint8))
    data = torch.randint(0, 256, (rows, kind.row_bytes(cols)), generator=generator).byte()
    blocks = data.view(-1, kind.block_bytes)
    if is_finite:
        blocks[:, 1::2] &= 0x3F
        blocks[:, ::2] &= 0x3F
    for offset in _HALVES.get(name, ()):
        halves = torch.randn(len(blocks), generator=generator).half().view(-1, 1)
        blocks[:, offset : offset + 2] = halves.view(torch.uint8)
    if name == "MXFP4":
        blocks[:, 0] = torch.randint(0, 240, (len(blocks),), generator=generator)
    scale = None
    if name == "FP8_E4M3":
        scale = torch.randint(110, 140, (-(-rows // 128), -(-cols // 128)), generator=generator)
    if name == "FP4_E2M1":
        scale = torch.randint(110, 140, (rows, cols // 32), generator=generator)
    factor = 0.37 if name == "NVFP4" else 1.0
    scale = None if scale is None else scale.byte()
    return QuantMatrix(kind, rows, cols, data, scale, factor)

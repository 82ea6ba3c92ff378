"""Random matrices of any block type: random codes, scales of about 1 / 16."""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quant_matmul import QuantMatrix

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Places of the half-precision scales in a block.
_HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ3_XXS": (0,),
    "IQ4_XS": (0,),
}


def stored_matrix(name: str, rows: int, columns: int, seed: int) -> QuantMatrix:
    """A matrix as a file has it, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    kind = BLOCK_TYPES[name]
    if name in _FLOATS:
        values = torch.randn(rows, columns, generator=generator).to(_FLOATS[name])
        return QuantMatrix(kind, rows, columns, values)
    shape = (rows, columns // kind.block_elements, kind.block_bytes)
    raw = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for place in _HALVES.get(name, ()):
        halves = (torch.rand(shape[:2], generator=generator) / 16 + 0.01).half()
        raw[:, :, place : place + 2] = halves.unsqueeze(2).view(torch.uint8)
    if name == "MXFP4":
        raw[:, :, 0] = raw[:, :, 0] % 5 + 120
    return QuantMatrix(kind, rows, columns, raw.view(rows, -1))


def on_device(tensor: Tensor, device: str) -> Tensor:
    """A copy that kernels can read."""
    return tensor.to(device).contiguous()

"""Stored matrices with random contents of every block type, for tests of products."""

from __future__ import annotations

import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quant_matmul import QuantMatrix

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
# Places of the half-precision scales in a block.
_HALVES = {
    "Q8_0": (0,),
    "Q4_0": (0,),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
    "IQ2_XXS": (0,),
    "IQ2_XS": (0,),
    "IQ3_XXS": (0,),
    "IQ4_XS": (0,),
}


def stored_matrix(name: str, rows: int, columns: int, seed: int) -> QuantMatrix:
    """Random codes and scales near 1 / sqrt(columns), a few times that at most."""
    generator = torch.Generator().manual_seed(seed)
    kind = BLOCK_TYPES[name]
    if name in _FLOATS:
        values = torch.randn(rows, columns, generator=generator) * columns**-0.5
        return QuantMatrix(kind, rows, columns, values.to(_FLOATS[name]))
    blocks = rows * columns // kind.block_elements
    data = torch.randint(0, 256, (blocks, kind.block_bytes), dtype=torch.uint8, generator=generator)
    for place in _HALVES.get(name, ()):
        scale = (torch.rand(blocks, generator=generator) + 0.5) * columns**-0.5 * _UNIT[name]
        data[:, place : place + 2] = scale.half().view(-1, 1).view(torch.uint8)
    if name == "MXFP4":
        data[:, 0] = torch.randint(116, 122, (blocks,), generator=generator).to(torch.uint8)
    return QuantMatrix(kind, rows, columns, data.view(rows, -1))


# About one over the size of the integers that a scale multiplies.
_UNIT = {
    "Q8_0": 0.01,
    "Q4_0": 0.2,
    "Q2_K": 0.05,
    "Q3_K": 0.02,
    "Q4_K": 0.004,
    "Q5_K": 0.002,
    "Q6_K": 0.001,
    "IQ2_XXS": 0.02,
    "IQ2_XS": 0.02,
    "IQ3_XXS": 0.02,
    "IQ4_XS": 0.001,
}

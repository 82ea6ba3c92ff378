"""Planes with random contents, for benchmarks of any size without a file."""

from __future__ import annotations

from collections.abc import Mapping
from math import log2
from types import MappingProxyType

import torch
from torch import Tensor

UNIT_DEVIATION: Mapping[str, float] = MappingProxyType(
    {
        "Q8_0": 73.9,
        "Q4_0": 4.61,
        "Q2_K": 13.9,
        "Q3_K": 43.4,
        "Q4_K": 258.0,
        "Q5_K": 527.0,
        "Q6_K": 1363.0,
        "IQ2_XXS": 53.2,
        "IQ2_XS": 55.9,
        "IQ3_XXS": 143.0,
        "IQ4_XS": 1242.0,
        "MXFP4": 2.93,
        "NVFP4": 2.93 * 45.0,
        "FP8_E4M3": 0.61,
    }
)
"""Standard deviation of a type's elements for random codes and a scale of 1."""

# dmin / d for which the mean of random codes is zero.
_OFFSETS = {"Q2_K": 1.5, "Q4_K": 7.5, "Q5_K": 15.5}
# The plane of half-precision scales, where there is one of nothing else.
_HALVES = {
    **dict.fromkeys(("Q8_0", "Q4_0"), 1),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ3_XXS"), 2),
    **dict.fromkeys(("Q3_K", "Q6_K"), 3),
}


def fill_random(
    name: str, planes: tuple[Tensor, ...], scale: float, generator: torch.Generator
) -> None:
    """Random codes in the planes of a type (the last one may be its table), and scales.

    Args:
        name: block type.
        planes: as `planes.empty_matrix` makes them; contents are overwritten.
        scale: scale of a block, or its mean.
        generator: of the planes' device.
    """
    if planes[0].is_floating_point():
        planes[0].normal_(0.0, scale, generator=generator)
        return
    _random_bits(planes[0], generator)
    if name == "FP8_E4M3":
        # Exponents up to 2^0, no NaN.
        planes[0].bitwise_and_(-0x40404041)
    if name in ("MXFP4", "FP8_E4M3"):
        middle = round(127 + log2(scale))
        planes[1].random_(middle - 1, middle + 2, generator=generator)
    elif name == "NVFP4":
        # E4M3 scales from 16 to 120.
        planes[1].random_(0x58, 0x70, generator=generator)
        planes[2].fill_(scale)
    elif name in ("Q2_K", "Q4_K", "Q5_K"):
        for plane in planes[1:]:
            _random_bits(plane, generator)
        pair = planes[-1].view(torch.float16).view(-1, 2 if name == "Q2_K" else 8)
        pair[:, 0] = scale
        pair[:, 1] = scale * _OFFSETS[name]
    elif name == "IQ4_XS":
        _random_bits(planes[1], generator)
        _random_bits(planes[2], generator)
        planes[2].view(torch.float16).view(-1, 2)[:, 0] = scale
    else:
        place = _HALVES[name]
        for plane in planes[1:place]:
            _random_bits(plane, generator)
        planes[place].uniform_(0.5 * scale, 1.5 * scale, generator=generator)


def _random_bits(plane: Tensor, generator: torch.Generator) -> None:
    """Every bit of a plane at random, in the widest words that fit."""
    flat = plane.view(-1)
    if plane.nbytes % 8 == 0:
        flat.view(torch.int64).random_(-(1 << 63), None, generator=generator)
    else:
        flat.view(torch.uint8).random_(0, 256, generator=generator)

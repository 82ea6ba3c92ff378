"""The tables that codes index: powers of two, 8-bit floats, the IQ grids, sign patterns.

Each is built once per device. All are f32 and read-only by convention.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

_GRIDS = Path(__file__).parent.parent / "data" / "iq_grids.npz"


@cache
def e8m0_values(device: torch.device) -> Tensor:
    """[256]: 2^(b - 127), exact down to the subnormal 2^-127; 0xFF is NaN (OCP MX)."""
    values = 2.0 ** (torch.arange(256, dtype=torch.float64) - 127)
    values[255] = torch.nan
    return values.float().to(device)


@cache
def half_e8m0_values(device: torch.device) -> Tensor:
    """[256]: 2^(b - 128) for every b, 0xFF included; goes with doubled E2M1 values, as in ggml."""
    return (2.0 ** (torch.arange(256, dtype=torch.float64) - 128)).float().to(device)


@cache
def e4m3_values(device: torch.device) -> Tensor:
    """[256]: OCP E4M3 in its "fn" form: no infinities, 0x7F and 0xFF are NaN, largest 448."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().to(device)


@cache
def e5m2_values(device: torch.device) -> Tensor:
    """[256]: OCP E5M2, the upper byte of a half float."""
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e5m2).float().to(device)


@cache
def nvfp4_scales(device: torch.device) -> Tensor:
    """[256]: NVFP4's unsigned E4M3 scales as ggml reads them: bit 7 is ignored, but 0x7F is 0."""
    code = torch.arange(128)
    exponent, mantissa = code >> 3, (code & 7).double()
    normal = (1 + mantissa / 8) * 2.0 ** (exponent.double() - 7)
    values = torch.where(exponent > 0, normal, mantissa / 512).repeat(2)
    values[0x7F] = 0
    return values.float().to(device)


@cache
def iq4_values(device: torch.device) -> Tensor:
    """[16]: the 4-bit code book of IQ4_NL and IQ4_XS."""
    book = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    return torch.tensor(book, dtype=torch.float32, device=device)


@cache
def iq_grid(name: str, device: torch.device) -> Tensor:
    """[entries, 4 or 8]: values that one grid index of the IQ type `name` stands for."""
    with np.load(_GRIDS, allow_pickle=False) as grids:
        return torch.from_numpy(grids[name]).float().to(device)


@cache
def sign_rows(device: torch.device) -> Tensor:
    """[256, 8]: -1 where bit i of the byte is set, else 1."""
    bits = torch.arange(256)[:, None] >> torch.arange(8) & 1
    return (1 - 2 * bits).float().to(device)


@cache
def even_sign_rows(device: torch.device) -> Tensor:
    """[128, 8]: sign patterns with an even number of minus signs; seven bits are stored."""
    stored = torch.arange(128)
    parity = (stored[:, None] >> torch.arange(7) & 1).sum(1) & 1
    return sign_rows(torch.device("cpu"))[stored | parity << 7].to(device)

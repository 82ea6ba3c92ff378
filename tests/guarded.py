"""Outputs for kernels in C: filled with what no kernel leaves, and guarded by bytes behind them."""

from __future__ import annotations

import math

import torch

_GUARD_BYTES = 128
_POISON = 0xA5
"""As bytes of floats -2.8e-16, so a guard that was overwritten by zeros or NaN shows."""


class Guarded:
    """A tensor with NaN (poison bytes in whole numbers), and memory after it that must stay."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
        self._bytes = math.prod(shape) * dtype.itemsize
        self._memory = torch.full((self._bytes + _GUARD_BYTES,), _POISON, dtype=torch.uint8)
        self.tensor = self._memory[: self._bytes].view(dtype).view(shape)
        if dtype.is_floating_point:
            self.tensor.fill_(math.nan)

    def check(self) -> torch.Tensor:
        """The tensor; fails if something was written behind it."""
        assert self._memory[self._bytes :].eq(_POISON).all(), "written behind the output"
        return self.tensor

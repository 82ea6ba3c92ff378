"""Which dtype an operation accumulates in: float32 for everything narrower, float64 for float64."""

from __future__ import annotations

import torch


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """Dtype of sums, softmaxes and norms over values of `dtype`."""
    return torch.float64 if dtype == torch.float64 else torch.float32

"""Speed and error of the encoders, per storage type, with and without importance.

Speed is in megabytes of float32 values per second, error is relative to the mean square of Gaussian
values. What is timed is decoded with the `gguf` package first.
"""

from __future__ import annotations

import gguf
import harness
import numpy as np
import torch
from harness import Figure

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.quantize import quantize

TYPES = ("Q8_0", "MXFP4", "Q6_K", "Q4_K", "Q2_K")
ROWS, COLUMNS = 128, 2048
# Storing zeros is an error of 1.
WORST_ERROR = 0.2


def relative_error(values: np.ndarray, data: np.ndarray, name: str, weights: np.ndarray) -> float:
    """Weighted squared error as a share of the weighted square of the values."""
    decoded = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[name])
    weighted = np.square(decoded - values) * weights
    return float(weighted.mean() / (np.square(values) * weights).mean())


def measure(repeats: int) -> list[Figure]:
    """Two figures per type and objective."""
    generator = np.random.default_rng(0)
    values = generator.standard_normal((ROWS, COLUMNS)).astype(np.float32)
    importance = np.exp(generator.standard_normal(COLUMNS)).astype(np.float32)
    figures = []
    for name in TYPES:
        for label, weights in (("plain", None), ("weighted", torch.from_numpy(importance))):

            def work(name: str = name, weights: torch.Tensor | None = weights) -> torch.Tensor:
                return quantize(torch.from_numpy(values), BLOCK_TYPES[name], importance=weights)

            counted = np.ones_like(importance) if weights is None else importance
            error = relative_error(values, work().numpy(), name, counted)
            if not error < WORST_ERROR:
                raise SystemExit(f"{name} {label}: error {error:.3g}, no time is reported")
            speed = values.nbytes / harness.seconds(work, repeats) / 1e6
            figures.append(Figure("quantize", f"{name} {label}", speed, "MB/s", repeats))
            figures.append(Figure("quantize", f"{name} {label} error", error, "share", 1))
    return figures


if __name__ == "__main__":
    harness.main(measure)

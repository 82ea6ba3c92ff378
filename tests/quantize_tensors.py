"""The tensors on which encoders are compared with ggml's, made again from seeds alone.

Philox words are stable over numpy versions, its distributions are not; so those are made here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from structure_data import dequantized, official_tensors

ROWS, COLUMNS = 16, 1024
_STRUCTURE = (
    "embed.weight",
    "layers.1.attn.wq_b.weight",
    "layers.3.attn.compressor.wkv.weight",
    "layers.2.ffn.experts.5.w2.weight",
    "layers.0.ffn.shared_experts.w1.weight",
)


@dataclass(frozen=True)
class Sample:
    """A matrix and how much each of its columns counts."""

    values: np.ndarray
    """float32 [rows, columns], columns a multiple of 256."""
    importance: np.ndarray
    """float32 [columns], above 0, log-normal: few columns carry most of the weight."""


def samples() -> dict[str, Sample]:
    """Name -> matrix: Gaussian, heavy-tailed, and weights of the stored `structure` model."""
    values = {
        "gaussian": _normal(1, ROWS * COLUMNS),
        "student-t4": _student_t4(2, ROWS * COLUMNS),
    }
    matrices = {name: array.reshape(ROWS, COLUMNS) for name, array in values.items()}
    stored = official_tensors()
    # Rows of this model are 128 or 64 wide; they are joined so that every type fits.
    matrices |= {name: dequantized(name, stored).reshape(-1, 256) for name in _STRUCTURE}
    return {
        name: Sample(
            np.ascontiguousarray(matrix, dtype=np.float32),
            np.exp(_normal(100 + seed, matrix.shape[1])).astype(np.float32),
        )
        for seed, (name, matrix) in enumerate(matrices.items())
    }


def weighted_error(values: np.ndarray, decoded: np.ndarray, weights: np.ndarray | None) -> float:
    """Mean of weights (values - decoded)^2 in float64; weights [columns] or None for 1."""
    squares = (values.astype(np.float64) - decoded) ** 2
    return float((squares if weights is None else squares * weights.astype(np.float64)).mean())


def _uniform(seed: int, count: int) -> np.ndarray:
    """In (0, 1)."""
    words = np.asarray(np.random.Philox(key=seed).random_raw(count), dtype=np.uint64)
    return ((words >> np.uint64(11)).astype(np.float64) + 0.5) / float(1 << 53)


def _normal(seed: int, count: int) -> np.ndarray:
    """Box and Muller's transform."""
    first, second = _uniform(seed, 2 * count).reshape(2, count)
    return np.sqrt(-2 * np.log(first)) * np.cos(2 * np.pi * second)


def _student_t4(seed: int, count: int) -> np.ndarray:
    """Normal over the root of a chi-square variable of 4 degrees of freedom over 4."""
    first, second = _uniform(1000 + seed, 2 * count).reshape(2, count)
    return _normal(seed, count) / np.sqrt(-2 * np.log(first * second) / 4)

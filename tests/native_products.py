"""Stored matrices of every type for tests of products, and the C products on guarded memory."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.native.library import library, matrix_of, new_run
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

# Bytes at which half-precision fields of a block start; random bits there would be NaN or huge.
HALVES = {
    **dict.fromkeys(("Q4_0", "Q5_0", "Q8_0", "IQ4_NL", "IQ4_XS"), (0,)),
    **dict.fromkeys(("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ1_S"), (0,)),
    **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)),
    "Q2_K": (80, 82),
    "Q3_K": (108,),
    "Q6_K": (208,),
    "TQ1_0": (52,),
    "TQ2_0": (64,),
}
INT8_TYPES = (
    *("Q8_0", "Q4_0", "MXFP4", "NVFP4", "FP4_E2M1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS"),
)
FLOAT_TYPES = (
    *("F32", "F16", "BF16", "F64", "FP8_E4M3", "FP8_E5M2", "Q4_1", "Q5_0", "Q5_1", "IQ1_S"),
    *("IQ1_M", "IQ2_S", "IQ3_S", "TQ1_0", "TQ2_0"),
)
GUARD = 64
GUARD_VALUE = -7.25
_KEPT: weakref.WeakKeyDictionary[Any, tuple[np.ndarray, ...]] = weakref.WeakKeyDictionary()
"""Memory that records point to."""


def block_columns(name: str) -> int:
    """Columns that a row of a type is a multiple of."""
    return 32 if name == "FP4_E2M1" else BLOCK_TYPES[name].block_elements


def stored_bytes(name: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """uint8 [rows, row_bytes] with finite numbers of moderate size."""
    generator = np.random.default_rng(seed)
    kind = BLOCK_TYPES[name]
    if name in ("F32", "F16", "F64"):
        values = generator.standard_normal((rows, columns))
        return values.astype(f"<f{kind.block_bytes}").view(np.uint8)
    if name == "BF16":
        values = generator.standard_normal((rows, columns)).astype("<f4")
        return np.ascontiguousarray(values.view("<u2")[:, 1::2]).view(np.uint8)
    count = rows * columns // kind.block_elements
    data = generator.integers(0, 256, (count, kind.block_bytes), dtype=np.uint8)
    for start in HALVES.get(name, ()):
        scales = generator.uniform(0.01, 0.02, count).astype("<f2")
        data[:, start : start + 2] = scales.view(np.uint8).reshape(-1, 2)
    if name == "MXFP4":
        data[:, 0] = generator.integers(122, 126, count)
    elif name == "NVFP4":
        data[:, :4] = generator.integers(0x20, 0x38, (count, 4))
    elif name == "IQ1_M":
        data[:, 49::2] = data[:, 49::2] & 15 | np.array([0, 0x50, 0xE0, 0x20], dtype=np.uint8)
    elif name in ("FP8_E4M3", "FP8_E5M2"):
        data &= 0xBB
    return data.reshape(rows, -1)


def matrix(name: str, rows: int, columns: int, *, seed: int = 1, shift: int = 0) -> QuantMatrix:
    """A matrix of a type whose bytes start `shift` bytes past a multiple of 64."""
    data = stored_bytes(name, rows, columns, seed)
    memory = np.zeros(data.size + 128, dtype=np.uint8)
    start = -memory.ctypes.data % 64 + shift
    memory[start : start + data.size] = data.reshape(-1)
    scale = None
    if name in ("FP4_E2M1", "FP8_E4M3"):
        fp8_shape = (-(-rows // 128), -(-columns // 128))
        shape = (rows, columns // 32) if name == "FP4_E2M1" else fp8_shape
        generator = np.random.default_rng(seed + 1)
        scale = torch.from_numpy(generator.integers(122, 126, shape, dtype=np.uint8))
    tensor = torch.from_numpy(memory[start : start + data.size].reshape(rows, -1))
    factor = 0.75 if name == "NVFP4" else 1.0
    return QuantMatrix(BLOCK_TYPES[name], rows, columns, tensor, scale, factor)


def activations(tokens: int, columns: int, seed: int = 2) -> np.ndarray:
    """float32 [tokens, columns]; some groups are small, some zero."""
    generator = np.random.default_rng(seed)
    x = generator.standard_normal((tokens, columns)).astype(np.float32)
    for group in range(columns // 32):
        x[:, group * 32 : group * 32 + 32] *= (1.0, 0.01, 3.0, 0.0)[group * 7 % 11 % 4]
    return x


@dataclass(frozen=True)
class Rounded:
    """Rows rounded to int8 by the C code, and the record that products take."""

    cdata: Any
    memory: np.ndarray
    x: np.ndarray
    columns: int

    def field(self, name: str, dtype: type, group: int) -> np.ndarray:
        _, ffi = library()
        count = len(self.x) * self.columns // group
        address = int(ffi.cast("uintptr_t", getattr(self.cdata, name))) - self.memory.ctypes.data
        size = count * np.dtype(dtype).itemsize
        return self.memory[address : address + size].view(dtype).reshape(len(self.x), -1)

    def values(self) -> np.ndarray:
        """What the int8 rows stand for, float64."""
        scale = self.field("scale", np.float32, 32).astype(np.float64)
        return self.field("q", np.int8, 1) * np.repeat(scale, 32, axis=1)


def make_input(x: np.ndarray) -> Any:
    """A `dk_input` with float32 rows only; x [tokens, columns], any row stride."""
    _, ffi = library()
    record = ffi.new("dk_input *")
    record.x = ffi.cast("float *", x.ctypes.data)
    record.stride = x.strides[0] // 4
    _KEPT[record] = (x,)
    return record


def round_rows(x: np.ndarray, *, threads: int = 1) -> Rounded:
    """Round rows; whatever lies around the memory is checked to be left alone."""
    lib, ffi = library()
    tokens, columns = x.shape
    size = lib.dk_quantized_bytes(tokens, columns)
    whole = np.full(size + 192, 0xA5, dtype=np.uint8)
    start = -whole.ctypes.data % 64 + 64
    memory = whole[start : start + size]
    record = make_input(x)
    address = ffi.cast("void *", memory.ctypes.data)
    run = new_run(threads)
    assert lib.dk_quantize_rows(run.cdata, record, address, tokens, columns) == 0
    assert (whole[:start] == 0xA5).all()
    assert (whole[start + size :] == 0xA5).all()
    _KEPT[record] = (x, memory)
    return Rounded(record, memory, x, columns)


@dataclass(frozen=True)
class Product:
    """One product to compute: rows first .. first + rows - 1 of a matrix times an input."""

    weight: QuantMatrix
    record: Any
    tokens: int
    first: int = 0
    rows: int | None = None


def compute(
    products: list[Product], *, threads: int = 1, is_small: bool = False
) -> list[np.ndarray]:
    """Results [tokens, rows] of a list, computed in one call into NaN-filled guarded memory."""
    lib, ffi = library()
    records = ffi.new("dk_product[]", len(products))
    matrices, outputs = [], []
    for record, product in zip(records, products, strict=True):
        matrices.append(matrix_of(product.weight))
        rows = product.weight.rows - product.first if product.rows is None else product.rows
        memory = np.full((product.tokens + 2, rows + GUARD), np.float32(np.nan))
        memory[:, rows:] = memory[0] = memory[-1] = GUARD_VALUE
        outputs.append(memory)
        record.y = ffi.cast("float *", memory[1:].ctypes.data)
        record.y_stride = rows + GUARD
        record.w, record.x = matrices[-1], product.record
        record.first_row, record.rows, record.tokens = product.first, rows, product.tokens
    run = new_run(threads)
    run.cdata.is_small = is_small
    assert lib.dk_products(run.cdata, records, len(products)) == 0
    for memory in outputs:
        rows = memory.shape[1] - GUARD
        assert (memory[:, rows:] == GUARD_VALUE).all()
        assert (memory[0] == GUARD_VALUE).all()
        assert (memory[-1] == GUARD_VALUE).all()
    return [memory[1:-1, :-GUARD].copy() for memory in outputs]


def assert_product(got: np.ndarray, x: np.ndarray, weight: QuantMatrix, factor: float) -> None:
    """Each element within factor * 2^-24 * sum |x| max |W of the group of 32| of float64's."""
    numbers = dequantize(weight).double().numpy()
    reference = x.astype(np.float64) @ numbers.T
    columns = numbers.shape[1]
    bound = np.abs(numbers)
    if columns % 32 == 0:
        bound = np.repeat(bound.reshape(len(bound), -1, 32).max(axis=2), 32, axis=1)
    limit = factor * 2.0**-24 * (np.abs(x).astype(np.float64) @ bound.T)
    assert got.shape == reference.shape
    distance = np.abs(got - reference)
    assert (distance <= limit).all(), (
        f"{weight.block_type.name}: {np.nanmax(distance / limit):.3g} times the limit,"
        f" {np.isnan(got).sum()} NaN"
    )

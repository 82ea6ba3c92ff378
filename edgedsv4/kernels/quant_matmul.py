"""Products with stored weights: y = x W^T, where W stays in the block type of its file.

W is decoded a few rows at a time, so the working memory is a few megabytes whatever the matrix. A
weight that already has the dtype of x is used where it lies, in the file's own mapping.

With int8 activations, groups of 32 elements of x are first rounded to scale * q, scale = max |x| /
127 and q an integer; the C kernels then multiply integers, which is several times as fast. Block
types whose elements lie on a grid have this form; with the others x stays as it is.

Source: OCP Microscaling specification (E8M0 scales); the DeepSeek-V3 and V4 checkpoints for the
block scales of FP8 (one per square of 128 or 32) and FP4 (one per 32 of a row) weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.dequantize import decode_blocks
from edgedsv4.kernels.dequantize.fields import as_type, look_up
from edgedsv4.kernels.dequantize.tables import e8m0_values
from edgedsv4.kernels.dispatch import resolve_backend
from edgedsv4.kernels.native.library import (
    available_on,
    has_native_type,
    library,
    matrix_of,
    pointer,
    run_here,
)

if TYPE_CHECKING:
    from edgedsv4.config import Backend
    from edgedsv4.formats.block_types import BlockType
    from edgedsv4.kernels.dispatch import Implementation

Activations = Literal["f32", "int8"]

# Decoded elements per tile: small enough to stay in a core's cache between decoding and product,
# and far below the 64 MiB that a tile may take.
TILE_ELEMENTS = 1 << 20
FP8_SCALE_BLOCKS = (128, 32)
FP4_SCALE_BLOCK = 32
INT8_GROUP = 32
INT8_TYPES = frozenset(
    (
        *("Q8_0", "Q4_0", "MXFP4", "NVFP4", "FP4_E2M1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
        *("IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ4_NL", "IQ4_XS"),
    )
)
"""Block types that are multiplied with int8 activations where those are allowed."""
# Groups whose largest magnitude is below this are zero, so that 127 / magnitude stays finite.
_INT8_TINIEST = 2.0**-110
# Tokens whose products the C kernels compute row by row: with the bits each would have alone.
SMALL_TOKENS = 16

_FLOATS = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class QuantMatrix:
    """One matrix [rows, columns] as stored."""

    block_type: BlockType
    """Storage type of `data`."""
    rows: int
    """Output width."""
    columns: int
    """Input width."""
    data: Tensor = field(repr=False)
    """uint8 [rows, row_bytes], at any address; or the numbers [rows, columns] of a float type."""
    scale: Tensor | None = field(default=None, repr=False)
    """E8M0 bytes: FP8_E4M3 [ceil(rows / b), ceil(columns / b)], FP4_E2M1 [rows, columns / 32]."""
    tensor_scale: float = 1.0
    """Factor on every element (NVFP4)."""

    def __post_init__(self) -> None:
        _check_data(self)
        _check_scale(self)

    @property
    def scale_block(self) -> tuple[int, int]:
        """Rows and columns that share one element of `scale`; (1, columns) without scales."""
        if self.scale is None:
            return (1, max(1, self.columns))
        if self.block_type.name == "FP4_E2M1":
            return (1, FP4_SCALE_BLOCK)
        found = _fp8_block(self.rows, self.columns, tuple(self.scale.shape))
        if found is None:
            raise ShapeError(f"no block size fits scales of shape {list(self.scale.shape)}")
        return (found, found)


def _check_data(matrix: QuantMatrix) -> None:
    kind, rows, columns = matrix.block_type, matrix.rows, matrix.columns
    if rows < 0 or columns < 0 or columns % kind.block_elements:
        raise ShapeError(
            f"a {kind.name} matrix needs a multiple of {kind.block_elements} columns,"
            f" found [{rows}, {columns}]"
        )
    shape = list(matrix.data.shape)
    if matrix.data.dtype == torch.uint8:
        expected = [rows, kind.row_bytes(columns)]
    elif matrix.data.dtype == _FLOATS.get(kind.name):
        expected = [rows, columns]
    else:
        raise ShapeError(f"a {kind.name} matrix cannot be held as {matrix.data.dtype}")
    if shape != expected:
        raise ShapeError(
            f"a {kind.name} matrix [{rows}, {columns}] has data {expected}, found {shape}"
        )


def _check_scale(matrix: QuantMatrix) -> None:
    kind, rows, columns, scale = matrix.block_type, matrix.rows, matrix.columns, matrix.scale
    if kind.name not in ("FP8_E4M3", "FP4_E2M1"):
        if scale is not None:
            raise ShapeError(f"a {kind.name} matrix has no scale tensor")
        return
    if scale is None:
        raise ShapeError(f"a {kind.name} matrix [{rows}, {columns}] needs its scale tensor")
    if scale.dtype != torch.uint8:
        raise ShapeError(f"scales must be E8M0 bytes (uint8), found {scale.dtype}")
    shape = tuple(scale.shape)
    if kind.name == "FP8_E4M3":
        fits = _fp8_block(rows, columns, shape) is not None
        expected = [[-(-rows // b), -(-columns // b)] for b in FP8_SCALE_BLOCKS]
    else:
        fits = columns % FP4_SCALE_BLOCK == 0 and shape == (rows, columns // FP4_SCALE_BLOCK)
        expected = [[rows, columns // FP4_SCALE_BLOCK]]
    if not fits:
        raise ShapeError(
            f"a {kind.name} matrix [{rows}, {columns}] has scales"
            f" {' or '.join(map(str, expected))}, found {list(shape)}"
        )


def _fp8_block(rows: int, columns: int, shape: tuple[int, ...]) -> int | None:
    """Side of the squares that share a scale; where two sides fit, they mean the same."""
    fitting = (b for b in FP8_SCALE_BLOCKS if shape == (-(-rows // b), -(-columns // b)))
    return next(fitting, None)


def dequantize(
    weight: QuantMatrix, dtype: torch.dtype = torch.float32, *, rows: slice | None = None
) -> Tensor:
    """Numbers of a stored matrix, or of some of its rows.

    Args:
        weight: the matrix.
        dtype: float type of the result; decoding is f32 (F64 weights: f64), then one rounding.
        rows: rows to decode, step 1; None takes all.

    Returns:
        [rows, columns] of `dtype`. A view of `weight.data` when that has this dtype already and is
        aligned for it; do not write to it.

    Raises:
        ShapeError: if `rows` has a step.
        UnsupportedModelError: if the block type has no decoder.
    """
    start, stop, step = (rows or slice(None)).indices(weight.rows)
    if step != 1:
        raise ShapeError(f"rows must be a slice of step 1, found {rows}")
    stop = max(start, stop)
    stored = _as_floats(weight)
    if stored is not None:
        return stored[start:stop].to(dtype)
    tiles = list(_tiles(start, stop, weight.columns))
    if len(tiles) == 1:
        return _decode_rows(weight, start, stop).to(dtype)
    result = torch.empty(stop - start, weight.columns, dtype=dtype, device=weight.data.device)
    for first, last in tiles:
        result[first - start : last - start] = _decode_rows(weight, first, last)
    return result


def quant_matmul(
    x: Tensor,
    weight: QuantMatrix | Tensor,
    *,
    backend: Backend = "auto",
    activations: Activations = "f32",
) -> Tensor:
    """Product with a stored matrix: y[..., r] = sum_c x[..., c] W[r, c].

    Args:
        x: [..., columns], any float dtype; the product is computed in it.
        weight: the matrix as stored, or a float tensor [rows, columns].
        backend: implementation to use; the C kernels take float32 on the CPU.
        activations: "int8" rounds groups of 32 of x to int8 where the type is one of `INT8_TYPES`.

    Returns:
        [..., rows], dtype of x. Beside it, at most one tile of decoded rows is held (64 MiB).

    Raises:
        ShapeError: if x is not a float tensor of the matrix's input width.
        BackendUnavailableError: if a named backend cannot run here.
        UnsupportedModelError: if the block type has no decoder.
    """
    is_matrix = isinstance(weight, Tensor) and weight.dim() == 2 and weight.is_floating_point()
    if isinstance(weight, Tensor) and not is_matrix:
        raise ShapeError(
            f"a weight must be a float matrix, found {weight.dtype} {list(weight.shape)}"
        )
    columns = weight.shape[1] if isinstance(weight, Tensor) else weight.columns
    if not x.is_floating_point() or x.dim() == 0 or x.shape[-1] != columns:
        raise ShapeError(f"x must be float [..., {columns}], found {x.dtype} {list(x.shape)}")
    chosen = resolve_backend(backend, native_products_for(x, weight), operation="quant_matmul")
    is_int8 = activations == "int8" and has_int8_form(weight)
    if chosen == "native":
        rows = weight.shape[0] if isinstance(weight, Tensor) else weight.rows
        flat = x.reshape(math.prod(x.shape[:-1]), columns)
        y = multiply_rows([flat], weight, [(0, rows)], is_int8=is_int8)
        return y.view(*x.shape[:-1], rows)
    return quant_matmul_reference(round_activations(x) if is_int8 else x, weight)


def has_int8_form(weight: QuantMatrix | Tensor) -> bool:
    """Whether products with int8 activations exist for a weight."""
    return not isinstance(weight, Tensor) and weight.block_type.name in INT8_TYPES


def round_activations(x: Tensor) -> Tensor:
    """What is left of x [..., n] after rounding groups of 32 to int8, in the dtype of x.

    Each group becomes scale * q with scale = max |x| / 127 in float32 and q rounded half to even. A
    group with a NaN or an infinity becomes NaN.
    """
    groups = x.float().unflatten(-1, (-1, INT8_GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    is_zero = largest < _INT8_TINIEST
    is_bad = ~torch.isfinite(largest)
    safe = torch.where(is_zero | is_bad, 1.0, largest)
    # Tensors divide with one rounding; a number on the left would be a reciprocal and a product.
    top = torch.full_like(safe, 127.0)
    q = torch.round(groups * (top / safe)).to(x.dtype)
    scale = torch.where(is_zero, 0.0, torch.where(is_bad, torch.nan, safe / top))
    return (q * scale.to(x.dtype)).flatten(-2)


def quant_matmul_reference(x: Tensor, weight: QuantMatrix | Tensor) -> Tensor:
    """The formula of `quant_matmul`, a tile of rows at a time."""
    stored = weight if isinstance(weight, Tensor) else _as_floats(weight)
    if stored is not None and stored.dtype == x.dtype:
        return x @ stored.T
    rows, columns = weight.shape if isinstance(weight, Tensor) else (weight.rows, weight.columns)
    flat = x.reshape(math.prod(x.shape[:-1]), columns)
    result = x.new_empty(len(flat), rows)
    for first, last in _tiles(0, rows, columns):
        if isinstance(weight, Tensor):
            tile = weight[first:last].to(x.dtype)
        else:
            tile = dequantize(weight, x.dtype, rows=slice(first, last))
        result[:, first:last] = flat @ tile.T
    return result.view(*x.shape[:-1], rows)


def native_products_for(x: Tensor, weight: QuantMatrix | Tensor) -> tuple[Implementation, ...]:
    """What can multiply these, the best first."""
    if isinstance(weight, Tensor):
        data, is_known = weight, weight.dtype in (torch.float32, torch.float16, torch.bfloat16)
    else:
        name = weight.block_type.name
        # F4 has no scales, as products expect of 4-bit floats.
        data, is_known = weight.data, name != "F4" and has_native_type(name)
    is_side_by_side = data.shape[1] <= 1 or data.stride(1) == 1
    if not is_known or not is_side_by_side or data.device.type != "cpu":
        return ("reference",)
    return available_on(x)


def multiply_rows(
    inputs: list[Tensor],
    weight: QuantMatrix | Tensor,
    ranges: list[tuple[int, int]],
    *,
    is_int8: bool,
) -> Tensor:
    """Several products with ranges of rows of one matrix, by the C kernels in one call.

    Args:
        inputs: f32 [tokens, columns] each, on the CPU.
        weight: the matrix as stored.
        ranges: first row and number of rows of each product.
        is_int8: round the inputs to int8 first.

    Returns:
        f32 [tokens, sum of the numbers of rows], one product after another.
    """
    lib, ffi = library()
    run, matrix = run_here(), matrix_of(weight)
    inputs = [x if x.shape[-1] <= 1 or x.stride(-1) == 1 else x.contiguous() for x in inputs]
    tokens, columns = inputs[0].shape
    y = torch.empty(tokens, sum(rows for _, rows in ranges))
    run.cdata.is_small = tokens <= SMALL_TOKENS
    records = ffi.new("dk_input[]", len(inputs))
    products = ffi.new("dk_product[]", len(inputs))
    kept, column = [], 0
    for index, (x, (first, rows)) in enumerate(zip(inputs, ranges, strict=True)):
        record, product = records[index], products[index]
        record.x, record.stride = ffi.cast("float *", x.data_ptr()), x.stride(0)
        if is_int8:
            memory = torch.empty(lib.dk_quantized_bytes(tokens, columns) + 63, dtype=torch.uint8)
            start = pointer(memory) + -memory.data_ptr() % 64
            run.check(lib.dk_quantize_rows(run.cdata, records + index, start, tokens, columns))
            kept.append(memory)
        product.y, product.y_stride = pointer(y) + column, y.shape[1]
        product.w, product.first_row, product.rows = matrix, first, rows
        product.x, product.tokens = records + index, tokens
        column += rows
    run.check(lib.dk_products(run.cdata, products, len(inputs)))
    return y


def _tiles(start: int, stop: int, columns: int) -> Iterator[tuple[int, int]]:
    """Ranges of rows with at most `TILE_ELEMENTS` elements each (but at least one row)."""
    height = max(1, TILE_ELEMENTS // max(1, columns))
    for first in range(start, stop, height):
        yield first, min(first + height, stop)


def _as_floats(weight: QuantMatrix) -> Tensor | None:
    """The stored numbers [rows, columns] without a copy, where type, strides and address allow."""
    dtype = _FLOATS.get(weight.block_type.name)
    data = weight.data
    if dtype is None or weight.tensor_scale != 1.0:
        return None
    if data.dtype != torch.uint8:
        return data
    # PyTorch checks offset and strides, but not the address that a mapping happens to have.
    steps = (data.data_ptr(), data.storage_offset(), data.stride(0))
    if data.stride(1) != 1 or any(step % dtype.itemsize for step in steps):
        return None
    return data.view(dtype)


def _decode_rows(weight: QuantMatrix, first: int, last: int) -> Tensor:
    """Rows first..last-1 with all scales applied, f32 (F64 weights: f64); a fresh tensor."""
    data = weight.data[first:last]
    dtype = _FLOATS.get(weight.block_type.name)
    if dtype is not None:
        values = as_type(data, dtype).to(torch.promote_types(dtype, torch.float32))
    else:
        blocks = data.reshape(-1, weight.block_type.block_bytes)
        values = decode_blocks(blocks, weight.block_type).view(last - first, weight.columns)
    if weight.scale is not None:
        _apply_scales(values, weight, first)
    if weight.tensor_scale != 1.0:
        values.mul_(weight.tensor_scale)
    return values


def _apply_scales(values: Tensor, weight: QuantMatrix, first: int) -> None:
    """Multiply rows [n, columns], the first of which is row `first`, by their E8M0 block scales."""
    if weight.scale is None or values.numel() == 0:
        return
    n, columns = values.shape
    height, width = weight.scale_block
    index = torch.arange(first, first + n, device=values.device) // height
    powers = look_up(e8m0_values(values.device), weight.scale[index])  # [n, blocks per row]
    whole = columns // width
    inner = values[:, : whole * width].unflatten(1, (whole, width))
    inner.mul_(powers[:, :whole].unsqueeze(2))
    values[:, whole * width :].mul_(powers[:, whole:])


class _Writable:
    """Presents a read-only array as a writable one to NumPy's protocol, and keeps it alive."""

    def __init__(self, array: npt.NDArray[Any]) -> None:
        self._array = array
        interface = dict(array.__array_interface__)
        interface["data"] = (interface["data"][0], False)
        self.__array_interface__ = interface


def tensor_from_numpy(array: npt.NDArray[Any]) -> Tensor:
    """A tensor over the memory of an array that may be read-only; nothing is copied.

    PyTorch has no read-only tensors and warns about every such array. Weights are only ever read,
    so the flag is dropped here instead. Never write to the result: a mapped page would fault.
    """
    if array.flags.writeable or array.size == 0:
        return torch.from_numpy(np.array(array, copy=True) if array.size == 0 else array)
    return torch.from_numpy(np.asarray(_Writable(array)))


def matrix_from_numpy(
    data: npt.NDArray[np.uint8],
    block_type: BlockType,
    rows: int,
    columns: int,
    scale: npt.NDArray[np.uint8] | None = None,
    tensor_scale: float = 1.0,
) -> QuantMatrix:
    """A stored matrix over the bytes of a file, without copying them.

    Args:
        data: uint8, the rows one after another; any shape.
        block_type: storage type.
        rows: output width.
        columns: input width.
        scale: E8M0 bytes of FP8_E4M3 and FP4_E2M1 weights, uint8 in the shape they are stored in.
        tensor_scale: factor on every element.

    Raises:
        ShapeError: if the number of bytes, or the shape of the scales, does not fit.
    """
    if columns % block_type.block_elements:
        raise ShapeError(
            f"a {block_type.name} row must be a multiple of {block_type.block_elements} elements,"
            f" found {columns}"
        )
    row_bytes = block_type.row_bytes(columns)
    if data.dtype != np.uint8 or data.size != rows * row_bytes:
        raise ShapeError(
            f"a {block_type.name} matrix [{rows}, {columns}] has {rows * row_bytes:,} bytes,"
            f" found {data.size:,} elements of {data.dtype}"
        )
    return QuantMatrix(
        block_type=block_type,
        rows=rows,
        columns=columns,
        data=tensor_from_numpy(data.reshape(rows, row_bytes)),
        scale=None if scale is None else tensor_from_numpy(scale),
        tensor_scale=tensor_scale,
    )

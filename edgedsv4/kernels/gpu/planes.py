"""Weight matrices on a device: the fields of the blocks of a file, each in a tensor of its own.

A block of a GGUF file holds scales and codes side by side, at odd addresses. Here a field of all
blocks of a row is contiguous, so that a kernel reads it in wide words; the bytes stay as many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import ceil

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError, UnsupportedModelError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels._triton import HAVE_TRITON, IS_INTERPRETED
from edgedsv4.kernels.gpu.plane_layouts import LAYOUTS, e2m1_words, split_blocks, table_of
from edgedsv4.kernels.gpu.random_planes import UNIT_DEVIATION, fill_random
from edgedsv4.kernels.gpu.split_blocks import SPLIT_TYPES, split_rows
from edgedsv4.kernels.quant_matmul import QuantMatrix, dequantize

SUPPORTED = frozenset((*LAYOUTS, "FP8_E4M3", "F16", "BF16", "F32"))
"""Types that are kept as they are; others become the fallback type when they are loaded."""

# Elements that are taken apart at once: at most some ten bytes of scratch memory for each.
CHUNK_ELEMENTS = 32 << 20

_FLOATS = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True, eq=False)
class DeviceMatrix:
    """One matrix, or the experts of a bank below one another."""

    type: str
    """Name of the block type."""
    rows: int
    """Output width; of a bank: slots times the output width of an expert."""
    cols: int
    """Input width."""
    planes: tuple[Tensor, ...] = field(repr=False)
    """One to four contiguous tensors; the first axis is rows, but for a look-up table (last)."""
    scale_cols: int = 0
    """Columns per scale (FP8_E4M3), else 0."""

    @property
    def bytes(self) -> int:
        """Memory of all planes."""
        return sum(plane.nbytes for plane in self.planes)


def plane_arguments(matrix: DeviceMatrix) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The planes as `decode_tile` takes them, the first one in the place of those there are not."""
    planes = [p.view(torch.int16) if p.dtype == torch.bfloat16 else p for p in matrix.planes]
    first = planes[0]
    p0, p1, p2, p3 = (*planes, first, first, first)[:4]
    return p0, p1, p2, p3


def matrix_bytes(type_name: str, rows: int, cols: int, *, scale_cols: int = 128) -> int:
    """Memory of the planes of a matrix, without a look-up table (a few KB, once per device)."""
    shapes = _plane_shapes(type_name, rows, cols, scale_cols)
    return sum(torch.Size(shape).numel() * dtype.itemsize for shape, dtype in shapes)


def empty_matrix(
    type_name: str, rows: int, cols: int, device: torch.device | str, *, scale_cols: int = 128
) -> DeviceMatrix:
    """A matrix with unset contents."""
    shapes = _plane_shapes(type_name, rows, cols, scale_cols)
    planes = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in shapes]
    table = table_of(type_name, torch.device(device))
    if table is not None:
        planes.append(table)
    width = scale_cols if type_name == "FP8_E4M3" else 0
    return DeviceMatrix(type_name, rows, cols, tuple(planes), width)


def empty_bank(
    type_name: str,
    slots: int,
    rows: int,
    cols: int,
    device: torch.device | str,
    *,
    fallback: str = "BF16",
    scale_cols: int = 128,
) -> DeviceMatrix:
    """Place for `slots` matrices [rows, cols] of one type of files, or of the fallback type."""
    name = _held_as(type_name, fallback)
    return empty_matrix(name, slots * rows, cols, device, scale_cols=scale_cols)


def device_matrix(
    weight: QuantMatrix, device: torch.device | str, *, fallback: str = "BF16"
) -> DeviceMatrix:
    """A stored matrix on a device; a type that is not `SUPPORTED` becomes the fallback type.

    The bytes travel as they are stored, a chunk of rows at a time, and are taken apart there.
    """
    is_scaled = weight.tensor_scale != 1.0 and weight.block_type.name != "NVFP4"
    name = fallback if is_scaled else _held_as(weight.block_type.name, fallback)
    scale_cols = weight.scale_block[1] if name == "FP8_E4M3" else 128
    matrix = empty_matrix(name, weight.rows, weight.columns, device, scale_cols=scale_cols)
    _fill(matrix, 0, weight)
    return matrix


def fill_bank(bank: DeviceMatrix, slot: int, weight: QuantMatrix | Tensor) -> None:
    """Write one matrix into a slot of a bank.

    Args:
        bank: from `empty_bank`.
        slot: place; the matrix has rows `slot * n .. slot * n + n - 1` of the bank.
        weight: the matrix, or its rows as a GGUF file has them, uint8 [n, row_bytes], anywhere.

    Raises:
        ShapeError: if the matrix does not fit.
    """
    if isinstance(weight, Tensor):
        weight = QuantMatrix(BLOCK_TYPES[bank.type], len(weight), bank.cols, weight)
    fill_rows(bank, slot * weight.rows, weight)


def fill_rows(bank: DeviceMatrix, first: int, weight: QuantMatrix) -> None:
    """Write a matrix, one expert's or that of several below one another, into rows of a bank.

    Args:
        bank: from `empty_bank`.
        first: row of the bank.
        weight: the matrix, anywhere; what is on the device already is not copied.

    Raises:
        ShapeError: if the matrix does not fit.
    """
    name = weight.block_type.name
    is_inside = 0 <= first <= bank.rows - weight.rows and weight.columns == bank.cols
    is_scaled = weight.tensor_scale != 1.0 and name != "NVFP4"
    is_type = bank.type in _FLOATS or (not is_scaled and _held_as(name, "") == bank.type)
    has_scales = bank.type != "FP8_E4M3" or weight.scale_block[1] == bank.scale_cols
    if not (is_inside and is_type and has_scales):
        raise ShapeError(
            f"{weight} cannot be rows {first} .. of a bank of {bank.type}"
            f" [{bank.rows}, {bank.cols}]"
        )
    if _is_split_by_kernel(bank, weight):
        rows = slice(first, first + weight.rows)
        split_rows(bank.type, [plane[rows] for plane in bank.planes], weight.data)
        return
    _fill(bank, first, weight)


def _is_split_by_kernel(bank: DeviceMatrix, weight: QuantMatrix) -> bool:
    """Whether the blocks are on the device already, and one launch takes them apart."""
    device = bank.planes[0].device
    can_launch = HAVE_TRITON and (device.type != "cpu" or IS_INTERPRETED)
    is_type = weight.block_type.name == bank.type and bank.type in SPLIT_TYPES
    is_there = weight.data.device == device and weight.data.is_contiguous()
    return can_launch and is_type and is_there


def stack_rows(matrices: Sequence[DeviceMatrix]) -> DeviceMatrix:
    """Matrices of one type and input width below one another (a copy)."""
    head = matrices[0]
    for other in matrices:
        if (other.type, other.cols, other.scale_cols) != (head.type, head.cols, head.scale_cols):
            raise ShapeError(f"{other} cannot be stacked on {head}")
    has_table = table_of(head.type, head.planes[0].device) is not None
    count = len(head.planes) - has_table
    planes = [torch.cat([m.planes[i] for m in matrices]) for i in range(count)]
    rows = sum(m.rows for m in matrices)
    return DeviceMatrix(
        head.type, rows, head.cols, (*planes, *head.planes[count:]), head.scale_cols
    )


def random_matrix(
    type_name: str,
    rows: int,
    cols: int,
    device: torch.device | str,
    generator: torch.Generator,
    *,
    scale_cols: int = 128,
) -> DeviceMatrix:
    """A matrix of random codes, elements of a standard deviation of about 1 / sqrt(cols).

    Written straight into the planes, so that gigabytes take milliseconds on a GPU.
    """
    matrix = empty_matrix(type_name, rows, cols, device, scale_cols=scale_cols)
    scale = float(cols) ** -0.5 / UNIT_DEVIATION.get(type_name, 1.0)
    fill_random(type_name, matrix.planes, scale, generator)
    return matrix


def _plane_shapes(
    name: str, rows: int, cols: int, scale_cols: int
) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shape and dtype of each plane but the table."""
    if name not in SUPPORTED:
        raise UnsupportedModelError(f"weights of type {name} have no form on a GPU")
    if cols % BLOCK_TYPES[name].block_elements:
        raise ShapeError(f"{cols} columns are no whole number of {name} blocks")
    if name in _FLOATS:
        return [((rows, cols), _FLOATS[name])]
    if name == "FP8_E4M3":
        if cols % 4:
            raise ShapeError(f"{cols} columns of {name}: a multiple of 4 is needed")
        shape = (rows, ceil(cols / scale_cols))
        return [((rows, cols // 4), torch.int32), (shape, torch.uint8)]
    shapes: list[tuple[tuple[int, ...], torch.dtype]] = []
    for plane in LAYOUTS[name].planes:
        count = cols * plane.numbers // plane.columns
        shapes.append(((rows, count), plane.dtype))
    if name == "NVFP4":
        shapes.append(((rows,), torch.float32))
    return shapes


def _held_as(name: str, fallback: str) -> str:
    """Type of the planes of a type of files."""
    if name == "FP4_E2M1":
        return "MXFP4"
    return name if name in SUPPORTED else fallback


def _fill(matrix: DeviceMatrix, first_row: int, weight: QuantMatrix) -> None:
    """Rows first_row .. of a matrix from a stored one of the same width, in chunks."""
    height = max(1, CHUNK_ELEMENTS // max(1, weight.columns))
    for start in range(0, weight.rows, height):
        stop = min(start + height, weight.rows)
        parts = _parts(matrix, weight, start, stop)
        for plane, part in zip(matrix.planes, parts, strict=False):
            target = plane[first_row + start : first_row + stop]
            target.copy_(part.view(target.shape))


def _parts(matrix: DeviceMatrix, weight: QuantMatrix, start: int, stop: int) -> list[Tensor]:
    """The planes of some rows, on the device of the matrix."""
    device, name = matrix.planes[0].device, weight.block_type.name
    if matrix.type in _FLOATS:
        dtype = _FLOATS[matrix.type]
        if weight.scale is not None or name in _FLOATS:
            return [dequantize(weight, dtype, rows=slice(start, stop))]
        part = replace(weight, rows=stop - start, data=weight.data[start:stop].to(device))
        return [dequantize(part, dtype)]
    raw, scale = weight.data[start:stop].to(device), _scale_rows(weight, start, stop)
    if scale is not None:
        words = e2m1_words(raw) if name == "FP4_E2M1" else raw.contiguous().view(torch.int32)
        return [words, scale]
    parts = split_blocks(matrix.type, raw)
    if name == "NVFP4":
        parts.append(torch.full((stop - start,), weight.tensor_scale, device=device))
    return parts


def _scale_rows(weight: QuantMatrix, start: int, stop: int) -> Tensor | None:
    """E8M0 bytes of some rows, one line per row, of types that have them apart."""
    scale = weight.scale
    if scale is None:
        return None
    index = torch.arange(start, stop, device=scale.device) // weight.scale_block[0]
    return scale[index]

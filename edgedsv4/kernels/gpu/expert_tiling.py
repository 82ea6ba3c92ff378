"""Tile sizes of the routed experts' products, by the matrix unit and the tokens per expert."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.kernels.gpu.decode_product import PRODUCT_TYPES
from edgedsv4.kernels.gpu.fragments import matrix_unit
from edgedsv4.kernels.gpu.half_tiles import HALF_TYPES

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.planes import DeviceMatrix


@dataclass(frozen=True, slots=True)
class Tiling:
    """Sizes of a tile of weights, and how it is launched."""

    rows: int
    """Rows of each matrix."""
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class _Tables:
    """Tilings by pairs per tile: of gate and up together, of down, of everything else."""

    gate_up: dict[int, Tiling]
    down: dict[int, Tiling]
    half_gate_up: dict[int, Tiling]
    half_down: dict[int, Tiling]
    general: dict[int, Tiling]


# For types that are not in `PRODUCT_TYPES`, and for gate and up of two types.
_GENERAL = {
    16: Tiling(32, 256, 8, 2),
    32: Tiling(32, 256, 8, 2),
    64: Tiling(32, 256, 8, 2),
}
# For `HALF_TYPES`: with 8 rows of each matrix, or 16 of one, per warp a group is a thread's.
_HALF_GATE_UP = {
    16: Tiling(32, 128, 4, 2),
    32: Tiling(32, 128, 4, 2),
    64: Tiling(64, 128, 8, 2),
}
_HALF_DOWN = {
    16: Tiling(64, 128, 4, 3),
    32: Tiling(64, 128, 4, 2),
    64: Tiling(128, 128, 8, 2),
}
_HOPPER = _Tables(
    gate_up={
        16: Tiling(64, 128, 4, 3),
        32: Tiling(64, 128, 4, 3),
        64: Tiling(64, 128, 8, 3),
        128: Tiling(64, 128, 8, 2),
    },
    down={
        16: Tiling(64, 128, 4, 3),
        32: Tiling(64, 128, 4, 3),
        64: Tiling(128, 128, 8, 3),
        128: Tiling(128, 128, 8, 2),
    },
    half_gate_up={
        16: Tiling(32, 128, 4, 2),
        32: Tiling(32, 128, 4, 3),
        64: Tiling(64, 128, 8, 3),
        128: Tiling(32, 128, 4, 3),
    },
    half_down={
        16: Tiling(64, 128, 4, 3),
        32: Tiling(64, 128, 4, 3),
        64: Tiling(128, 128, 8, 3),
        128: Tiling(128, 128, 8, 3),
    },
    general=_GENERAL,
)
_NVIDIA = _Tables(
    gate_up={
        16: Tiling(64, 128, 4, 3),
        32: Tiling(64, 128, 4, 2),
        64: Tiling(64, 128, 8, 2),
    },
    down={
        16: Tiling(64, 128, 4, 3),
        32: Tiling(128, 128, 8, 2),
        64: Tiling(128, 128, 8, 2),
    },
    half_gate_up=_HALF_GATE_UP,
    half_down={**_HALF_DOWN, 64: Tiling(64, 128, 4, 2)},
    general=_GENERAL,
)
_OTHERS = _Tables(
    gate_up={
        16: Tiling(32, 128, 4, 2),
        32: Tiling(32, 128, 8, 2),
        64: Tiling(32, 128, 8, 2),
    },
    down={
        16: Tiling(64, 128, 4, 2),
        32: Tiling(64, 128, 8, 2),
        64: Tiling(64, 128, 8, 2),
    },
    half_gate_up=_HALF_GATE_UP,
    half_down=_HALF_DOWN,
    general=_GENERAL,
)
_TABLES = {"wgmma": _HOPPER, "mma": _NVIDIA, "other": _OTHERS}
# Products in f32 run on the units for scalars.
_PRECISE = {16: Tiling(16, 128, 8, 1)}
WIDTHS = (16, 32, 64, 128)


def tile_width(pairs: int, slots: int, widest: int = WIDTHS[-1]) -> int:
    """Pairs per tile: the least width that holds 1.25 times an average slot's pairs."""
    wanted = min(widest, 5 * pairs // (4 * max(1, slots)))
    return next(width for width in WIDTHS if width >= wanted)


def is_pair(w1: DeviceMatrix, w3: DeviceMatrix) -> bool:
    """Whether rows of both can be one operand."""
    is_same = (w1.type, w1.scale_cols) == (w3.type, w3.scale_cols)
    return is_same and w1.type in PRODUCT_TYPES


def tilings(
    banks: tuple[DeviceMatrix, ...], precise: bool
) -> tuple[dict[int, Tiling], dict[int, Tiling]]:
    """Tilings of gate and up, and of down, by pairs per tile."""
    w1, w3, w2 = banks
    if precise:
        return _PRECISE, _PRECISE
    tables = _TABLES[matrix_unit()]
    gate_up = tables.gate_up if is_pair(w1, w3) else tables.general
    down = tables.down if w2.type in PRODUCT_TYPES else tables.general
    if is_pair(w1, w3) and w1.type in HALF_TYPES:
        gate_up = tables.half_gate_up
    if w2.type in HALF_TYPES:
        down = tables.half_down
    return gate_up, down

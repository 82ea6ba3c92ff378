"""Tile sizes of the routed experts' products, by the matrix unit and the tokens per expert."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
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
    """Gate and up of types that are not in `PRODUCT_TYPES`, or of two types."""
    general_down: dict[int, Tiling]
    precise: dict[int, Tiling]
    down_exceptions: dict[tuple[str, int], Tiling] = field(default_factory=dict)
    """By type, too."""
    is_split: bool = False
    """Whether gate and up are computed one after the other, but for `HALF_TYPES`."""


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
# Products in f32 run on the units for scalars.
_PRECISE = {16: Tiling(16, 128, 8, 1)}
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
    general_down=_GENERAL,
    precise=_PRECISE,
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
    half_down=_HALF_DOWN | {64: Tiling(64, 128, 4, 2)},
    general=_GENERAL | {64: Tiling(32, 256, 8, 1)},
    general_down=_GENERAL,
    precise=_PRECISE,
    down_exceptions={
        ("FP8_E4M3", 16): Tiling(128, 128, 8, 3),
        ("Q8_0", 64): Tiling(64, 128, 4, 2),
        ("Q4_K", 64): Tiling(64, 128, 4, 2),
    },
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
    general_down=_GENERAL,
    precise=_PRECISE,
)
# The compiler addresses a bank relative to its start, and cannot choose between two banks; and
# activations that wait for the second product are too many registers.
_AMD = replace(
    _OTHERS,
    gate_up={
        16: Tiling(32, 128, 4, 1),
        32: Tiling(32, 128, 8, 1),
        64: Tiling(32, 128, 8, 1),
    },
    half_down=_HALF_DOWN | {64: Tiling(64, 128, 8, 2)},
    general={
        16: Tiling(32, 256, 8, 1),
        32: Tiling(32, 256, 8, 1),
        64: Tiling(32, 256, 8, 1),
    },
    general_down={16: Tiling(32, 256, 8, 1), 32: Tiling(32, 256, 8, 1)},
    is_split=True,
)
# With a table of places the others would not fit into the registers of a gfx11.
_RDNA = replace(
    _AMD,
    half_gate_up=_HALF_GATE_UP | {32: Tiling(32, 128, 8, 1), 64: Tiling(16, 128, 8, 1)},
)
_TABLES = {"wgmma": _HOPPER, "mma": _NVIDIA, "mfma": _AMD, "wmma": _RDNA, "other": _OTHERS}
WIDTHS = (16, 32, 64, 128)


def tile_width(pairs: int, slots: int, widest: int = WIDTHS[-1]) -> int:
    """Pairs per tile: the least width that holds 1.25 times an average slot's pairs."""
    wanted = min(widest, 5 * pairs // (4 * max(1, slots)))
    return next(width for width in WIDTHS if width >= wanted)


_ROW_FACTORS = "NVFP4"  # each matrix has factors of its own for its rows: never two as one operand


def is_split() -> bool:
    """Whether gate and up are computed one after the other where they are no pair."""
    return _TABLES[matrix_unit()].is_split


def is_pair(w1: DeviceMatrix, w3: DeviceMatrix, precise: bool) -> bool:
    """Whether rows of both are one operand."""
    is_same = (w1.type, w1.scale_cols) == (w3.type, w3.scale_cols)
    if precise or not is_same or w1.type not in PRODUCT_TYPES or w1.type == _ROW_FACTORS:
        return False
    return not is_split() or w1.type in HALF_TYPES


def tilings(
    banks: tuple[DeviceMatrix, ...], precise: bool
) -> tuple[dict[int, Tiling], dict[int, Tiling]]:
    """Tilings of gate and up, and of down, by pairs per tile."""
    w1, w3, w2 = banks
    tables = _TABLES[matrix_unit()]
    if precise:
        return tables.precise, tables.precise
    are_products = w1.type in PRODUCT_TYPES and w3.type in PRODUCT_TYPES
    is_one_type = (w1.type, w1.scale_cols) == (w3.type, w3.scale_cols)
    is_narrow = are_products and is_one_type and (tables.is_split or w1.type != _ROW_FACTORS)
    gate_up = tables.gate_up if is_narrow else tables.general
    down = tables.down if w2.type in PRODUCT_TYPES else tables.general_down
    others = tables.down_exceptions
    down = {block: others.get((w2.type, block), tiling) for block, tiling in down.items()}
    if is_pair(w1, w3, precise) and w1.type in HALF_TYPES:
        gate_up = tables.half_gate_up
    if w2.type in HALF_TYPES:
        down = tables.half_down
    return gate_up, down

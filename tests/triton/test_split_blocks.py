"""Blocks taken apart by one launch against the definition of the planes."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.formats.block_types import BLOCK_TYPES
from edgedsv4.kernels.gpu.plane_layouts import split_blocks
from edgedsv4.kernels.gpu.planes import empty_matrix
from edgedsv4.kernels.gpu.split_blocks import SPLIT_TYPES, split_rows


def _raw(name: str, rows: int, columns: int) -> torch.Tensor:
    """Rows of random bits: every layout of a block is a matter of bits alone."""
    shape = (rows, BLOCK_TYPES[name].row_bytes(columns))
    return torch.randint(
        0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(3)
    )


@pytest.mark.parametrize("name", SPLIT_TYPES)
@pytest.mark.parametrize(("rows", "columns"), [(1, 256), (3, 512), (67, 512)])
def test_planes_have_the_bits_of_the_definition(name: str, rows: int, columns: int) -> None:
    raw = _raw(name, rows, columns).to(DEVICE)
    matrix = empty_matrix(name, rows + 2, columns, DEVICE)
    for plane in matrix.planes:
        if plane.shape[0] == rows + 2:
            plane.view(torch.uint8).fill_(0xA5)
    split_rows(name, [plane[1 : rows + 1] for plane in matrix.planes], raw)
    expected = split_blocks(name, raw)
    for found, wanted in zip(matrix.planes, expected, strict=False):
        whole = found.view(torch.uint8)
        assert torch.equal(whole[1 : rows + 1], wanted.view(torch.uint8))
        assert bool((whole[0] == 0xA5).all())
        assert bool((whole[-1] == 0xA5).all())


def test_rows_that_do_not_fit_are_refused() -> None:
    matrix = empty_matrix("Q2_K", 3, 256, DEVICE)
    with pytest.raises(ShapeError, match="split_rows"):
        split_rows("Q2_K", matrix.planes, _raw("Q2_K", 2, 256).to(DEVICE))

"""Hadamard transform against the matrix of bit-parity signs."""

from __future__ import annotations

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.hadamard import hadamard


def matrix(n: int) -> torch.Tensor:
    signs = [[(-1.0) ** (i & j).bit_count() for j in range(n)] for i in range(n)]
    return torch.tensor(signs, dtype=torch.float64) / n**0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("n", [1, 2, 64, 128])
def test_matches_the_sign_matrix(n: int, dtype: torch.dtype) -> None:
    x = torch.randn(3, 5, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64).to(
        dtype
    )
    assert_close("transform", hadamard(x), x.double() @ matrix(n))


def test_is_its_own_inverse() -> None:
    x = torch.randn(2, 32, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert_close("twice", hadamard(hadamard(x)), x)


@pytest.mark.parametrize("n", [0, 3, 96])
def test_a_width_that_is_no_power_of_two_is_refused(n: int) -> None:
    with pytest.raises(ShapeError, match="power of two"):
        hadamard(torch.empty(1, n))

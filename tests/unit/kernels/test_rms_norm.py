"""RMS norm against its formula in float64."""

from __future__ import annotations

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import BackendUnavailableError, ShapeError
from edgedsv4.kernels.rms_norm import rms_norm


def expected(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    wide = x.double()
    normed = wide / torch.sqrt((wide * wide).sum(-1, keepdim=True) / wide.shape[-1] + eps)
    return normed if weight is None else normed * weight.double()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(1, 9), (3, 7), (2, 5, 129)], ids=str)
def test_matches_the_formula(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(shape[-1], generator=generator)
    assert_close("weighted", rms_norm(x, weight, 1e-3), expected(x, weight, 1e-3))
    assert_close("unweighted", rms_norm(x, None, 1e-3), expected(x, None, 1e-3))


def test_a_zero_row_stays_zero() -> None:
    assert rms_norm(torch.zeros(2, 4), None, 1e-6).eq(0).all()


def test_empty_input_gives_empty_output() -> None:
    assert rms_norm(torch.empty(0, 4), torch.ones(4), 1e-6).shape == (0, 4)


def test_a_weight_of_another_width_is_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight is \[3\], expected \[4\]"):
        rms_norm(torch.ones(2, 4), torch.ones(3), 1e-6)


def test_a_backend_that_cannot_run_is_not_replaced() -> None:
    with pytest.raises(BackendUnavailableError, match="native"):
        rms_norm(torch.ones(2, 4).double(), None, 1e-6, backend="native")


def test_gradients_still_flow() -> None:
    x = torch.ones(2, 4, requires_grad=True)
    rms_norm(x, None, 1e-6).sum().backward()
    assert x.grad is not None

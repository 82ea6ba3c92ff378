"""Index scores against explicit loops; the selection with its tie rule."""

from __future__ import annotations

import pytest
import torch
from numeric import assert_close

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.index_scores import index_scores


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("tokens", "heads", "rows", "dim"), [(1, 1, 1, 2), (3, 5, 17, 8)])
def test_relu_comes_before_the_head_weights(
    tokens: int, heads: int, rows: int, dim: int, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(rows)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    q, keys, weights = normal(tokens, heads, dim), normal(rows, dim), normal(tokens, heads)
    expected = torch.zeros(tokens, rows, dtype=torch.float64)
    for t in range(tokens):
        for w in range(rows):
            for h in range(heads):
                dot = float(q[t, h].double() @ keys[w].double())
                expected[t, w] += float(weights[t, h].double()) * max(dot, 0.0)
    assert_close("scores", index_scores(q, keys, weights), expected)


def test_no_keys_give_no_scores() -> None:
    assert index_scores(torch.ones(2, 3, 4), torch.empty(0, 4), torch.ones(2, 3)).shape == (2, 0)


def test_disagreeing_shapes_are_refused() -> None:
    with pytest.raises(ShapeError, match="index_scores"):
        index_scores(torch.ones(2, 3, 4), torch.ones(5, 3), torch.ones(2, 3))


def test_keys_wider_than_the_c_kernels_take_are_scored() -> None:
    q, keys = torch.ones(1, 2, 4608), torch.ones(3, 4608)
    assert index_scores(q, keys, torch.ones(1, 2)).tolist() == [[9216.0] * 3]

"""Queries against the reference functions; index queries bit for bit where they are rounded."""

from __future__ import annotations

import numeric
import pytest
import torch
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.finish_queries import IndexQueries, Rotation, finish_queries
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.kv_quant import dequantize_index_keys, quantize_index_keys
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import RopeTable, apply_rope_reference, rope_frequencies, rope_table

EPS = 1e-6


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def table_of(tokens: int, rope_dim: int) -> RopeTable:
    positions = torch.arange(70, 70 + tokens)
    return rope_table(positions, rope_frequencies(rope_dim, 100.0, None), torch.float32)


def rotation_of(table: RopeTable) -> Rotation:
    return Rotation(cos=table.cos.to(DEVICE), sin=table.sin.to(DEVICE))


def index_queries(
    raw: Tensor, *, is_rounded: bool, dtype: torch.dtype = torch.float32
) -> IndexQueries:
    return IndexQueries(
        out=torch.full(raw.shape, torch.nan, dtype=dtype, device=DEVICE),
        raw=raw.to(DEVICE),
        is_rounded=is_rounded,
        bad=torch.zeros(1, dtype=torch.int32, device=DEVICE),
    )


@pytest.mark.parametrize(
    ("tokens", "heads", "dim", "rope_dim"),
    [(1, 4, 64, 16), (3, 4, 64, 16), (2, 3, 96, 12), (1, 5, 40, 40), (1, 2, 512, 64)],
)
def test_heads_are_normalised_and_rotated(tokens: int, heads: int, dim: int, rope_dim: int) -> None:
    raw, table = random(tokens, heads, dim, seed=dim), table_of(tokens, rope_dim)
    expected = apply_rope_reference(rms_norm_reference(raw, None, EPS), table)
    q = raw.clone().to(DEVICE)
    finish_queries(q, q, rotation_of(table), EPS)
    numeric.assert_close("q", q.cpu(), expected)


def test_heads_can_be_written_as_bfloat16() -> None:
    raw, table = random(2, 4, 64), table_of(2, 16)
    out = torch.full(raw.shape, torch.nan, dtype=torch.bfloat16, device=DEVICE)
    finish_queries(out, raw.to(DEVICE), rotation_of(table), EPS)
    expected = apply_rope_reference(rms_norm_reference(raw, None, EPS), table)
    numeric.assert_close("q", out.cpu(), expected, limit=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "heads", "dim"), [(1, 8, 128), (3, 4, 32), (1, 3, 64), (2, 2, 16)]
)
def test_index_queries_are_rounded_like_keys(
    tokens: int, heads: int, dim: int, dtype: torch.dtype
) -> None:
    raw, table = random(tokens, heads, dim, seed=dim), table_of(tokens, 8)
    index = index_queries(raw, is_rounded=True, dtype=dtype)
    q = random(tokens, 2, 32).to(DEVICE)
    finish_queries(q, q, rotation_of(table), EPS, index)
    flat = hadamard_reference(apply_rope_reference(raw, table)).flatten(0, 1)
    expected = dequantize_index_keys(*quantize_index_keys(flat), torch.float32).view_as(raw)
    # Sums of the rotation may be fused on a GPU; a code then moves by one now and then.
    equal = (index.out.cpu() == expected).double().mean().item()
    assert equal >= (1.0 if DEVICE == "cpu" else 0.999)
    assert numeric.relative_error(index.out.cpu(), expected) < 0.02
    assert index.bad.item() == 0


@pytest.mark.parametrize("dim", [64, 24])
def test_exact_index_queries_are_only_rotated(dim: int) -> None:
    raw, table = random(2, 4, dim), table_of(2, 8)
    index = index_queries(raw, is_rounded=False)
    q = random(2, 2, 32).to(DEVICE)
    finish_queries(q, q, rotation_of(table), EPS, index)
    numeric.assert_close("index", index.out.cpu(), apply_rope_reference(raw, table))


@pytest.mark.parametrize("is_rounded", [False, True])
def test_an_index_query_that_is_not_finite_is_noticed(is_rounded: bool) -> None:
    raw, table = random(1, 4, 64), table_of(1, 8)
    raw[0, 3, 60] = torch.nan
    index = index_queries(raw, is_rounded=is_rounded)
    q = random(1, 2, 32).to(DEVICE)
    finish_queries(q, q, rotation_of(table), EPS, index)
    assert index.bad.item() == 1
    assert index.out[0, 3].isnan().any()
    assert index.out[0, :3].isfinite().all()


def test_queries_in_place() -> None:
    raw, table = random(2, 4, 64), table_of(2, 8)
    apart = index_queries(raw, is_rounded=True)
    here = IndexQueries(out=apart.raw, raw=apart.raw, is_rounded=True, bad=apart.bad)
    q = random(2, 2, 32).to(DEVICE)
    finish_queries(q.clone(), q, rotation_of(table), EPS, apart)
    finish_queries(q.clone(), q, rotation_of(table), EPS, here)
    assert torch.equal(apart.out, here.out)


@pytest.mark.skipif(DEVICE == "cpu", reason="slow in the interpreter")
@pytest.mark.parametrize("tokens", [1, 300])
def test_sizes_of_a_released_model(tokens: int) -> None:
    raw, table = random(tokens, 64, 512), table_of(tokens, 64)
    index = index_queries(random(tokens, 64, 128, seed=1), is_rounded=True)
    q = raw.clone().to(DEVICE)
    finish_queries(q, q, rotation_of(table), EPS, index)
    expected = apply_rope_reference(rms_norm_reference(raw, None, EPS), table)
    numeric.assert_close("q", q.cpu(), expected)
    flat = hadamard_reference(apply_rope_reference(index.raw.cpu(), table)).flatten(0, 1)
    rounded = dequantize_index_keys(*quantize_index_keys(flat), torch.float32)
    assert (index.out.cpu().view_as(rounded) == rounded).double().mean().item() >= 0.999


def test_disagreeing_buffers_are_refused() -> None:
    raw, table = random(2, 4, 64).to(DEVICE), rotation_of(table_of(2, 8))
    with pytest.raises(ShapeError, match="2 tokens"):
        finish_queries(raw[:, :3], raw, table, EPS)
    with pytest.raises(ShapeError, match="contiguous"):
        finish_queries(raw[..., :32], raw[..., :32], table, EPS)
    odd = index_queries(random(2, 4, 24), is_rounded=True)
    with pytest.raises(ShapeError, match="Hadamard"):
        finish_queries(raw, raw, table, EPS, odd)

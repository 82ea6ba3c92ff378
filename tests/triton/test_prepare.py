"""Rows of one token against the reference functions; encoders byte for byte."""

from __future__ import annotations

from dataclasses import replace
from math import isnan

import numeric
import pytest
import torch
from prepare_states import Sizes, Timeline, assert_same_rows
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.make_rows import hadamard
from edgedsv4.kernels.gpu.prepare import AttentionState, prepare
from edgedsv4.kernels.gpu.rows import (
    codes_of,
    group_pairs,
    load_fp4_rows,
    load_fp8_rows,
    number_pairs,
    row_format,
    store_row,
)
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)


@triton.jit
def _store_rows_kernel(
    codes_ptr,
    scales_ptr,
    x_ptr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
):
    i_row = tl.program_id(0)
    i_pair = number_pairs(G, GP)
    m_pair = i_pair < WIDTH // 2
    a = tl.load(x_ptr + i_row * WIDTH + 2 * i_pair, mask=m_pair, other=0.0)
    b = tl.load(x_ptr + i_row * WIDTH + 2 * i_pair + 1, mask=m_pair, other=0.0)
    row = i_row.to(tl.int64)
    store_row(codes_ptr, scales_ptr, row, a, b, i_pair, WIDTH, ROPE, SCALE_BYTES, FORMAT, G)


@triton.jit
def _load_rows_kernel(
    x_ptr,
    codes_ptr,
    scales_ptr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    ROPE: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    FORMAT: tl.constexpr,
    BN: tl.constexpr,
    BD: tl.constexpr,
):
    i_row = tl.arange(0, BN)
    m_row = i_row < COUNT
    rows = i_row.to(tl.int64)
    if FORMAT == "fp8":
        x = load_fp8_rows(codes_ptr, scales_ptr, rows, m_row, WIDTH, ROPE, SCALE_BYTES, BD)
    else:
        x = load_fp4_rows(codes_ptr, scales_ptr, rows, m_row, WIDTH, SCALE_BYTES, BD)
    o_d = tl.arange(0, BD)
    tl.store(x_ptr + i_row[:, None] * BD + o_d[None, :], x)


@triton.jit
def _hadamard_kernel(x_ptr, LOG_N: tl.constexpr, SIZE: tl.constexpr):
    o_x = tl.arange(0, SIZE)
    tl.store(x_ptr + o_x, hadamard(tl.load(x_ptr + o_x), LOG_N, SIZE))


def store(x: Tensor, empty: tuple[Tensor, ...], rope_dim: int, coded: str) -> None:
    width, block = x.shape[1], triton.next_power_of_2(x.shape[1])
    pairs = group_pairs(coded, block)
    _store_rows_kernel[(x.shape[0],)](
        codes_of(empty, coded),
        empty[1],
        x,
        WIDTH=width,
        ROPE=rope_dim,
        SCALE_BYTES=empty[1].shape[1],
        FORMAT=row_format(empty, coded),
        G=block // (2 * pairs),
        GP=pairs,
    )


def load(parts: tuple[Tensor, ...], width: int, rope_dim: int, coded: str) -> Tensor:
    count, block = parts[0].shape[0], triton.next_power_of_2(width)
    x = torch.empty((triton.next_power_of_2(count), block), device=DEVICE)
    _load_rows_kernel[(1,)](
        x,
        *parts,
        COUNT=count,
        WIDTH=width,
        ROPE=rope_dim,
        SCALE_BYTES=parts[1].shape[1],
        FORMAT=coded,
        BN=x.shape[0],
        BD=block,
    )
    return x[:count, :width].cpu()


def awkward_rows(width: int, seed: int) -> Tensor:
    """Rows of very different sizes, exact powers, ties, zeros of both signs, tiny values."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(9, width, generator=generator)
    x *= 2.0 ** torch.randint(-30, 12, (9, 1), generator=generator)
    x[1] = 0.0
    x[2, ::2] = -0.0
    x[3] = torch.arange(width) * 0.25 - 3
    x[4, 0], x[4, 1] = 448.0, -6.0
    x[5] *= 2.0**-100
    x[6] *= 2.0**100
    x[7] = x[7].sign() * 1e-39
    x[8] = x[8].sign() * (1.0 + 2.0**-8)
    return x


@pytest.mark.parametrize(("width", "rope_dim"), [(512, 64), (96, 16), (66, 2), (70, 68), (16, 4)])
def test_kv_rows_are_coded_byte_for_byte(width: int, rope_dim: int) -> None:
    x = awkward_rows(width, seed=width)
    expected = quantize_kv_rows(x, rope_dim, backend="reference")
    got = tuple(torch.full_like(part, 0x55, device=DEVICE) for part in expected)
    store(x.to(DEVICE), got, rope_dim, "fp8")
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[1].cpu(), expected[1])
    values = load(got, width, rope_dim, "fp8")
    assert torch.equal(values, dequantize_kv_rows(*expected, rope_dim, torch.float32))


@pytest.mark.parametrize("width", [128, 64, 40, 8])
def test_index_keys_are_coded_byte_for_byte(width: int) -> None:
    x = awkward_rows(width, seed=width)
    expected = quantize_index_keys(x, backend="reference")
    got = tuple(torch.full_like(part, 0x55, device=DEVICE) for part in expected)
    store(x.to(DEVICE), got, 0, "fp4")
    assert torch.equal(got[0].cpu(), expected[0])
    assert torch.equal(got[1].cpu(), expected[1])
    values = load(got, width, 0, "fp4")
    assert torch.equal(values, dequantize_index_keys(*expected, torch.float32))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_value_that_is_not_finite_spoils_only_itself(bad: float) -> None:
    x = torch.ones(1, 128)
    x[0, 3] = x[0, 120] = bad
    got = tuple(part.to(DEVICE) for part in quantize_kv_rows(torch.ones(1, 128), 16))
    store(x.to(DEVICE), got, 16, "fp8")
    values = load(got, 128, 16, "fp8")[0]
    assert values[120].isnan() if isnan(bad) else values[120] == bad
    assert values[3].isnan() if isnan(bad) else values[3] == 448.0
    assert values[[0, 1, 2, 4, 63, 64, 127]].tolist() == [1.0] * 7


@pytest.mark.parametrize("log_n", [7, 5, 1])
def test_hadamard_is_the_reference_bit_for_bit(log_n: int) -> None:
    x = torch.randn(256 >> log_n, 1 << log_n, generator=torch.Generator().manual_seed(log_n))
    got = x.flatten().clone().to(DEVICE)
    _hadamard_kernel[(1,)](got, LOG_N=log_n, SIZE=256)
    assert torch.equal(got.cpu().view_as(x) * 2 ** (-log_n / 2), hadamard_reference(x))


def run(timeline: Timeline, position: int) -> tuple[Tensor, AttentionState, Tensor]:
    """qr, state and the flag after the token at `position`."""
    state = timeline.state(position)
    qr = torch.full((1, timeline.sizes.rank), torch.nan, device=DEVICE)
    positions = timeline.positions(position, 1)
    prepare(qr, timeline.products(position, 1), state, positions)
    return qr.cpu(), state, positions.bad


def check(timeline: Timeline, position: int) -> None:
    """Everything that may have changed, and that nothing else has."""
    sizes = timeline.sizes
    qr, state, bad = run(timeline, position)
    numeric.assert_close("qr", qr[0], timeline.normed_qr()[position])
    before, after = timeline.state(position), timeline.state(position + 1)
    slot = position % sizes.window_slots
    assert_rest_is_equal(state.window, before.window, slot)
    one = slice(slot, slot + 1)
    got = tuple(part[one] for part in state.window)
    expected = tuple(part[one].cpu() for part in after.window)
    assert_same_rows(got, expected, sizes.rope_dim, is_index=False)
    for name in ("compressor", "indexer"):
        part, old, new = (getattr(where, name) for where in (state, before, after))
        if part is None:
            continue
        torch.testing.assert_close(part.ring, new.ring, rtol=0, atol=0, equal_nan=True)
        done = (position + 1) // sizes.ratio
        if (position + 1) % sizes.ratio:
            assert_rest_is_equal(part.rows, old.rows, None)
            continue
        assert_rest_is_equal(part.rows, old.rows, done - 1)
        got = tuple(rows[done - 1 : done] for rows in part.rows)
        expected = tuple(rows[done - 1 : done].cpu() for rows in new.rows)
        assert_same_rows(got, expected, sizes.rope_dim, is_index=name == "indexer")
    assert bad.item() == 0


def assert_rest_is_equal(
    got: tuple[Tensor, ...], expected: tuple[Tensor, ...], written: int | None
) -> None:
    for found, wanted in zip(got, expected, strict=True):
        keep = torch.tensor([i for i in range(wanted.shape[0]) if i != written], device=DEVICE)
        torch.testing.assert_close(found[keep], wanted[keep], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("position", [0, 3, 7, 90, 91])
def test_token_of_a_ratio_4_layer(position: int, exact: bool) -> None:
    check(Timeline(Sizes(ratio=4, exact=exact), 92), position)


@pytest.mark.parametrize(
    ("position", "exact"), [(127, False), (255, False), (254, True), (255, True)]
)
def test_token_of_a_ratio_128_layer(position: int, exact: bool) -> None:
    check(Timeline(Sizes(ratio=128, exact=exact), 256), position)


@pytest.mark.parametrize("exact", [False, True])
def test_token_without_compression(exact: bool) -> None:
    check(Timeline(Sizes(ratio=0, exact=exact), 60), 57)


def test_widths_that_are_no_powers_of_two() -> None:
    check(Timeline(Sizes(ratio=4, rank=40, dim=96, rope_dim=12, index_dim=16), 32), 31)
    check(Timeline(Sizes(ratio=4, exact=True, dim=40, rope_dim=8, index_dim=24), 32), 31)


@pytest.mark.skipif(DEVICE == "cpu", reason="slow in the interpreter")
@pytest.mark.parametrize("ratio", [0, 4, 128])
def test_sizes_of_a_released_model(ratio: int) -> None:
    sizes = Sizes(
        ratio=ratio, rank=1024, dim=512, rope_dim=64, index_dim=128, window_slots=256, spare=128
    )
    check(Timeline(sizes, 512), 383)


@pytest.mark.parametrize("name", ["kv", "compressor", "indexer"])
def test_a_value_that_is_not_finite_is_noticed(name: str) -> None:
    timeline = Timeline(Sizes(ratio=4), 8)
    part = {"kv": timeline.kv, **dict(zip(("compressor", "indexer"), timeline.pools, strict=True))}
    values = part[name] if name == "kv" else part[name].values
    values[5, -1] = torch.nan
    assert run(timeline, 7)[2].item() == (name != "kv")
    assert run(timeline, 5)[2].item() == (name == "kv")


def test_disagreeing_parts_are_refused() -> None:
    timeline = Timeline(Sizes(ratio=4), 8)
    state, products = timeline.state(7), timeline.products(7, 1)
    qr = torch.empty((1, timeline.sizes.rank), device=DEVICE)
    with pytest.raises(ShapeError, match="no compressor"):
        prepare(qr, products, replace(state, indexer=None), timeline.positions(7, 1))
    with pytest.raises(ShapeError, match="qr is"):
        prepare(qr[:, 1:], products, state, timeline.positions(7, 1))

"""Rows at rest in C: the bytes of the Python encoders, at every instruction set."""

from __future__ import annotations

import math

import pytest
import torch
from guarded import Guarded
from native_rows import F32, FP4, FP8, StoredRows
from numeric import assert_same_bits

from edgedsv4.kernels.kv_quant import (
    dequantize_index_keys,
    dequantize_kv_rows,
    quantize_index_keys,
    quantize_kv_rows,
)
from edgedsv4.kernels.native.library import NativeRun, library, pointer

lib, _ = library()
pytestmark = pytest.mark.usefixtures("isa")

KV_SHAPES = [(512, 64), (128, 64), (96, 16), (128, 32), (66, 2), (70, 68), (9, 8), (64, 0)]
KEY_WIDTHS = [128, 64, 32, 40, 2, 18]


def draw(width: int) -> torch.Tensor:
    """Rows of all sizes that float32 has, with ties, zeros of both signs and subnormal numbers."""
    generator = torch.Generator().manual_seed(width)
    sizes = 2.0 ** torch.randint(-100, 60, (41, 1), generator=generator)
    x = torch.randn(41, width, generator=generator) * sizes
    x[3] = 0.0
    x[4, 0] = 448.0
    x[5] = -0.0
    x[6] = 3.4e38  # infinite in bfloat16
    x[7] = 1e-42
    x[8] = torch.arange(width) % 64 / 4
    x[9] = (torch.arange(width) % 32 - 16) * 2.0**-11 + 1
    x[10] = 1 + 2.0**-8  # halfway between two numbers of bfloat16
    return x


def reference(x: torch.Tensor, kind: int, rope: int) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == FP8:
        return quantize_kv_rows(x, rope, backend="reference")
    return quantize_index_keys(x, backend="reference")


CASES = [(FP8, *shape) for shape in KV_SHAPES] + [(FP4, width, 0) for width in KEY_WIDTHS]


@pytest.mark.parametrize(("kind", "width", "rope"), CASES)
def test_codes_and_scales_are_those_of_the_reference(kind: int, width: int, rope: int) -> None:
    x, rows = draw(width), StoredRows(41, width, kind, rope)
    rows.store(0, x)
    for name, got, expected in zip(
        ("codes", "scales"), rows.parts, reference(x, kind, rope), strict=True
    ):
        assert_same_bits(name, got, expected)


@pytest.mark.parametrize(("kind", "width", "rope"), CASES)
def test_loaded_values_are_those_of_the_reference(kind: int, width: int, rope: int) -> None:
    rows, got = StoredRows(41, width, kind, rope), Guarded(41, width)
    rows.store(0, draw(width))
    lib.dk_rows_load(pointer(got.tensor), rows.record, 0, 41)
    assert_same_bits("values", got.check(), rows.values())


@pytest.mark.parametrize("kind", [FP8, FP4])
def test_every_code_decodes_as_in_the_reference(kind: int) -> None:
    codes = torch.arange(256, dtype=torch.uint8)[None].repeat(8, 1)
    groups = 4 if kind == FP8 else 16
    scales = torch.tensor([0, 1, 120, 127, 128, 246, 254, 255], dtype=torch.uint8)[:, None]
    scales = scales.repeat(1, 8 if kind == FP8 else groups)
    width = 256 if kind == FP8 else 512
    rows, got = StoredRows(8, width, kind), Guarded(8, width)
    for part, new in zip(rows.parts, (codes, scales), strict=True):
        part.copy_(new)
    lib.dk_rows_load(pointer(got.tensor), rows.record, 0, 8)
    expected = rows.values()
    assert torch.equal(got.check().isnan(), expected.isnan())
    known = ~expected.isnan()
    assert_same_bits("values", got.tensor[known], expected[known])


@pytest.mark.parametrize("kind", [FP8, FP4])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_value_is_reported_and_its_group_gets_scale_one(kind: int, bad: float) -> None:
    x, rows, run = draw(128)[11:14], StoredRows(3, 128, kind, 0), NativeRun()
    rows.store(0, x, run)
    assert run.cdata.bad == 0
    x[1, 70] = bad
    rows.store(0, x, run)
    assert run.cdata.bad != 0
    _, scales = rows.parts
    group = 70 // (64 if kind == FP8 else 32)
    assert scales[1, group] == 127
    assert_same_bits("scales", scales, reference(x, kind, 0)[1])


def test_nan_stays_nan_in_fp8_rows() -> None:
    x, rows = draw(128), StoredRows(41, 128, FP8, 64)
    x[2, 5], x[2, 100] = math.nan, math.nan
    rows.store(0, x)
    assert rows.values().isnan().nonzero().tolist() == [[2, 5], [2, 100]]


@pytest.mark.parametrize("kind", [F32, FP8, FP4])
def test_rows_before_and_after_stay(kind: int) -> None:
    rows, run = StoredRows(50, 96, kind, 32 if kind == FP8 else 0), NativeRun(3)
    before = [part.clone() for part in rows.parts]
    rows.store(7, draw(96)[:40], run)
    for part, old in zip(rows.parts, before, strict=True):
        assert torch.equal(part[:7], old[:7])
        assert torch.equal(part[47:], old[47:])


def test_float_rows_are_kept_as_they_are() -> None:
    x, rows, got = draw(37), StoredRows(41, 37, F32), Guarded(41, 37)
    rows.store(0, x)
    lib.dk_rows_load(pointer(got.tensor), rows.record, 0, 41)
    assert_same_bits("rows", got.check(), x)


@pytest.mark.parametrize("kind", [F32, FP8, FP4])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (3, 5), (4, 3), (7, 0), (1000, 12)])
def test_a_ring_takes_the_last_rows_in(kind: int, start: int, count: int) -> None:
    rope = 16 if kind == FP8 else 0
    ring, staged = StoredRows(5, 80, kind, rope), StoredRows(12, 80, kind, rope)
    staged.store(0, draw(80)[11:23])
    expected = [part.clone() for part in ring.parts]
    for t in range(max(0, count - 5), count):
        for part, new in zip(expected, staged.parts, strict=True):
            part[(start + t) % 5] = new[t]
    ring.commit(staged, start, count)
    for part, known in zip(ring.parts, expected, strict=True):
        assert torch.equal(part, known)


@pytest.mark.parametrize("width", KEY_WIDTHS)
def test_rounding_is_encoding_and_decoding(width: int) -> None:
    x, got, run = draw(width), Guarded(41, width), NativeRun(2)
    x[6] = 3.3e38
    got.tensor.copy_(x)
    run.check(lib.dk_round_fp4(run.cdata, pointer(got.tensor), 41, width))
    expected = dequantize_index_keys(
        *quantize_index_keys(x, backend="reference"), torch.float32, backend="reference"
    )
    assert_same_bits("rounded", got.check(), expected)
    assert run.cdata.bad == 0
    got.tensor[17, 1] = math.inf
    run.check(lib.dk_round_fp4(run.cdata, pointer(got.tensor), 41, width))
    assert run.cdata.bad != 0


def test_the_public_functions_give_the_same_as_the_reference() -> None:
    x = draw(128)
    data, scales = quantize_kv_rows(x, 32, backend="native")
    for got, expected in zip((data, scales), reference(x, FP8, 32), strict=True):
        assert_same_bits("bytes", got, expected)
    assert_same_bits(
        "values",
        dequantize_kv_rows(data, scales, 32, torch.float32, backend="native"),
        dequantize_kv_rows(data, scales, 32, torch.float32, backend="reference"),
    )
    keys = quantize_index_keys(x, backend="native")
    for got, expected in zip(keys, reference(x, FP4, 0), strict=True):
        assert_same_bits("bytes", got, expected)
    assert_same_bits(
        "values",
        dequantize_index_keys(*keys, torch.float32, backend="native"),
        dequantize_index_keys(*keys, torch.float32, backend="reference"),
    )

"""Attention of one token by the decode kernels against the reference in float64."""

from __future__ import annotations

import pytest
import torch
from attention_samples import (
    FAMILY,
    FLASH,
    Layer,
    error,
    expected,
    random_rows,
    rope_tables,
    stored_rows,
    to_device,
)
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.attention import decode_attention, decode_partials

# Outside the exact profile the weights are rounded to bfloat16.
LIMITS = {"fp8": 3.3e-3, "bf16": 3.3e-3, "f32": 1e-5}
TINY = Layer()
ODD = Layer(heads=18, dim=160, rope=32, window=37, ratio=128)


def run(
    layer: Layer,
    position: int,
    form: str,
    *,
    compressed_rows: int = 0,
    selected: Tensor | None = None,
    splits: int = 3,
    spare_slots: int = 0,
    spoil: int | None = None,
    family: str = FAMILY,
) -> tuple[Tensor, Tensor]:
    """Output of the kernels and of the reference; `spoil` is a position whose row is NaN."""
    sequence = random_rows(position + 1, layer, 1)
    if spoil is not None:
        sequence[spoil] = torch.nan
    stored = stored_rows(sequence, layer.rope, form)
    slots = layer.window + spare_slots
    ring = tuple(torch.full((slots, part.shape[1]), 0x7F).to(part.dtype) for part in stored)
    for at in range(max(0, position + 1 - slots), position + 1):
        for part, source in zip(ring, stored, strict=True):
            part[at % slots] = source[at]
    compressed = None
    if compressed_rows:
        compressed = stored_rows(random_rows(compressed_rows, layer, 2), layer.rope, form)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(1, layer.heads, layer.dim, generator=generator)
    if form != "f32":
        q = q.to(torch.bfloat16).float()
    sink = torch.randn(layer.heads, generator=generator)
    positions = torch.tensor([position])
    table = rope_tables(positions, layer)
    out = torch.full((1, layer.heads * layer.dim), torch.nan, device=DEVICE)
    partials = decode_partials(splits, layer.heads, layer.dim, DEVICE)
    for part in partials:
        part.fill_(torch.nan)
    decode_attention(
        out,
        q.to(DEVICE),
        to_device(ring),
        positions.to(torch.int32).to(DEVICE),
        window=layer.window,
        compressed=None if compressed is None else to_device(compressed),
        selected=None if selected is None else selected.to(DEVICE),
        ratio=layer.ratio,
        sink=sink.to(DEVICE),
        cos=table.cos.to(DEVICE),
        sin=table.sin.to(DEVICE),
        partials=partials,
        family=family,
    )
    return out, expected(q, positions, stored, compressed, selected, sink, layer)


@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize("position", [0, 5, 29])
def test_window_only(form: str, position: int) -> None:
    got, want = run(TINY, position, form)
    assert error(got, want) < LIMITS[form]


@pytest.mark.parametrize("form", ["fp8", "f32"])
@pytest.mark.parametrize("spare_slots", [0, 3])
def test_sizes_that_are_no_powers_of_two(form: str, spare_slots: int) -> None:
    got, want = run(ODD, 300, form, compressed_rows=5, spare_slots=spare_slots)
    assert error(got, want) < LIMITS[form]


@pytest.mark.parametrize("form", ["fp8", "f32"])
def test_selected_rows(form: str) -> None:
    selected = torch.tensor([[0, 3, 4, 9, 17, -1, -1]], dtype=torch.int32)
    got, want = run(TINY, 80, form, compressed_rows=20, selected=selected)
    assert error(got, want) < LIMITS[form]


def test_no_row_selected() -> None:
    selected = torch.full((1, 4), -1, dtype=torch.int32)
    got, want = run(TINY, 2, "fp8", compressed_rows=20, selected=selected)
    assert error(got, want) < LIMITS["fp8"]


@pytest.mark.parametrize("position", [2, 3, 150, 159, 1000])
def test_all_visible_rows_within_the_capacity(position: int) -> None:
    """Row 40 does not exist, even if the position would let it be seen."""
    got, want = run(TINY, position, "fp8", compressed_rows=40)
    assert error(got, want) < LIMITS["fp8"]


@pytest.mark.parametrize("splits", [1, 2, 7])
def test_number_of_splits(splits: int) -> None:
    got, want = run(TINY, 500, "fp8", compressed_rows=125, splits=splits)
    assert error(got, want) < LIMITS["fp8"]


def test_queries_in_slices() -> None:
    """As for targets whose registers do not hold a block of whole queries."""
    got, want = run(ODD, 300, "fp8", compressed_rows=2, family="gfx1151")
    assert error(got, want) < LIMITS["fp8"]


@pytest.mark.skipif(DEVICE == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize("form", ["fp8", "f32"])
@pytest.mark.parametrize("position", [100, 4000, 70000])
@pytest.mark.parametrize("is_selected", [False, True])
def test_sizes_of_flash(form: str, position: int, is_selected: bool) -> None:
    rows = max(1, (position + 1) // FLASH.ratio)
    selected = None
    if is_selected:
        chosen = torch.randperm(rows, generator=torch.Generator().manual_seed(4))[:512]
        selected = torch.full((1, 512), -1, dtype=torch.int32)
        selected[0, : len(chosen)] = chosen.sort().values
    got, want = run(FLASH, position, form, compressed_rows=rows, selected=selected, splits=33)
    assert error(got, want) < LIMITS[form]


def test_nan_in_a_row_reaches_the_output() -> None:
    got, _ = run(TINY, 20, "fp8", spoil=15)
    assert got.isnan().any()


def test_disagreeing_shapes_are_refused() -> None:
    layer = TINY
    ring = to_device(stored_rows(random_rows(8, layer, 1), layer.rope, "fp8"))
    table = rope_tables(torch.tensor([0]), layer)
    with pytest.raises(ShapeError, match="partials"):
        decode_attention(
            torch.empty(1, 256, device=DEVICE),
            torch.empty(1, 4, 64, device=DEVICE),
            ring,
            torch.zeros(1, dtype=torch.int32, device=DEVICE),
            window=8,
            compressed=None,
            selected=None,
            ratio=0,
            sink=torch.empty(4, device=DEVICE),
            cos=table.cos.to(DEVICE),
            sin=table.sin.to(DEVICE),
            partials=decode_partials(2, 8, 64, DEVICE),
        )

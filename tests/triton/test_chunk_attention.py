"""Attention of a chunk by its kernel against the reference in float64."""

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
from edgedsv4.kernels.gpu.chunk_attention import chunk_attention

# Outside the exact profile the weights are rounded to bfloat16.
LIMITS = {"fp8": 3.3e-3, "bf16": 3.3e-3, "f32": 1e-5}
TINY = Layer()
ODD = Layer(heads=18, dim=160, rope=32, window=37, ratio=4)


def run(
    layer: Layer,
    start: int,
    count: int,
    form: str,
    *,
    compressed_rows: int = 0,
    selected: Tensor | None = None,
    extra_rows: int = 0,
    out_dtype: torch.dtype = torch.float32,
    spoil: int | None = None,
    is_widened: bool = False,
    family: str = FAMILY,
) -> tuple[Tensor, Tensor]:
    """Output of the kernel and of the reference for tokens start .. start + count - 1."""
    sequence = random_rows(start + count, layer, 1)
    if spoil is not None:
        sequence[spoil] = torch.nan
    stored = stored_rows(sequence, layer.rope, form)
    first = max(0, start - layer.window + 1 - extra_rows)
    compressed = None
    if compressed_rows:
        compressed = stored_rows(random_rows(compressed_rows, layer, 2), layer.rope, form)
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(count, layer.heads, layer.dim, generator=generator)
    if form != "f32":
        q = q.to(torch.bfloat16).float()
    sink = torch.randn(layer.heads, generator=generator)
    positions = torch.arange(start, start + count)
    table = rope_tables(positions, layer)
    out = torch.full((count, layer.heads * layer.dim), torch.nan, dtype=out_dtype, device=DEVICE)
    wide = None
    if is_widened:
        visible = (start + count) // layer.ratio
        shapes = [(start + count - first, layer.dim), (visible, layer.dim)]
        nan = float("nan")
        window, rows = (torch.full(n, nan, dtype=torch.bfloat16, device=DEVICE) for n in shapes)
        wide = (window, rows)
    chunk_attention(
        out,
        (q if form == "f32" else q.to(torch.bfloat16)).to(DEVICE),
        to_device(tuple(part[first:].contiguous() for part in stored)),
        first=first,
        position=positions[:1].to(torch.int32).to(DEVICE),
        window=layer.window,
        compressed=None if compressed is None else to_device(compressed),
        selected=None if selected is None else selected.to(DEVICE),
        ratio=layer.ratio,
        sink=sink.to(DEVICE),
        cos=table.cos.to(DEVICE),
        sin=table.sin.to(DEVICE),
        wide=wide,
        family=family,
    )
    return out, expected(q, positions, stored, compressed, selected, sink, layer)


@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 11), (29, 3)])
def test_window_only(form: str, start: int, count: int) -> None:
    got, want = run(TINY, start, count, form)
    assert error(got, want) < LIMITS[form]


@pytest.mark.parametrize("form", ["fp8", "bf16", "f32"])
def test_sizes_that_are_no_powers_of_two(form: str) -> None:
    got, want = run(ODD, 70, 2, form, compressed_rows=18, extra_rows=3)
    assert error(got, want) < LIMITS[form]


@pytest.mark.parametrize("form", ["fp8", "f32"])
def test_selected_rows(form: str) -> None:
    selected = torch.tensor([[0, 3, 4, 9, 17, -1], [1, 2, 3, 18, -1, -1], [-1] * 6])
    got, want = run(TINY, 80, 3, form, compressed_rows=20, selected=selected.to(torch.int32))
    assert error(got, want) < LIMITS[form]


def test_each_token_sees_the_rows_finished_by_then() -> None:
    got, want = run(TINY, 130, 6, "fp8", compressed_rows=34)
    assert error(got, want) < LIMITS["fp8"]


@pytest.mark.parametrize(("start", "count"), [(0, 2), (70, 3)])
def test_rows_decoded_first(start: int, count: int) -> None:
    got, want = run(ODD, start, count, "fp8", compressed_rows=40, is_widened=True)
    assert error(got, want) < LIMITS["fp8"]


@pytest.mark.parametrize(
    ("family", "form"), [("sm_90", "bf16"), ("sm_90", "fp8"), ("gfx942", "bf16")]
)
def test_tiles_of_other_targets(family: str, form: str) -> None:
    got, want = run(ODD, 70, 2, form, compressed_rows=18, family=family)
    assert error(got, want) < LIMITS[form]


@pytest.mark.skipif(DEVICE == "cpu", reason="too much for the interpreter")
@pytest.mark.parametrize("is_widened", [False, True])
@pytest.mark.parametrize("is_selected", [False, True])
@pytest.mark.parametrize("start", [0, 5000])
def test_sizes_of_flash(start: int, is_selected: bool, is_widened: bool) -> None:
    count = 40
    rows = (start + count) // FLASH.ratio
    selected = None
    if is_selected:
        generator = torch.Generator().manual_seed(4)
        selected = torch.full((count, 512), -1, dtype=torch.int32)
        for token in range(count):
            visible = (start + token + 1) // FLASH.ratio
            chosen = torch.randperm(visible, generator=generator)[:512].sort().values
            selected[token, : len(chosen)] = chosen
    got, want = run(
        FLASH,
        start,
        count,
        "fp8",
        compressed_rows=rows,
        selected=selected,
        is_widened=is_widened,
        out_dtype=torch.bfloat16,
    )
    assert error(got, want) < LIMITS["bf16"]


def test_bfloat16_output() -> None:
    got, want = run(TINY, 12, 2, "bf16", out_dtype=torch.bfloat16)
    assert error(got, want) < LIMITS["bf16"]


def test_nan_of_a_row_reaches_only_the_tokens_that_see_it() -> None:
    got, _ = run(TINY, 20, 4, "fp8", spoil=14)
    assert got.isnan().any(dim=1).tolist() == [True, True, False, False]


def test_disagreeing_shapes_are_refused() -> None:
    rows = to_device(stored_rows(random_rows(8, TINY, 1), TINY.rope, "fp8"))
    table = rope_tables(torch.arange(4), TINY)
    with pytest.raises(ShapeError, match="sink"):
        chunk_attention(
            torch.empty(4, 256, device=DEVICE),
            torch.empty(4, 4, 64, device=DEVICE),
            rows,
            first=0,
            position=torch.zeros(1, dtype=torch.int32, device=DEVICE),
            window=8,
            compressed=None,
            selected=None,
            ratio=0,
            sink=torch.empty(5, device=DEVICE),
            cos=table.cos.to(DEVICE),
            sin=table.sin.to(DEVICE),
        )

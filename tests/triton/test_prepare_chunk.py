"""Rows of a chunk against the reference functions, and copies between rings and rows."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numeric
import pytest
import torch
from prepare_states import Sizes, Timeline, assert_same_rows, poisoned
from torch import Tensor
from triton_device import DEVICE

from edgedsv4.errors import ShapeError
from edgedsv4.kernels.gpu.prepare_chunk import StagedRows, prepare_chunk
from edgedsv4.kernels.gpu.rings import commit_rings, read_rings

if TYPE_CHECKING:
    from edgedsv4.kernels.gpu.prepare import AttentionState


def assert_equal(name: str, got: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(
        got.cpu(),
        expected.cpu(),
        rtol=0,
        atol=0,
        equal_nan=True,
        msg=lambda text: f"{name}: {text}",
    )


def staged_for(state: AttentionState, tokens: int) -> StagedRows:
    raw = [
        part and poisoned(part.ring, min(tokens, part.ring.shape[0])).to(DEVICE)
        for part in (state.compressor, state.indexer)
    ]
    return StagedRows(
        window=tuple(poisoned(part, tokens).to(DEVICE) for part in state.window),
        compressor=raw[0],
        indexer=raw[1],
    )


def check(timeline: Timeline, start: int, tokens: int) -> None:
    """The chunk's rows, untouched rings, and the state after they are committed."""
    sizes, stop = timeline.sizes, start + tokens
    state, before, after = timeline.state(start), timeline.state(start), timeline.state(stop)
    staged, positions = staged_for(state, tokens), timeline.positions(start, tokens)
    qr = torch.full((tokens, sizes.rank), torch.nan, device=DEVICE)
    prepare_chunk(qr, staged, timeline.products(start, tokens), state, positions)
    assert positions.bad.item() == 0
    numeric.assert_close("qr", qr.cpu(), timeline.normed_qr()[start:stop])
    rows = tuple(part[start:stop] for part in timeline.window_rows())
    assert_same_rows(staged.window, rows, sizes.rope_dim, is_index=False)
    for found, wanted in zip(state.window, before.window, strict=True):
        assert_equal("window ring", found, wanted)
    rings = [*zip(state.window, staged.window, strict=True)]
    for name, raw in (("compressor", staged.compressor), ("indexer", staged.indexer)):
        part, old, new = (getattr(where, name) for where in (state, before, after))
        if part is None:
            continue
        assert_equal("raw ring", part.ring, old.ring)
        first, last = start // sizes.ratio, stop // sizes.ratio
        for found, wanted in zip(part.rows, old.rows, strict=True):
            assert_equal("rows before", found[:first], wanted[:first])
            assert_equal("rows after", found[last:], wanted[last:])
        if last > first:
            got = tuple(rows[first:last] for rows in part.rows)
            expected = tuple(rows[first:last].cpu() for rows in new.rows)
            assert_same_rows(got, expected, sizes.rope_dim, is_index=name == "indexer")
        rings.append((part.ring, raw))
    commit_rings(rings, positions.position, tokens)
    for name in ("compressor", "indexer"):
        if (part := getattr(state, name)) is not None:
            assert_equal(name, part.ring, getattr(after, name).ring)
    assert_same_rows(state.window, after.window, sizes.rope_dim, is_index=False)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("start", "tokens"), [(0, 9), (5, 1), (7, 9), (12, 4), (6, 14)])
def test_chunk_of_a_ratio_4_layer(start: int, tokens: int, exact: bool) -> None:
    check(Timeline(Sizes(ratio=4, exact=exact, window_slots=12), 24), start, tokens)


@pytest.mark.parametrize(
    ("start", "tokens", "exact"), [(126, 3, False), (255, 1, True), (128, 2, False)]
)
def test_chunk_of_a_ratio_128_layer(start: int, tokens: int, exact: bool) -> None:
    check(Timeline(Sizes(ratio=128, exact=exact), 256), start, tokens)


@pytest.mark.parametrize("exact", [False, True])
def test_chunk_without_compression(exact: bool) -> None:
    check(Timeline(Sizes(ratio=0, exact=exact, window_slots=5), 20), 9, 7)


def test_widths_that_are_no_powers_of_two() -> None:
    check(Timeline(Sizes(ratio=4, rank=40, dim=96, rope_dim=12, index_dim=16), 16), 6, 7)
    check(Timeline(Sizes(ratio=4, exact=True, dim=40, rope_dim=8, index_dim=24), 16), 6, 7)


@pytest.mark.skipif(DEVICE == "cpu", reason="slow in the interpreter")
@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize(("start", "tokens"), [(0, 700), (331, 400), (500, 37)])
def test_sizes_of_a_released_model(ratio: int, start: int, tokens: int) -> None:
    sizes = Sizes(
        ratio=ratio, rank=1024, dim=512, rope_dim=64, index_dim=128, window_slots=256, spare=128
    )
    check(Timeline(sizes, 800), start, tokens)


@pytest.mark.parametrize("name", ["kv", "compressor", "indexer"])
def test_a_value_that_is_not_finite_is_noticed(name: str) -> None:
    timeline = Timeline(Sizes(ratio=4), 8)
    part = {"kv": timeline.kv, **dict(zip(("compressor", "indexer"), timeline.pools, strict=True))}
    values = part[name] if name == "kv" else part[name].values
    values[5, -1] = torch.nan
    state, positions = timeline.state(2), timeline.positions(2, 6)
    qr = torch.empty((6, timeline.sizes.rank), device=DEVICE)
    prepare_chunk(qr, staged_for(state, 6), timeline.products(2, 6), state, positions)
    assert positions.bad.item() == 1


@pytest.mark.parametrize("width", [8, 6, 2100])
@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_rows_before_a_position_come_in_order(width: int, dtype: torch.dtype) -> None:
    rows = torch.randint(0, 255, (11, width), generator=torch.Generator().manual_seed(width))
    rows = rows.to(dtype)
    ring = torch.zeros((7, width), dtype=dtype)
    ring[torch.arange(4, 11) % 7] = rows[4:]
    out = torch.zeros((5, width), dtype=dtype, device=DEVICE)
    position = torch.tensor([11], dtype=torch.int32, device=DEVICE)
    read_rings([(out, ring.to(DEVICE))], position)
    assert torch.equal(out.cpu(), rows[6:])


def test_rows_before_the_first_position_are_left_alone() -> None:
    ring = torch.arange(6.0, device=DEVICE)[:, None].expand(-1, 4).contiguous()
    out = torch.full((5, 4), 9.0, device=DEVICE)
    read_rings([(out, ring)], torch.tensor([2], dtype=torch.int32, device=DEVICE))
    assert out[:, 0].tolist() == [9.0, 9.0, 9.0, 0.0, 1.0]


def test_disagreeing_parts_are_refused() -> None:
    timeline = Timeline(Sizes(ratio=4), 24)
    state, positions = timeline.state(2), timeline.positions(2, 9)
    qr = torch.empty((9, timeline.sizes.rank), device=DEVICE)
    products, staged = timeline.products(2, 9), staged_for(state, 9)
    with pytest.raises(ShapeError, match="staged of 9"):
        prepare_chunk(qr, replace(staged, indexer=None), products, state, positions)
    few = tuple(part[:8] for part in staged.window)
    with pytest.raises(ShapeError, match="8 staged rows"):
        prepare_chunk(qr, replace(staged, window=few), products, state, positions)
    few_tables = replace(positions, window_cos=positions.window_cos[:1])
    with pytest.raises(ShapeError, match="tables of 1 windows"):
        prepare_chunk(qr, staged, products, state, few_tables)
    with pytest.raises(ShapeError, match="rings"):
        commit_rings([(state.window[0], staged.window[1])], positions.position, 9)

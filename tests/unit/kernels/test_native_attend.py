"""Attention in C over rings, staged rows and compressed rows against the reference in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
from guarded import Guarded
from native_rows import F32, FP8, StoredRows
from numeric import assert_close, assert_same_bits
from torch import Tensor

from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.sparse_attention import sparse_attention, sparse_attention_reference

lib, ffi = library()
pytestmark = pytest.mark.usefixtures("isa")


@dataclass
class Timeline:
    """Window and compressed rows of `stop` positions, and queries at all of them."""

    stop: int
    heads: int = 3
    dim: int = 128
    kind: int = FP8
    rope: int = 64
    window: int = 40
    slots: int = 61
    ratio: int = 0
    top: int = 0
    generator: torch.Generator = field(init=False)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.stop + self.heads * 7 + self.dim)
        self.kv = self.normal(self.stop, self.dim)
        self.q = self.normal(self.stop, self.heads, self.dim) * 2
        self.sink = self.normal(self.heads)
        self.compressed = None
        if self.ratio:
            count = self.stop // self.ratio
            self.compressed = StoredRows(count + 3, self.dim, self.kind, self.rope)
            self.compressed.store(0, self.normal(count, self.dim))
        if self.top:
            self.selected = torch.stack([self.choose(p) for p in range(self.stop)])

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def choose(self, position: int) -> Tensor:
        visible = (position + 1) // self.ratio
        ids = torch.randperm(visible, generator=self.generator)[: self.top].sort().values
        return torch.nn.functional.pad(ids, (0, self.top - len(ids)), value=-1).int()

    def ring_at(self, start: int) -> StoredRows:
        """The ring when `start` positions are committed; lost rows and free slots are NaN."""
        ring = StoredRows(self.slots, self.dim, self.kind, self.rope)
        first = max(0, start - self.window + 1)
        for position in range(first, start):
            ring.store(position % self.slots, self.kv[position : position + 1])
        return ring

    def attend(self, start: int, count: int, threads: int = 1) -> Tensor:
        """Outputs [count, heads, dim] of the C kernel."""
        ring, part = self.ring_at(start), slice(start, start + count)
        staged = StoredRows(count, self.dim, self.kind, self.rope)
        staged.store(0, self.kv[part])
        record = ffi.new("dk_attention *")
        record.ring, record.slots, record.staged = ring.record, self.slots, staged.record
        record.window, record.sink = self.window, pointer(self.sink)
        keep = [ring, staged]
        if self.compressed is not None:
            record.compressed, record.ratio = self.compressed.record, self.ratio
        if self.top:
            keep.append(self.selected[part].contiguous())
            record.selected, record.top = pointer(keep[-1]), self.top
        out, q, run = Guarded(count, self.heads, self.dim), self.q[part], NativeRun(threads)
        arguments = (pointer(out.tensor), pointer(q), record, start, count, self.heads, self.dim)
        run.check(lib.dk_attend(run.cdata, *arguments))
        return out.check()

    def expected(self, start: int, count: int) -> Tensor:
        """The same by the reference in float64."""
        stored = StoredRows(self.stop, self.dim, self.kind, self.rope)
        stored.store(0, self.kv)
        rows = [stored.values()]
        positions = torch.arange(start, start + count)[:, None]
        span = positions - torch.arange(self.window).flip(0)
        ids = [span.masked_fill(span < 0, -1)]
        if self.compressed is not None:
            rows.append(self.compressed.values())
            if self.top:
                entries = self.selected[start : start + count].long()
            else:
                entries = torch.arange(self.stop // self.ratio).expand(count, -1)
                entries = entries.masked_fill(entries >= (positions + 1) // self.ratio, -1)
            ids.append(torch.where(entries < 0, -1, entries + self.stop))
        return sparse_attention_reference(
            self.q[start : start + count].double(),
            torch.cat(rows).double(),
            torch.cat(ids, dim=-1),
            self.sink.double(),
        )


@pytest.mark.parametrize(
    "timeline",
    [
        Timeline(301, heads=1, dim=80, rope=16, slots=40),
        Timeline(301, heads=3, dim=128, rope=64, ratio=4, top=9),
        Timeline(301, heads=8, dim=128, rope=64, ratio=4, window=128, slots=256),
        Timeline(301, heads=5, dim=48, rope=16, ratio=128, window=1, slots=1),
        Timeline(301, heads=2, dim=32, kind=F32, rope=0, ratio=4, top=100),
        Timeline(301, heads=3, dim=21, kind=F32, rope=0, ratio=4),
        Timeline(301, heads=65, dim=16, kind=F32, rope=0, ratio=128),
        Timeline(301, heads=7, dim=512, rope=64, ratio=4, top=70),
    ],
    ids=lambda t: f"{t.heads}x{t.dim} window {t.window} ratio {t.ratio} top {t.top}",
)
@pytest.mark.parametrize(("start", "count"), [(0, 1), (0, 7), (39, 1), (127, 2), (129, 130)])
def test_matches_the_reference(timeline: Timeline, start: int, count: int) -> None:
    got = timeline.attend(start, count, threads=2)
    assert_close("outputs", got, timeline.expected(start, count), 2e-6)


def test_positions_far_along_a_ring() -> None:
    timeline = Timeline(1130, heads=3, dim=64, rope=16, window=128, slots=256, ratio=4, top=20)
    got = timeline.attend(1000, 130, threads=2)
    assert_close("outputs", got, timeline.expected(1000, 130), 2e-6)


@pytest.mark.parametrize("ratio", [0, 4, 128])
@pytest.mark.parametrize("top", [0, 17])
@pytest.mark.parametrize(("heads", "dim", "rope"), [(8, 128, 64), (7, 512, 64), (3, 24, 8)])
def test_a_token_does_not_depend_on_its_chunk(
    ratio: int, top: int, heads: int, dim: int, rope: int
) -> None:
    if top and not ratio:
        top = 0
    timeline = Timeline(
        260, heads, dim, rope=rope, ratio=ratio, top=top if ratio else 0, window=50, slots=64
    )
    whole = timeline.attend(100, 160, threads=2)
    for start, count in [(100, 1), (177, 1), (259, 1), (131, 5), (200, 60)]:
        alone = timeline.attend(start, count)
        assert_same_bits(f"tokens from {start}", alone, whole[start - 100 : start - 100 + count])


@pytest.mark.parametrize(("start", "count"), [(299, 1), (290, 3), (100, 150)])
@pytest.mark.parametrize(("heads", "dim"), [(8, 128), (7, 512)])
def test_threads_change_nothing(start: int, count: int, heads: int, dim: int) -> None:
    timeline = Timeline(300, heads, dim, ratio=4, top=30)
    alone = timeline.attend(start, count)
    for threads in (2, 5):
        assert_same_bits("outputs", timeline.attend(start, count, threads), alone)


def test_selecting_all_rows_is_the_same_as_no_selection() -> None:
    timeline = Timeline(300, heads=3, dim=128, ratio=4)
    expected = timeline.attend(280, 20)
    timeline.top = 80
    timeline.selected = torch.stack([timeline.choose(p) for p in range(300)])
    assert_same_bits("outputs", timeline.attend(280, 20), expected)


def test_nan_in_an_attended_row_shows() -> None:
    timeline = Timeline(100, heads=2, dim=64, rope=16, kind=F32)
    timeline.kv[90, 3] = math.nan
    got = timeline.attend(88, 4)
    assert got[:2].isfinite().all()
    assert got[2:].isnan().all()


def test_huge_scores_do_not_overflow() -> None:
    timeline = Timeline(100, heads=2, dim=64, kind=F32, rope=0)
    timeline.q *= 1e4
    timeline.kv *= 1e4
    assert_close("outputs", timeline.attend(60, 40), timeline.expected(60, 40), 2e-6)


@pytest.mark.parametrize("sink", [-math.inf, 80.0, -200.0])
def test_a_sink_of_any_size(sink: float) -> None:
    timeline = Timeline(70, heads=2, dim=64, rope=16, ratio=4)
    timeline.sink.fill_(sink)
    # A difference of scores of 80 is known to 80 times the rounding of float32.
    assert_close("outputs", timeline.attend(60, 10), timeline.expected(60, 10), 1e-5)


def test_weights_that_underflow_are_zero() -> None:
    timeline = Timeline(70, heads=2, dim=64, kind=F32, rope=0)
    timeline.q *= 30
    assert_close("outputs", timeline.attend(60, 10), timeline.expected(60, 10), 1e-5)


@pytest.mark.parametrize(("heads", "dim"), [(1, 7), (3, 16), (8, 128), (5, 2048)])
def test_the_public_function_takes_any_list_of_rows(heads: int, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    q, rows = (torch.randn(n, dim, generator=generator) for n in (9 * heads, 200))
    q, sink = q.view(9, heads, dim), torch.randn(heads, generator=generator)
    ids = torch.randint(-1, 200, (9, 150), generator=generator)
    ids[2] = -1
    ids[3, ::2] = -1
    got = sparse_attention(q, rows, ids, sink, backend="native")
    expected = sparse_attention_reference(q.double(), rows.double(), ids, sink.double())
    assert_close("outputs", got, expected, 2e-6)
    assert got[2].eq(0).all()

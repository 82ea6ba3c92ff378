"""The compressor in C against pooling, norm, rotation and transform by the float64 references."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from native_rows import F32, FP4, FP8, StoredRows
from numeric import assert_close, assert_same_bits
from torch import Tensor

from edgedsv4.kernels.compress import pool_windows
from edgedsv4.kernels.hadamard import hadamard_reference
from edgedsv4.kernels.native.library import NativeRun, library, pointer
from edgedsv4.kernels.rms_norm import rms_norm_reference
from edgedsv4.kernels.rope import apply_rope_reference, rope_table

lib, ffi = library()
pytestmark = pytest.mark.usefixtures("isa")

EPS = 1e-6


@dataclass
class Compressor:
    """Raw projections of a whole timeline, and the record to compress it in chunks."""

    ratio: int
    series: int
    width: int
    half: int
    stop: int
    kind: int = F32
    has_hadamard: bool = False
    spare: int = 0

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.width + self.stop)
        size = self.series * self.width
        self.raw = torch.randn(self.stop, 2 * size, generator=generator)
        self.raw[:, size:] *= 3
        self.ape = torch.randn(self.ratio, size, generator=generator)
        self.norm = 1 + 0.1 * torch.randn(self.width, generator=generator)
        self.frequencies = 10000.0 ** -(torch.arange(self.half) / self.half)
        self.slots = self.series * self.ratio + self.spare

    def compress(self, chunks: list[int], threads: int = 1) -> tuple[StoredRows, list[Tensor], int]:
        """Finished rows, the staged rows of each chunk, and run.bad."""
        rope = 2 * self.half if self.kind == FP8 else 0
        rows = StoredRows(self.stop // self.ratio + 2, self.width, self.kind, rope)
        ring = StoredRows(self.slots, self.raw.shape[1], F32)
        run, start, all_staged = NativeRun(threads), 0, []
        for count in chunks:
            staged = StoredRows(count, self.raw.shape[1], F32)
            staged.store(0, self.raw[start : start + count])
            record = ffi.new("dk_compressor *")
            record.rows = rows.record[0]
            record.ring = ffi.cast("float *", ring.record.data)
            record.staged = ffi.cast("float *", staged.record.data)
            record.slots, record.width, record.series = self.slots, self.width, self.series
            record.ape, record.norm, record.ratio = (
                pointer(self.ape),
                pointer(self.norm),
                self.ratio,
            )
            record.has_hadamard = self.has_hadamard
            frequencies = pointer(self.frequencies)
            run.check(lib.dk_compress(run.cdata, record, start, count, frequencies, self.half, EPS))
            ring.commit(staged, start, count)
            all_staged.append(staged.values().clone())
            start += count
        return rows, all_staged, run.cdata.bad

    def biased(self) -> Tensor:
        """Raw rows with the position bias, as rings keep them."""
        biased = self.raw.clone()
        bias = self.ape[torch.arange(self.stop) % self.ratio]
        biased[:, self.series * self.width :] += bias
        return biased

    def expected(self) -> Tensor:
        """Finished rows in float64, before they are rounded."""
        count = self.stop // self.ratio
        windows = self.biased().double()[: count * self.ratio].view(count, self.ratio, -1)
        values, gates = windows.chunk(2, dim=-1)
        pooled = pool_windows(
            values, gates, has_overlap=self.series == 2, previous=False, backend="reference"
        )
        rows = rms_norm_reference(pooled, self.norm.double(), EPS)
        table = rope_table(torch.arange(count) * self.ratio, self.frequencies, torch.float64)
        rows = apply_rope_reference(rows, table)
        return hadamard_reference(rows) if self.has_hadamard else rows


COMPRESSORS = [
    Compressor(4, 2, 128, 32, 61),
    Compressor(4, 2, 64, 8, 130, has_hadamard=True, spare=128),
    Compressor(4, 2, 21, 3, 40),
    Compressor(128, 1, 48, 8, 300),
    Compressor(3, 1, 512, 32, 20, spare=2),
    Compressor(1, 1, 16, 2, 5),
]


def name(case: Compressor) -> str:
    """For the ids of the tests."""
    return f"ratio {case.ratio} series {case.series} width {case.width}"


@pytest.mark.parametrize("case", COMPRESSORS, ids=name)
def test_rows_match_the_reference(case: Compressor) -> None:
    rows, _, bad = case.compress([case.stop], threads=2)
    count = case.stop // case.ratio
    assert_close("rows", rows.values()[:count], case.expected(), 1e-6)
    assert rows.values()[count:].isnan().all()
    assert bad == 0


def chunked(stop: int, size: int) -> list[int]:
    """Lengths of the chunks of a timeline."""
    return [min(size, stop - start) for start in range(0, stop, size)]


@pytest.mark.parametrize("case", COMPRESSORS, ids=name)
@pytest.mark.parametrize("size", [1, 2, 7, 130])
def test_chunks_change_nothing(case: Compressor, size: int) -> None:
    whole, _, _ = case.compress([case.stop])
    parts, _, _ = case.compress(chunked(case.stop, size), threads=2)
    for got, expected in zip(parts.parts, whole.parts, strict=True):
        assert_same_bits(f"chunks of {size}", got, expected)


def test_the_staged_gates_get_the_position_bias() -> None:
    case = COMPRESSORS[0]
    _, staged, _ = case.compress([5, 40, 16])
    assert_same_bits("staged rows", torch.cat(staged), case.biased())


@pytest.mark.parametrize(("kind", "has_hadamard"), [(FP8, False), (FP4, True)])
def test_rows_are_stored_as_their_format_rounds_them(kind: int, has_hadamard: bool) -> None:
    plain = Compressor(4, 2, 128, 32, 61, has_hadamard=has_hadamard)
    coded = Compressor(4, 2, 128, 32, 61, kind=kind, has_hadamard=has_hadamard)
    rows = plain.compress([61])[0].values()
    expected = StoredRows(17, 128, kind, 64 if kind == FP8 else 0)
    expected.store(0, rows[:15])
    for got, known in zip(coded.compress([30, 31])[0].parts, expected.parts, strict=True):
        assert_same_bits("codes", got, known)


@pytest.mark.parametrize("place", [7, 128 + 7])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_row_that_is_not_finite_is_reported(place: int, bad: float) -> None:
    case = Compressor(4, 1, 128, 32, 40)
    case.raw[21, place] = bad
    rows, _, found = case.compress([18, 22])
    assert found != 0
    assert (~rows.values()[:10].isfinite()).any(dim=1).nonzero().flatten().tolist() == [5]


def test_gates_far_apart_do_not_overflow() -> None:
    case = Compressor(4, 2, 64, 8, 40)
    case.raw[:, 128:] *= 1e3
    rows, _, _ = case.compress([40])
    assert_close("rows", rows.values()[:10], case.expected(), 1e-5)


def test_a_window_that_does_not_end_gives_no_row() -> None:
    rows, _, _ = Compressor(128, 1, 16, 2, 127).compress([100, 27])
    assert rows.values().isnan().all()

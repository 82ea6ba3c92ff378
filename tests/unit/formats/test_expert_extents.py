"""Reads of an expert: whole blocks that cover its extents, neighbours together."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgedsv4.formats.expert_extents import Extent, plan_reads
from edgedsv4.formats.mapped_file import MappedFile


@pytest.fixture
def file(tmp_path: Path) -> MappedFile:
    path = tmp_path / "weights"
    path.write_bytes(bytes(1 << 14))
    return MappedFile.open(path)


def test_extents_apart_are_read_apart(file: MappedFile) -> None:
    plan = plan_reads((Extent(file, 100, 50), Extent(file, 9000, 10)), 4096)
    assert [(r.offset, r.nbytes, r.needed, r.place) for r in plan.ranges] == [
        (0, 4096, 150, 0),
        (8192, 4096, 818, 4096),
    ]
    assert plan.places == (100, 4096 + 808)
    assert plan.nbytes == 8192


def test_neighbours_are_one_read(file: MappedFile) -> None:
    extents = (Extent(file, 4096, 1000), Extent(file, 5096, 1000), Extent(file, 6096, 2096))
    plan = plan_reads(extents, 4096)
    assert len(plan.ranges) == 1
    assert plan.ranges[0].nbytes == plan.nbytes == 4096
    assert plan.places == (0, 1000, 2000)


def test_neighbours_in_the_wrong_order_are_apart(file: MappedFile) -> None:
    plan = plan_reads((Extent(file, 5096, 1000), Extent(file, 4096, 1000)), 4096)
    assert len(plan.ranges) == 2


def test_same_offsets_of_two_files_are_apart(file: MappedFile, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(bytes(8192))
    other = MappedFile.open(tmp_path / "other")
    plan = plan_reads((Extent(file, 0, 4096), Extent(other, 4096, 4096)), 4096)
    assert [r.file for r in plan.ranges] == [file, other]


@given(
    spans=st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(1, 1 << 24)), min_size=1),
    alignment=st.sampled_from((1, 512, 4096)),
)
def test_every_extent_is_covered_where_the_plan_says(
    spans: list[tuple[int, int]], alignment: int
) -> None:
    file = object.__new__(MappedFile)
    extents = [Extent(file, offset, nbytes) for offset, nbytes in spans]
    plan = plan_reads(extents, alignment)
    filled = 0
    for range_ in plan.ranges:
        assert range_.place == filled
        filled += range_.nbytes
        assert range_.offset % alignment == range_.nbytes % alignment == 0
        assert range_.nbytes - alignment < range_.needed <= range_.nbytes
    assert filled == plan.nbytes
    for extent, place in zip(extents, plan.places, strict=True):
        holder = [r for r in plan.ranges if r.place <= place < r.place + r.nbytes]
        assert len(holder) == 1
        assert holder[0].offset + place - holder[0].place == extent.offset
        assert place + extent.nbytes <= holder[0].place + holder[0].needed

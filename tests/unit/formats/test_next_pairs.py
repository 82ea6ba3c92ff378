"""Pairs of experts: counted, kept in frequency files, refused when damaged, used as a guess."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.formats.expert_frequency import (
    ExpertFrequency,
    read_expert_frequency,
    write_expert_frequency,
)
from edgedsv4.formats.next_pairs import NextPairs, PairCounter

IDS = np.array([[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[0, 1], [2, 0]], [[1, 3], [3, 0]]])
COUNTS = np.array([[3, 3, 1, 1], [2, 1, 3, 2]], dtype=np.uint64)


def pairs_of(per_expert: int) -> NextPairs:
    counter = PairCounter(2, 4)
    counter.add(IDS[:1])
    counter.add(IDS[1:])
    return counter.pairs(per_expert, COUNTS)


def save(path: Path) -> Path:
    frequency = ExpertFrequency("ab" * 32, "chat.txt", "cd" * 32, 4, 2, COUNTS)
    write_expert_frequency(path, replace(frequency, pairs=pairs_of(2)))
    return path


def changed(path: Path, **values: Any) -> Path:
    document = json.loads(save(path).read_text())
    document["next"] |= values
    path.write_text(json.dumps(document))
    return path


def test_the_most_frequent_followers_are_kept_in_order() -> None:
    found = pairs_of(2)
    assert found.experts.tolist() == [[[2, 0], [0, 2], [1, 2], [0, 3]]]
    assert found.counts.tolist() == [[[3, 1], [2, 2], [1, 1], [1, 1]]]


def test_the_likeliest_follow_the_sum_of_shares() -> None:
    found = pairs_of(4)
    assert found.likeliest(0, [0, 1], 2) == [2, 0]  # 3/3 + 2/3, 1/3 + 2/3
    assert found.likeliest(0, [3], 9) == [0, 3]
    assert found.likeliest(1, [0], 2) == []
    assert found.likeliest(-1, [0], 2) == []
    unused = replace(found, counts=np.zeros_like(found.counts))
    assert unused.likeliest(0, [0, 1], 2) == []


def test_uses_of_another_text_give_no_share_above_one() -> None:
    counts = np.full((1, 4, 2), 9, dtype=np.uint64)
    found = NextPairs(pairs_of(2).experts, counts, np.zeros((1, 4), dtype=np.uint64))
    assert found.likeliest(0, [0, 3], 3) == [0, 2, 3]  # two of them, then one each


def test_pairs_come_back_in_a_file_of_version_2(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json")
    assert json.loads(path.read_text())["version"] == 2
    found, expected = read_expert_frequency(path).pairs, pairs_of(2)
    assert found is not None
    for name in ("experts", "counts", "uses"):
        assert np.array_equal(getattr(found, name), getattr(expected, name))


@pytest.mark.parametrize("shape", [(1, 4), (3, 1 << 14)])
def test_tables_that_cannot_be_counted_are_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(ConfigError, match="cannot be counted"):
        PairCounter(*shape)


ROW = [2, 0, 0, 2, 1, 2, 0, 3]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"per_expert": 0}, r"per_expert must be a number 1\.\.4, found 0"),
        ({"per_expert": 5}, r"per_expert must be a number 1\.\.4, found 5"),
        ({"per_expert": True}, "per_expert must be a number"),
        ({"per_expert": 2.0}, "per_expert must be a number"),
        ({"per_expert": 1}, "experts of layer 0 are not 4 numbers"),
        ({"experts": None}, "experts must have 1 rows"),
        ({"experts": []}, "experts must have 1 rows"),
        ({"experts": [ROW, ROW]}, "experts must have 1 rows"),
        ({"experts": [ROW[:7]]}, "experts of layer 0 are not 8 numbers"),
        ({"experts": [3]}, "experts of layer 0 are not 8 numbers"),
        ({"experts": [[4, *ROW[1:]]]}, r"experts of layer 0 hold something else than 0\.\.3"),
        ({"experts": [[-1, *ROW[1:]]]}, "experts of layer 0 hold something else"),
        ({"experts": [[2.0, *ROW[1:]]]}, "experts of layer 0 hold something else"),
        ({"experts": [[2**70, *ROW[1:]]]}, "experts of layer 0 hold something else"),
        ({"experts": [[2, 2, *ROW[2:]]]}, "name one twice for the same expert"),
        ({"counts": [[5, *ROW[1:]]]}, r"counts of layer 0 hold something else than 0\.\.4"),
        ({"counts": [[True, *ROW[1:]]]}, "counts of layer 0 hold something else"),
        ({"counts": {}}, "counts must have 1 rows"),
        ({"more": 1}, "next must have per_expert, experts and counts"),
    ],
)
def test_damage_is_named(tmp_path: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(FormatError, match=message):
        read_expert_frequency(changed(tmp_path / "a.json", **values))


@pytest.mark.parametrize("value", [None, [], 3, {}, "x"])
def test_another_kind_of_value_is_named(tmp_path: Path, value: Any) -> None:
    path = save(tmp_path / "a.json")
    document = json.loads(path.read_text()) | {"next": value}
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match="next must have per_expert, experts and counts"):
        read_expert_frequency(path)


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json")
    data = path.read_bytes().rstrip()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            read_expert_frequency(path)

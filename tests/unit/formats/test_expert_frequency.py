"""Frequency files come back as they were written, and damaged ones are refused."""

from __future__ import annotations

import json
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

COUNTS = np.array([[3, 0, 5], [4, 4, 0]], dtype=np.uint64)
FREQUENCY = ExpertFrequency("ab" * 32, "chat.txt", "cd" * 32, 4, 2, COUNTS)


def save(path: Path) -> Path:
    write_expert_frequency(path, FREQUENCY)
    return path


def test_frequencies_come_back(tmp_path: Path) -> None:
    found = read_expert_frequency(save(tmp_path / "a.json"))
    assert np.array_equal(found.counts, COUNTS)
    assert found.counts.dtype == np.uint64
    assert (found.identity_sha256, found.corpus, found.corpus_sha256) == (
        "ab" * 32,
        "chat.txt",
        "cd" * 32,
    )
    assert (found.tokens, found.experts_per_token) == (4, 2)


def test_rates_are_uses_per_token() -> None:
    assert FREQUENCY.rates().tolist() == [[0.75, 0.0, 1.25], [1.0, 1.0, 0.0]]


def test_share_of_the_selections_of_the_busiest_experts() -> None:
    assert FREQUENCY.covered_by(1 / 6) == 5 / 16
    assert FREQUENCY.covered_by(0.5) == 13 / 16
    assert FREQUENCY.covered_by(1.0) == 1.0


def test_frequencies_of_another_model_are_refused() -> None:
    FREQUENCY.check_model("ab" * 32, 2, 3)
    with pytest.raises(ConfigError, match="counts 2 x 3 experts, the model has 2 x 4"):
        FREQUENCY.check_model("ab" * 32, 2, 4)
    with pytest.raises(ConfigError, match=r"belongs to model abab.* this one is efef"):
        FREQUENCY.check_model("ef" * 32, 2, 3)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("format", "other", "expected 'edgedsv4-expert-frequency' version 1"),
        ("version", 2, "missing key 'next'"),
        ("version", 3, "version 3"),
        ("next", {}, "unknown key 'next'"),
        ("tokens", 0, "tokens must be a number"),
        ("tokens", -1, "tokens must be a number"),
        ("tokens", 2**64, "tokens must be a number"),
        ("tokens", 4.0, "tokens must be a number"),
        ("tokens", True, "tokens must be a number"),
        ("experts_per_token", 4, "experts per token must be 1..3"),
        ("model_identity_sha256", "AB" * 32, "64 hexadecimal digits"),
        ("model_identity_sha256", None, "64 hexadecimal digits"),
        ("corpus", [], "corpus must have name and sha256"),
        ("corpus", {"name": "x"}, "corpus must have name and sha256"),
        ("corpus", {"name": 1, "sha256": "cd" * 32}, "corpus name must be text"),
        ("corpus", {"name": "x" * 1001, "sha256": "cd" * 32}, "at most 1000 characters"),
        ("corpus", {"name": "x", "sha256": "cd"}, "corpus sha256 must be 64"),
        ("counts", None, "counts: layers must be 1..512, found 0"),
        ("counts", [], "counts: layers must be 1..512, found 0"),
        ("counts", [[8]] * 513, "counts: layers must be 1..512, found 513"),
        ("counts", [[]], "experts must be 1..4096, found 0"),
        ("counts", [[3, 0, 5], [4, 4]], "layer 1 are not 3 numbers"),
        ("counts", [[3, 0, 5], 4], "layer 1 are not 3 numbers"),
        ("counts", [[3, 0, 5], [4, 4.0, 0]], "layer 1 hold something else"),
        ("counts", [[3, 0, 5], [9, -1, 0]], "layer 1 hold something else"),
        ("counts", [[3, 0, 5], [4, True, 3]], "layer 1 hold something else"),
        ("counts", [[3, 0, 5], [2**64, 0, 0]], "layer 1 hold something else"),
        ("counts", [[3, 0, 5], [4, 3, 0]], "layer 1 do not add up to 4 x 2"),
        ("more", 1, "unknown key 'more'"),
    ],
)
def test_damage_is_named(tmp_path: Path, name: str, value: Any, message: str) -> None:
    path = save(tmp_path / "a.json")
    document = json.loads(path.read_text())
    document[name] = value
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=message):
        read_expert_frequency(path)


@pytest.mark.parametrize(
    "name", ["tokens", "experts_per_token", "counts", "corpus", "model_identity_sha256"]
)
def test_missing_key_is_named(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / "a.json")
    document = json.loads(path.read_text())
    del document[name]
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError, match=f"missing key '{name}'"):
        read_expert_frequency(path)


def test_all_faults_are_in_one_error(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json")
    document = json.loads(path.read_text())
    document |= {"tokens": 0, "model_identity_sha256": "", "corpus": 1}
    path.write_text(json.dumps(document))
    with pytest.raises(FormatError) as caught:
        read_expert_frequency(path)
    assert len(caught.value.problems) >= 3


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "a.json")
    data = path.read_bytes().rstrip()
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(FormatError):
            read_expert_frequency(path)


def test_table_that_could_not_be_read_is_not_written(tmp_path: Path) -> None:
    counts = np.full((512, 4096), 10, dtype=np.uint64)
    with pytest.raises(ConfigError, match="would have"):
        write_expert_frequency(
            tmp_path / "a.json", ExpertFrequency("ab" * 32, "x", "cd" * 32, 40960, 1, counts)
        )
    assert list(tmp_path.iterdir()) == []


def test_huge_file_is_not_parsed(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with path.open("wb") as file:
        file.truncate((2 << 20) + 1)
    with pytest.raises(FormatError, match="expected at most"):
        read_expert_frequency(path)

"""A sampler that was saved and restored goes on as if nothing had happened."""

from __future__ import annotations

import hashlib
import json
import math
from typing import Any

import numpy as np
import pytest

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import ConfigError, SnapshotError
from edgedsv4.runtime.sampler import Sampler

VOCAB = 150
ROWS = np.random.default_rng(3).normal(0, 2, (40, VOCAB)).astype(np.float32)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0, "repetition_penalty": 1.5},
    "filtered": {"temperature": 0.7, "top_k": 40, "top_p": 0.95, "min_p": 0.05, "seed": 7},
    "penalised": {
        "repetition_penalty": 1.1,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "logit_bias": {3: 1.5, 20: -math.inf, 4: -1},
        "max_tokens": 100,
    },
    "numpy numbers": {"top_k": np.int64(9), "temperature": np.float32(0.5), "seed": np.int32(5)},
}


def play(sampler: Sampler, rows: np.ndarray) -> list[int]:
    ids = []
    for row in rows:
        ids.append(sampler.sample(row))
        sampler.accept(ids[-1])
    return ids


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("name", OPTIONS)
def test_restored_sampler_goes_on_with_the_same_tokens(name: str, backend: Any) -> None:
    sampler = Sampler(SamplingOptions(**OPTIONS[name]), VOCAB, backend=backend)
    sampler.observe([3, 5, 149])
    play(sampler, ROWS[:15])
    text = json.dumps(sampler.state(), allow_nan=False)
    restored = Sampler.from_state(json.loads(text), backend=backend)
    for row in ROWS[15:]:
        np.testing.assert_array_equal(restored.probabilities(row), sampler.probabilities(row))
        assert play(restored, row[None]) == play(sampler, row[None])
    assert restored.state() == sampler.state()
    assert restored.options == sampler.options


def test_state_is_a_picture_of_one_moment() -> None:
    sampler = Sampler(SamplingOptions(seed=1), VOCAB)
    state = sampler.state()
    first = play(sampler, ROWS)
    assert play(Sampler.from_state(state), ROWS) == first
    assert play(Sampler.from_state(state), ROWS) == first


def test_drawn_seed_is_part_of_the_state() -> None:
    sampler = Sampler(SamplingOptions(), VOCAB)
    assert Sampler.from_state(sampler.state()).seed == sampler.seed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version must be 1, found 2"),
        ({"version": None}, "version"),
        ({"vocab_size": 1 << 40}, "vocab_size"),
        ({"vocab_size": True}, "vocab_size"),
        ({"vocab_size": 5}, "seen"),
        ({"seed": 1 << 63}, "seed"),
        ({"seed": -1}, "seed"),
        ({"seen": [150]}, "seen"),
        ({"seen": "3"}, "seen"),
        ({"seen": None}, "seen"),
        ({"generated": [1], "counts": []}, "once"),
        ({"generated": [1, 1], "counts": [2, 3]}, "once"),
        ({"generated": [1], "counts": [0]}, "once"),
        ({"generated": [1], "counts": [1 << 31]}, "counts"),
        ({"generated": [1.0], "counts": [1]}, "generated"),
        ({"options": None}, "options"),
        ({"options": {}}, "options"),
        ({"options": {"logit_bias": {}, "warmth": 1.0}}, "options"),
        ({"options": {"logit_bias": {"x": 1.0}}}, "options"),
        ({"options": {"logit_bias": {"150": 1.0}}}, "logit_bias"),
        ({"options": {"logit_bias": {}, "temperature": 101.0}}, "temperature"),
    ],
)
def test_damaged_state_is_refused_with_the_part_at_fault(
    change: dict[str, Any], message: str
) -> None:
    sampler = Sampler(SamplingOptions(seed=1), VOCAB)
    play(sampler, ROWS[:5])
    with pytest.raises(ConfigError, match=message):
        Sampler.from_state({**sampler.state(), **change})


@pytest.mark.parametrize("name", ["version", "options", "vocab_size", "seed", "seen", "counts"])
def test_missing_part_is_named(name: str) -> None:
    state = Sampler(SamplingOptions(), VOCAB).state()
    del state[name]
    with pytest.raises(ConfigError, match=name):
        Sampler.from_state(state)


def resealed(data: bytes) -> bytes:
    return data + hashlib.sha256(data).digest()


def test_bytes_hold_the_whole_state() -> None:
    sampler = Sampler(SamplingOptions(seed=2**63 - 1, top_k=9), VOCAB)
    play(sampler, ROWS[:9])
    restored = Sampler.from_bytes(memoryview(sampler.to_bytes()))
    assert restored.state() == sampler.state()
    assert play(restored, ROWS) == play(sampler, ROWS)


def test_every_shortened_state_is_told_so() -> None:
    data = Sampler(SamplingOptions(seed=1), VOCAB).to_bytes()
    for size in range(len(data)):
        with pytest.raises(SnapshotError) as caught:
            Sampler.from_bytes(data[:size])
        assert caught.value.fault == "truncated"


def test_every_changed_byte_is_found() -> None:
    data = Sampler(SamplingOptions(seed=1), VOCAB).to_bytes()
    for place in range(len(data)):
        changed = bytearray(data)
        changed[place] ^= 0x40
        with pytest.raises(SnapshotError):
            Sampler.from_bytes(changed)
    changed = bytearray(data)
    changed[20] ^= 1
    with pytest.raises(SnapshotError) as caught:
        Sampler.from_bytes(changed)
    assert caught.value.fault == "checksum"


@pytest.mark.parametrize("text", [b"{}", b"[]", b"{", b"\xff", b'{"version": 1}'])
def test_sealed_bytes_that_are_no_state_are_refused(text: bytes) -> None:
    head = Sampler(SamplingOptions(), VOCAB).to_bytes()[:8] + len(text).to_bytes(8, "little")
    with pytest.raises(SnapshotError) as caught:
        Sampler.from_bytes(resealed(head + text))
    assert caught.value.fault == "format"


def test_bytes_behind_a_state_are_refused() -> None:
    data = Sampler(SamplingOptions(), VOCAB).to_bytes()
    with pytest.raises(SnapshotError, match="expected"):
        Sampler.from_bytes(data + b"x")
    with pytest.raises(SnapshotError, match="no sampler"):
        Sampler.from_bytes(b"something else altogether")

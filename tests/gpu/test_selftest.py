"""The self test of a GPU, which runs the references there."""

from __future__ import annotations

import pytest

from edgedsv4 import devices, run_selftest

pytestmark = pytest.mark.gpu


def test_gpu_passes() -> None:
    results = list(run_selftest("cuda"))
    assert [result.name for result in results if not result.has_passed] == []
    assert any("golden tokens" in result.name for result in results)


def test_gpu_is_described() -> None:
    card = next(device for device in devices() if device.name == "cuda:0")
    assert card.kind == "cuda"
    assert card.description
    assert card.memory_bytes > 1 << 30

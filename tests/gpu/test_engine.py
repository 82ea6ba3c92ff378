"""The whole engine on a GPU against itself on the CPU."""

from __future__ import annotations

import numpy as np
import pytest

from edgedsv4.config import EngineOptions
from edgedsv4.errors import CapacityError
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.shipped_models import RANDOM_TINY

pytestmark = pytest.mark.gpu

IDS = np.random.default_rng(1).integers(3, 259, 400).tolist()


def logits_on(device: str) -> tuple[np.ndarray, np.ndarray]:
    """Logits of every position, and of the place 50 tokens back after a rewind."""
    options = EngineOptions(context=600, device=device, profile="exact")
    with Engine.open(RANDOM_TINY, options) as engine, engine.new_session() as session:
        every = session.evaluate(IDS, logits="all")
        session.rewind(50)
        assert every is not None
        return every, session.logits()


def test_gpu_gives_the_logits_of_the_cpu() -> None:
    (on_cpu, rewound_on_cpu), (on_gpu, rewound_on_gpu) = logits_on("cpu"), logits_on("cuda")
    np.testing.assert_allclose(on_gpu, on_cpu, atol=2e-4)
    np.testing.assert_array_equal(on_gpu.argmax(1), on_cpu.argmax(1))
    np.testing.assert_allclose(rewound_on_gpu, rewound_on_cpu, atol=2e-4)


def test_budget_on_the_gpu_is_its_own_memory() -> None:
    options = EngineOptions(device="cuda", vram_bytes=1 << 20)
    with pytest.raises(CapacityError) as caught:
        Engine.open(RANDOM_TINY, options)
    assert caught.value.available_bytes == 1 << 20
    with Engine.open(RANDOM_TINY, EngineOptions(device="cuda:0", context=64)) as engine:
        assert engine.memory()["budget"] > 1 << 30

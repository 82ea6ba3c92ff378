"""Sessions that are saved on a GPU or loaded onto one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from memory_model import state_of

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.runtime.engine import Engine

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

pytestmark = pytest.mark.gpu

IDS = np.random.default_rng(1).integers(3, 4096, 400).tolist()
SAMPLED = SamplingOptions(seed=5, max_tokens=20)


def options(device: str) -> EngineOptions:
    return EngineOptions(context=600, device=device, backend="reference", draft=2)


def state(session: Session) -> dict[str, torch.Tensor]:
    found = state_of(session._parts.model, session._live.cache)
    return {name: rows.cpu() for name, rows in found.items()}


def test_session_saved_on_the_gpu_continues_there() -> None:
    with Engine.open("pocket-v4", options("cuda")) as engine:
        live = engine.new_session()
        live.sync(IDS)
        restored = engine.load_session(live.save_bytes())
        np.testing.assert_array_equal(restored.logits(), live.logits())
        assert list(restored.generate(SAMPLED)) == list(live.generate(SAMPLED))


@pytest.mark.parametrize(("writer", "reader"), [("cuda", "cpu"), ("cpu", "cuda")])
def test_session_goes_from_one_device_to_the_other(writer: str, reader: str) -> None:
    with Engine.open("pocket-v4", options(writer)) as engine, engine.new_session() as live:
        live.sync(IDS[:200])
        live.sync(IDS)
        saved, before = live.save_bytes(), state(live)
    with Engine.open("pocket-v4", options(reader)) as engine:
        restored = engine.load_session(saved)
        after = state(restored)
        assert before.keys() == after.keys()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert restored.turn_positions == (200, 400)
        assert restored.save_bytes() == saved

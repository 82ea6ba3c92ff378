"""A session on a GPU whose memory is full, or that fails."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from gpu_fakes import Machine, nvidia_card
from runtime_fakes import FakeModel, expected_logits, fake_parts

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import CapacityError, DeviceLostError
from edgedsv4.runtime.session import Session

IDS = [i % 11 for i in range(200)]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    Machine(monkeypatch).cuda(nvidia_card())
    model = FakeModel()
    model.numerics = replace(model.numerics, device=torch.device("cuda:0"))
    return model


@pytest.fixture
def session(model: FakeModel) -> Session:
    return Session(fake_parts(model, prefill_chunk=50), capacity=300)


def fail_at(position: int, error: Exception) -> Callable[[int], None]:
    def before_forward(start: int) -> None:
        if start == position:
            raise error

    return before_forward


def no_memory() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB.")


def test_session_stands_at_its_last_chunk_and_goes_on(session: Session, model: FakeModel) -> None:
    model.before_forward = fail_at(100, no_memory())
    with pytest.raises(CapacityError) as caught:
        session.evaluate(IDS)
    assert (caught.value.needed_bytes, caught.value.is_on_device) == (1 << 30, True)
    assert session.length == 100
    model.before_forward = lambda _position: None
    found = session.evaluate(IDS[100:])
    assert found is not None
    np.testing.assert_array_equal(found[0], expected_logits(IDS))


def test_generation_keeps_its_tokens(session: Session, model: FakeModel) -> None:
    session.evaluate(IDS[:20])
    model.before_forward = fail_at(23, no_memory())
    tokens = session.generate(SamplingOptions(temperature=0))
    yielded = [next(tokens) for _ in range(2)]
    with pytest.raises(CapacityError):
        list(tokens)
    assert session.length == 20 + 3
    assert list(session.token_ids)[20:22] == yielded
    model.before_forward = lambda _position: None
    assert session.logits().shape == (11,)


def test_failed_device_is_told(session: Session, model: FakeModel) -> None:
    model.before_forward = fail_at(0, torch.AcceleratorError("CUDA error: misaligned address"))
    with pytest.raises(DeviceLostError, match="misaligned address"):
        session.evaluate(IDS)

"""A token whose experts pass through the card can be stopped while they are waited for."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from edgedsv4.errors import CancelledError
from edgedsv4.model.expert_stager import ExpertStager
from edgedsv4.model.gpu_hybrid import HybridExperts, HybridParts


class SlowDrive:
    """Hands over nothing, and asks now and then whether to stop."""

    is_resident = False

    def check_unchanged(self) -> None:
        """No file changes."""

    def fetch(self, _layer: int, _ids: Sequence[int]) -> Sequence[Any]:
        raise AssertionError("a stream is streamed")

    def begin_forward(self, _token_ids: Sequence[int] | None) -> None:
        """Nothing is known ahead."""

    def end_forward(self, _tokens: int) -> None:
        """Nothing was handed over."""

    def stream(
        self, _layer: int, _ids: Sequence[int], _tokens: int, check_stop: Callable[[], None]
    ) -> Iterator[Sequence[Any]]:
        for wait in range(3):
            check_stop()
            if wait == 2:
                raise AssertionError("nobody stopped")
            yield []


def stop() -> None:
    raise CancelledError("stopped")


def test_a_token_without_the_cpu_can_be_stopped_while_it_waits() -> None:
    stager = ExpertStager(SlowDrive(), 4, torch.device("cpu"))
    parts = HybridParts(
        mode="off", stager=stager, host=None, token_host=None, prefers_cpu=lambda _: False
    )
    config: Any = SimpleNamespace(num_experts=4, experts_per_token=2)
    bank = SimpleNamespace(half=4, first_of_half=lambda _: 0)
    places = torch.full((4,), -1, dtype=torch.int32)
    placed: Any = SimpleNamespace(layer=0, places=places, bank=bank)
    buffers: Any = SimpleNamespace(expert_ids=torch.tensor([[0, 1]]))
    nothing: Any = None
    hybrid = HybridExperts(config, parts)
    hybrid.begin_token(stop)
    with pytest.raises(CancelledError):
        hybrid.token(nothing, placed, buffers, None, "")
    hybrid.begin_token()
    with pytest.raises(AssertionError, match="nobody stopped"):
        hybrid.token(nothing, placed, buffers, None, "")

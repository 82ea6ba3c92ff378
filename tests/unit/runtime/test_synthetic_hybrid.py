"""Random experts in main memory, and a network that holds a part of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_model import tiny_config

from edgedsv4.errors import CapacityError
from edgedsv4.kernels.quant_matmul import dequantize
from edgedsv4.runtime import expert_rates, host_memory, synthetic_hybrid
from edgedsv4.runtime import hybrid as hybrid_module
from edgedsv4.runtime.expert_rates import ExpertRates, measure_rates
from edgedsv4.runtime.host_memory import HostMemory
from edgedsv4.runtime.synthetic_hybrid import (
    HybridRecipe,
    RandomExperts,
    expert_sizes,
    host_facts,
    hybrid_network,
    with_host_share,
)
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES

CONFIG = tiny_config(
    compress_ratios=(0, 0), hidden_size=256, expert_width=256, num_experts=4, experts_per_token=2
)


@pytest.fixture(params=["q2", "mxfp4", "q4k"])
def experts(request: pytest.FixtureRequest) -> Iterator[RandomExperts]:
    made = RandomExperts(CONFIG, EXPERT_TYPES[request.param], 2, is_locked=False)
    yield made
    made.close()


def test_every_expert_has_memory_of_its_own(experts: RandomExperts) -> None:
    found = [e for layer in range(2) for e in experts.fetch(layer, range(4))]
    starts = [m.data.data_ptr() for e in found for m in (e.w1, e.w3, e.w2)]
    assert len(set(starts)) == 24
    assert len({m.data[0].numpy().tobytes() for e in found for m in (e.w1, e.w3)}) == 16


def test_elements_are_finite_and_of_the_size_of_weights(experts: RandomExperts) -> None:
    (expert,) = experts.fetch(1, (3,))
    for matrix in (expert.w1, expert.w3, expert.w2):
        values = dequantize(matrix, torch.float32)
        assert bool(torch.isfinite(values).all())
        assert 0.5 < float(values.std()) * matrix.columns**0.5 < 2


def test_a_failure_half_way_gives_all_memory_back(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[HostMemory] = []

    class Limited(HostMemory):
        def lock_for_gpu(self) -> None:
            made.append(self)
            if len(made) == 5:
                raise CapacityError("page-locked memory", needed_bytes=1, available_bytes=0)
            self._is_locked = True

        def close(self) -> None:
            self._is_locked = False
            super().close()

    monkeypatch.setattr(synthetic_hybrid, "HostMemory", Limited)
    with pytest.raises(CapacityError, match="page-locked"):
        RandomExperts(CONFIG, EXPERT_TYPES["mxfp4"], 2, is_locked=True)
    assert [memory.bytes.numel() for memory in made] == [0] * 5
    assert not any(memory._is_locked for memory in made)


def test_a_network_that_cannot_be_built_gives_its_experts_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise CapacityError("the card", needed_bytes=1, available_bytes=0)

    def note(experts: RandomExperts) -> None:
        closed.append(experts)

    closed: list[RandomExperts] = []
    monkeypatch.setattr(synthetic_hybrid, "PlacedExperts", refuse)
    monkeypatch.setattr(RandomExperts, "close", note)
    recipe = HybridRecipe(types=EXPERT_TYPES["mxfp4"], mode="on", threads=2, room=1 << 30)
    with pytest.raises(CapacityError, match="the card"):
        hybrid_network(CONFIG, recipe, torch.device("cpu"))
    assert len(closed) == 1


@pytest.mark.parametrize("mode", ["auto", "on"])
def test_a_network_holds_what_there_is_room_for(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expert_rates, "READ_BYTES", 16 << 20)
    measured: list[object] = []

    def measure(*given: Any) -> ExpertRates:
        measured.append(given)
        return measure_rates(*given)

    monkeypatch.setattr(hybrid_module, "measure_rates", measure)
    types = EXPERT_TYPES["mxfp4"]
    (size, _) = expert_sizes(CONFIG, types)
    room = 2 * 2 * (size.card_bytes + size.stored_bytes) + 3 * size.card_bytes
    recipe = HybridRecipe(types=types, mode=mode, threads=2, room=room)  # type: ignore[arg-type]
    network, source, chosen = hybrid_network(CONFIG, recipe, torch.device("cpu"))
    assert chosen.placement.resident == ((0, 1), (0,))
    assert [layer.has_residents for layer in network.placed_layers()] == [True, True]
    # What is measured differs every time, and with `on` the same text is promised.
    assert bool(measured) == (mode == "auto")
    hybrid = network.hybrid
    assert hybrid is not None
    host = hybrid.host
    assert host is not None
    host.step.x.normal_()
    host.step.ids.copy_(torch.tensor([[0, 3]]))
    host.step.weights.fill_(0.5)

    def work() -> list[float]:
        host.run_step(1)
        return [1.0]

    seconds, share = with_host_share(hybrid, work)
    assert seconds == [1.0]
    assert share.experts == (1 if mode == "auto" else 2)
    assert share.per_token(1, size).nbytes == share.experts * size.stored_bytes
    assert bool(host.step_out.any())
    rates = measure_rates(host, CONFIG, torch.device("cpu"), 2)
    # What lives on the card is not measured as if it took no time.
    assert 1e6 < rates.operations < 1e14
    assert 1e8 < rates.read < 1e13
    assert host_facts(recipe, chosen)["experts_on_card"] == 3
    source.close()


def test_no_room_for_passing_experts_is_an_error() -> None:
    recipe = HybridRecipe(types=EXPERT_TYPES["mxfp4"], mode="on", threads=1, room=1000)
    with pytest.raises(CapacityError, match="pass through"):
        hybrid_network(CONFIG, recipe, torch.device("cpu"))


def test_memory_that_the_machine_has_not_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_ram_bytes", lambda: 4095)
    with pytest.raises(CapacityError, match="main memory"):
        HostMemory(4096)


@pytest.mark.parametrize("status", [0, 2])
def test_memory_is_locked_and_unlocked(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    calls: list[tuple[object, ...]] = []

    class Runtime:
        def cudaHostRegister(self, *given: int) -> int:  # noqa: N802
            calls.append(given)
            return status

        def cudaHostUnregister(self, *given: int) -> int:  # noqa: N802
            calls.append(given)
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    with HostMemory(8192) as memory:
        start = memory.bytes.data_ptr()
        if status:
            with pytest.raises(CapacityError, match="status 2"):
                memory.lock_for_gpu()
        else:
            memory.lock_for_gpu()
    assert calls[0] == (start, 8192, 0)
    assert len(calls) == (1 if status else 2)

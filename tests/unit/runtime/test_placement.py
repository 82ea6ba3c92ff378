"""Where a model runs: on the card that `auto` finds, and on the CPU if the card is too small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gpu_fakes import Machine, nvidia_card

from edgedsv4.config import EngineOptions
from edgedsv4.errors import CapacityError
from edgedsv4.formats.checkpoint import Checkpoint, open_checkpoint
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.opening import GPU_CHUNKS, Placement, place
from edgedsv4.runtime.shipped_models import RANDOM_TINY, model_path

MIB = 1 << 20


@pytest.fixture(scope="module")
def checkpoint() -> Iterator[Checkpoint]:
    with model_path(RANDOM_TINY) as path, open_checkpoint(path) as opened:
        yield opened


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine(monkeypatch)
    found.cuda(nvidia_card())
    return found


def placed(checkpoint: Checkpoint, **options: object) -> Placement:
    return place(checkpoint, bind_weights(checkpoint), EngineOptions(**options))  # type: ignore[arg-type]


def test_auto_takes_the_card(checkpoint: Checkpoint, machine: Machine) -> None:
    found = placed(checkpoint)
    assert (found.device.type, found.choice.name) == ("cuda", "triton")
    assert found.options.prefill_chunk == GPU_CHUNKS[0]
    assert found.plan.available_bytes < machine.free


def test_auto_takes_the_cpu_if_the_card_is_too_small(
    checkpoint: Checkpoint, machine: Machine
) -> None:
    machine.free = 520 * MIB
    found = placed(checkpoint)
    assert (found.device.type, found.choice.name) == ("cpu", "native")
    assert found.options.chunk == 256
    assert any("too small" in note for note in found.notes)


@pytest.mark.parametrize("options", [{"device": "cuda"}, {"backend": "triton"}])
def test_what_was_named_is_not_replaced(
    checkpoint: Checkpoint, machine: Machine, options: dict[str, str]
) -> None:
    machine.free = 520 * MIB
    with pytest.raises(CapacityError) as caught:
        placed(checkpoint, **options)
    assert caught.value.is_on_device


def test_chunk_that_was_asked_for_stays(checkpoint: Checkpoint, machine: Machine) -> None:
    assert placed(checkpoint, prefill_chunk=100).options.prefill_chunk == 100
    assert machine.released == 0


def test_chunk_leaves_room_for_the_context(checkpoint: Checkpoint, machine: Machine) -> None:
    sizes = []
    for free in (600, 700, 900, 1400, 4000):
        machine.free = free * MIB
        try:
            sizes.append(placed(checkpoint, device="cuda", context=4096).options.prefill_chunk)
        except CapacityError:
            sizes.append(0)
    assert sizes == sorted(sizes)
    assert len(set(sizes)) > 1

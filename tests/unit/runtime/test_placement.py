"""Where a model runs: on the card that `auto` finds, and on the CPU if the card is too small."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gpu_fakes import Machine, nvidia_card

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BackendUnavailableError, CapacityError, ConfigError
from edgedsv4.formats.checkpoint import Checkpoint, open_checkpoint
from edgedsv4.formats.expert_frequency import ExpertFrequency, write_expert_frequency
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime import card_plan
from edgedsv4.runtime.card_plan import GPU_CHUNKS
from edgedsv4.runtime.opening import Placement, notes_of, place
from edgedsv4.runtime.shipped_models import RANDOM_TINY, model_path
from edgedsv4.runtime.tier_plan import HOST_BYTES

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


@pytest.mark.usefixtures("machine")
def test_experts_that_do_not_fit_stay_in_main_memory(checkpoint: Checkpoint) -> None:
    whole = placed(checkpoint, device="cuda", prefill_chunk=256, context=64)
    needed = whole.plan.needed_bytes
    assert whole.choice.card is None
    found = placed(checkpoint, prefill_chunk=256, context=64, vram_bytes=needed - 1)
    card = found.choice.card
    assert (found.device.type, found.choice.name) == ("cuda", "triton")
    assert card is not None
    assert card.mode == "auto"
    assert 0 < card.experts.resident < card.experts.total
    assert found.plan.fits
    assert found.plan.needed_bytes <= needed - 1
    items = {item.name: item.nbytes for item in found.plan.items}
    assert items["routed experts"] == card.experts.resident_bytes
    assert items["passing experts"] == card.experts.staging_bytes
    assert any("routed experts live on the card" in note for note in found.notes)


@pytest.mark.parametrize(("wanted", "is_card"), [("auto", False), ("on", True), ("off", False)])
def test_who_computes_is_as_asked_for(
    checkpoint: Checkpoint, machine: Machine, wanted: str, is_card: bool
) -> None:
    machine.free = 70 << 30
    found = placed(checkpoint, device="cuda", cpu_experts=wanted)
    assert (found.choice.card is not None) == is_card
    if found.choice.card is not None:
        # They serve chunks.
        assert found.choice.card.mode == wanted
        assert found.choice.card.experts.resident == found.choice.card.experts.total


def test_the_cpu_cannot_be_spared_where_there_is_no_card(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    Machine(monkeypatch)
    with pytest.raises(BackendUnavailableError, match="cpu_experts 'off'"):
        placed(checkpoint, cpu_experts="off")


@pytest.mark.usefixtures("machine")
def test_without_c_kernels_experts_pass_through_the_card(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    needed = placed(checkpoint, device="cuda", prefill_chunk=256, context=64).plan.needed_bytes
    monkeypatch.setattr(card_plan, "HAVE_NATIVE", False)
    monkeypatch.setattr(card_plan, "WHY_NOT", "they are not built")
    options = {"device": "cuda", "prefill_chunk": 256, "context": 64, "vram_bytes": needed - 1}
    found = placed(checkpoint, **options)
    assert found.choice.card is not None
    assert found.choice.card.mode == "off"
    assert any("which is slow: they are not built" in note for note in found.notes)


# ---- experts that are neither on the card nor fit beside it ----


@pytest.fixture
def tight(checkpoint: Checkpoint, machine: Machine) -> dict[str, object]:
    """Options that leave room for a part of the experts on the card."""
    assert machine.free
    chosen: dict[str, object] = {"device": "cuda", "prefill_chunk": 256, "context": 64}
    needed = placed(checkpoint, **chosen).plan.needed_bytes
    return {**chosen, "vram_bytes": needed - 1}


def host_bytes(found: Placement) -> int:
    """Main memory in which all experts fit that are not on the card."""
    card = found.choice.card
    assert card is not None
    return HOST_BYTES + card.experts.bounce_bytes + card.elsewhere_bytes


def test_what_fits_in_main_memory_stays_mapped(
    checkpoint: Checkpoint, tight: dict[str, object]
) -> None:
    found = placed(checkpoint, **tight)
    assert found.choice.store is None
    enough = host_bytes(found)
    assert placed(checkpoint, ram_bytes=enough, **tight).choice.store is None
    stored = placed(checkpoint, ram_bytes=enough - 1, **tight)
    store, card = stored.choice.store, stored.choice.card
    assert store is not None
    assert card is not None
    assert store.nbytes <= card.elsewhere_bytes
    assert store.slots < card.elsewhere
    assert store.total == card.experts.total
    assert stored.plan == found.plan


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_a_store_has_no_more_slots_than_experts_that_may_be_asked_for(
    checkpoint: Checkpoint, tight: dict[str, object], mode: str
) -> None:
    found = placed(checkpoint, expert_place="stored", ram_bytes=1 << 40, cpu_experts=mode, **tight)
    card, store = found.choice.card, found.choice.store
    assert card is not None
    assert store is not None
    assert store.slots == card.elsewhere
    assert card.elsewhere == card.experts.total - (0 if mode == "on" else card.experts.resident)


def test_too_little_main_memory_is_told(checkpoint: Checkpoint, tight: dict[str, object]) -> None:
    found = placed(checkpoint, ram_bytes=HOST_BYTES, **tight)
    assert found.choice.store is None
    assert any("stay mapped: the experts of one token" in note for note in found.notes)
    with pytest.raises(CapacityError, match="one token in main memory"):
        placed(checkpoint, ram_bytes=HOST_BYTES, expert_place="stored", **tight)
    with pytest.raises(CapacityError, match="expert_ram_bytes must hold"):
        placed(checkpoint, expert_ram_bytes=1, expert_place="stored", **tight)
    with pytest.raises(CapacityError, match="expert_ram_bytes asks for"):
        placed(checkpoint, expert_ram_bytes=1 << 45, expert_place="stored", **tight)


def test_a_frequency_file_decides_what_lives_on_the_card(
    checkpoint: Checkpoint, tight: dict[str, object], tmp_path: Path
) -> None:
    config = checkpoint.config
    counts = np.ones((config.num_layers, config.num_experts), dtype=np.uint64)
    counts[:, -2:] = 100
    total = int(counts[0].sum())
    file = tmp_path / "freq.json"
    frequency = ExpertFrequency(
        identity_sha256=checkpoint.identity_sha256,
        corpus="none",
        corpus_sha256="0" * 64,
        tokens=total // config.experts_per_token,
        experts_per_token=config.experts_per_token,
        counts=counts,
    )
    write_expert_frequency(file, frequency)
    found = placed(checkpoint, expert_freq=file, **tight)
    card = found.choice.card
    assert card is not None
    for ids in card.experts.placement.resident[: config.num_layers]:
        assert set(ids) >= {config.num_experts - 2, config.num_experts - 1}
    notes = notes_of("model", checkpoint, (), found)
    assert not any("expert_freq has no effect" in note for note in notes)
    write_expert_frequency(file, replace(frequency, identity_sha256="1" * 64))
    with pytest.raises(ConfigError, match="belongs to model"):
        placed(checkpoint, expert_freq=file, **tight)

"""Where experts of an open engine lie, for predictions: what it was given, never a plan anew."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import pytest
from link_samples import DRIVE, expert_rate, links
from tier_samples import ALL_EXPERTS, COST, EXPERT, FLASH, OPTIONS, WEIGHTS

from edgedsv4 import Engine, EngineOptions
from edgedsv4.model.gpu_banks import ExpertPlacement
from edgedsv4.runtime.backends import BackendChoice
from edgedsv4.runtime.card_plan import CardPlan
from edgedsv4.runtime.engine_plan import plan_of_engine
from edgedsv4.runtime.expert_placement import CardExperts
from edgedsv4.runtime.links import mount_of
from edgedsv4.runtime.memory_plan import MemoryPlan, plan_memory
from edgedsv4.runtime.store_plan import StorePlan

if TYPE_CHECKING:
    from edgedsv4.runtime.tier_plan import TierPlan

STORE = StorePlan(slots=43 * 100 + 5, staging=64, slot_bytes=EXPERT, total=43 * 256)


def memory(available_bytes: int, **changes: Any) -> MemoryPlan:
    return plan_memory(FLASH, WEIGHTS, OPTIONS, available_bytes=available_bytes, **changes)


def plan(choice: BackendChoice, available_bytes: int = 64 << 30) -> TierPlan:
    is_on_gpu = choice.name == "triton"
    planned = memory(available_bytes, on_gpu=is_on_gpu)
    return plan_of_engine(FLASH, COST, OPTIONS, planned, choice, WEIGHTS)


def card(mode: str, residents: list[int]) -> CardPlan:
    """Some experts of each layer, as a card was given them."""
    ids = tuple(tuple(range(count)) for count in residents)
    return CardPlan(
        mode=mode,  # type: ignore[arg-type]  # one of its names
        experts=CardExperts(ExpertPlacement(ids, 32), 1, 2 * EXPERT, 3, 43 * 256),
        options=OPTIONS,
        weights={},
        elsewhere=0,
        elsewhere_bytes=0,
        counts=None,
        notes=(),
    )


def test_slots_of_a_store_take_experts_of_every_layer() -> None:
    found = plan(BackendChoice("native", (), store=STORE))
    assert not found.has_card
    assert found.ram.slots == (101,) * 5 + (100,) * 38
    assert found.drive.slots == (155,) * 5 + (156,) * 38
    assert found.ram_staging_bytes == 64 * EXPERT
    assert found.store == STORE


def test_mapped_experts_lie_where_the_system_finds_memory() -> None:
    choice = BackendChoice("native", ())
    found = plan(choice, available_bytes=2 * ALL_EXPERTS)
    assert found.ram.slots == (256,) * 43
    few = plan(choice)
    assert 0 < few.ram.share < 0.5
    assert few.drive.share == pytest.approx(1 - few.ram.share)


@pytest.mark.parametrize("mode", ["auto", "on", "off"])
def test_residents_of_a_card_are_those_it_was_given(mode: str) -> None:
    residents = [layer % 7 for layer in range(43)]
    found = plan(BackendChoice("triton", (), card=card(mode, residents)))
    assert found.has_card
    assert found.vram.slots == tuple(residents)
    assert found.ram.slots == tuple(256 - count for count in residents)
    assert found.request.options.cpu_experts == mode
    assert found.vram_staging_bytes == 2 * EXPERT


def test_store_beside_a_card_has_its_slots_for_the_others() -> None:
    choice = BackendChoice("triton", (), card=card("auto", [200] * 43), store=STORE)
    found = plan(choice)
    assert found.vram.slots == (200,) * 43
    assert found.ram.slots == (56,) * 43
    assert not any(found.drive.slots)


def test_a_draft_blocks_residents_are_not_a_layers() -> None:
    found = plan(BackendChoice("triton", (), card=card("auto", [9] * 44)))
    assert found.vram.slots == (9,) * 43


def test_without_a_placement_everything_is_on_the_card() -> None:
    assert plan(BackendChoice("triton", ()), 200 << 30).vram.slots == (256,) * 43


# ---- an engine ----

RATES = tuple(expert_rate("MXFP4", 2, tokens, 5e9) for tokens in (1, 16))


def test_engine_tells_what_its_store_lets_expect() -> None:
    given = EngineOptions(device="cpu", context=500, expert_place="stored")
    found = {}
    for name, nbytes in (("all", 9 << 20), ("few", 2 << 20)):
        options = dataclasses.replace(given, expert_ram_bytes=nbytes)
        with Engine.open("pocket-v4", options) as engine:
            facts = engine.describe()["experts"]
            mount = mount_of(engine._live.checkpoint.path)
            drives = (dataclasses.replace(DRIVE, mount=mount),)
            report = engine.expected_speed(links(experts=RATES, drives=drives, card=None))
        assert isinstance(facts, dict)
        assert report.plan.store is not None
        assert report.plan.store.slots == facts["slots"]
        found[name] = report
    assert found["all"].prediction is not None
    assert found["all"].prediction.shares == (0, 1, 0)
    assert 0 < found["few"].plan.ram.share < 0.5
    assert found["few"].prediction is not None
    assert found["few"].prediction.decode.seconds["drive"] > 0


def test_nothing_is_expected_of_torchs_operations() -> None:
    options = EngineOptions(device="cpu", context=500, backend="reference")
    with Engine.open("pocket-v4", options) as engine:
        report = engine.expected_speed(links(experts=RATES, card=None))
    assert report.prediction is None
    assert report.missing == ("torch's operations",)

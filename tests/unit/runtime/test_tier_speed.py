"""Predicted speeds against examples that were worked out by hand."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
from tier_samples import DESKTOP, EXPERT, FLASH, needed_bytes, request, with_shares

from edgedsv4.config import CpuExperts, EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.runtime.card_work import activation_bytes, attention_products
from edgedsv4.runtime.tier_plan import HOST_BYTES, STAGING_EXPERTS, TierPlan, place_experts
from edgedsv4.runtime.tier_speed import (
    Speeds,
    _expected_seconds,
    _ExpertSeconds,
    predict,
    unknown_rates,
)

PER_TOKEN = 6 * 43 * EXPERT
RTX_4090 = dataclasses.replace(DESKTOP, vram=800e9, to_card=25.5e9, drive=6.5e9)


def by_mode(plan: TierPlan, mode: CpuExperts) -> TierPlan:
    """The same placement, computed otherwise."""
    options = dataclasses.replace(plan.request.options, cpu_experts=mode)
    return dataclasses.replace(plan, request=dataclasses.replace(plan.request, options=options))


def test_half_in_vram_and_half_in_memory_is_about_30_tokens_per_second() -> None:
    room = (STAGING_EXPERTS + 43 * 128) * EXPERT
    plan = place_experts(request(vram_bytes=needed_bytes() + room))
    assert plan.vram.share == 0.5
    found = predict(plan, DESKTOP).decode
    assert found.seconds["cpu"] == pytest.approx(0.0246, abs=1e-4)
    assert found.seconds["dense"] == pytest.approx(0.00564, abs=1e-5)
    assert found.seconds["exchange"] == pytest.approx(0.00194, abs=1e-5)
    assert found.bound_tokens_per_second == pytest.approx(31.05, abs=0.1)
    assert (found.limit, found.ram_path) == ("cpu", "cpu")


@pytest.mark.parametrize(
    ("speeds", "shares", "drive_seconds", "tokens_per_second"),
    [
        (RTX_4090, (0.35, 0.55, 0.10), 0.053, 15.4),
        (DESKTOP, (0.54, 0.15, 0.31), 0.089, 10.3),
        (DESKTOP, (0.54, 0.0, 0.46), 0.132, 7.15),
    ],
    ids=["4090, 64 GB, NVMe 4", "5090, 32 GB, NVMe 5", "the same without a RAM tier"],
)
def test_drive_bounds_boxes_with_little_memory(
    speeds: Speeds,
    shares: tuple[float, float, float],
    drive_seconds: float,
    tokens_per_second: float,
) -> None:
    found = predict(with_shares(*shares), speeds)
    assert found.decode.seconds["drive"] == pytest.approx(drive_seconds, abs=5e-4)
    assert found.decode.bound_tokens_per_second == pytest.approx(tokens_per_second, abs=0.1)
    assert found.decode.tokens_per_second < found.decode.bound_tokens_per_second
    assert found.decode.limit == "drive"
    assert found.drive_bytes_per_token == pytest.approx(shares[2] * PER_TOKEN)
    assert found.shares == pytest.approx(shares)


@pytest.mark.parametrize(
    ("speeds", "expected"),
    [
        (dataclasses.replace(DESKTOP, memory=70e9, experts=70e9), 20.3),
        (dataclasses.replace(DESKTOP, memory=38e9, experts=38e9), 11.0),
    ],
)
def test_all_experts_from_memory(speeds: Speeds, expected: float) -> None:
    found = predict(with_shares(0, 1, 0), speeds).decode
    assert 1 / found.seconds["cpu"] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("to_card", "expected"), [(52e9, 15.1), (25.5e9, 7.4)])
def test_all_experts_over_the_bus_where_the_cpu_may_not_compute(
    to_card: float, expected: float
) -> None:
    slow = dataclasses.replace(DESKTOP, experts=1e9, to_card=to_card)
    found = predict(by_mode(with_shares(0, 1, 0), "off"), slow).decode
    assert found.ram_path == found.limit == "bus"
    assert 1 / found.seconds["bus"] == pytest.approx(expected, abs=0.05)


@pytest.mark.parametrize(("drive", "expected"), [(12e9, 3.5), (6.5e9, 1.9)])
def test_all_experts_from_the_drive(drive: float, expected: float) -> None:
    found = predict(with_shares(0, 0, 1), dataclasses.replace(DESKTOP, drive=drive)).decode
    assert 1 / found.seconds["drive"] == pytest.approx(expected, abs=0.05)


def test_without_a_card_dense_weights_are_read_by_the_cpu() -> None:
    plan = place_experts(request(vram_bytes=None, ram_bytes=400 << 30))
    found = predict(plan, DESKTOP).decode
    assert found.seconds["dense"] == pytest.approx(7.9e9 / 70e9, rel=1e-4)
    assert set(found.seconds) == {"dense", "cpu", "drive"}
    assert found.tokens_per_second == pytest.approx(70e9 / (7.9e9 + PER_TOKEN), rel=1e-4)


def test_card_that_holds_everything_exchanges_nothing() -> None:
    found = predict(place_experts(request(vram_bytes=400 << 30)), DESKTOP).decode
    assert found.seconds["exchange"] == found.seconds["cpu"] == 0
    assert found.tokens_per_second == pytest.approx(1400e9 / (7.9e9 + PER_TOKEN), rel=1e-4)


def test_rows_of_a_long_timeline_are_read_too() -> None:
    plan = place_experts(request())
    near, far = (predict(plan, DESKTOP, depth=depth).decode for depth in (0, 100_000))
    assert far.seconds["dense"] > near.seconds["dense"]
    with pytest.raises(ConfigError, match="depth"):
        predict(plan, DESKTOP, depth=-1)


# ---- a step of a card ----


def test_launches_of_a_step_cost_more_where_the_cpu_takes_part() -> None:
    speeds = dataclasses.replace(DESKTOP, launch_seconds=3e-6, overlapped_launch_seconds=2e-6)
    whole = place_experts(request(vram_bytes=400 << 30))
    launches = 43 * 14 + 6
    assert predict(whole, speeds).decode.seconds["launches"] == pytest.approx(launches * 2e-6)
    for plan in (by_mode(whole, "on"), with_shares(0.5, 0.5, 0)):
        assert predict(plan, speeds).decode.seconds["launches"] == pytest.approx(launches * 3e-6)


def test_experts_on_the_card_take_what_its_kernels_need() -> None:
    whole = place_experts(request(vram_bytes=400 << 30))
    found = predict(whole, dataclasses.replace(DESKTOP, card_experts=100e9)).decode
    assert found.seconds["vram"] == pytest.approx(PER_TOKEN / 100e9)
    assert found.limit == "vram"


def test_cpu_computes_all_experts_of_a_token_where_it_is_told_to() -> None:
    plan = by_mode(place_experts(request(vram_bytes=400 << 30)), "on")
    found = predict(plan, DESKTOP).decode
    assert found.seconds["cpu"] == pytest.approx(PER_TOKEN / 70e9)
    assert found.seconds["exchange"] == pytest.approx(43 * 45e-6)
    assert found.seconds["vram"] == 0


def test_calls_of_the_cpu_take_their_measured_time() -> None:
    weights = 3 * 4096 * 2048
    calls = tuple((count * float(weights), 1e-3 * count**2) for count in range(1, 7))
    speeds = dataclasses.replace(DESKTOP, calls=calls)
    found = predict(with_shares(0, 1, 0), speeds).decode
    assert found.seconds["cpu"] == pytest.approx(43 * 36e-3)
    # Half of the experts: the mean of squares of what falls to the CPU, not the square of 3.
    half = predict(with_shares(0.5, 0.5, 0), speeds).decode
    squares = sum(math.comb(6, n) / 64 * n * n for n in range(7))
    fixed = half.seconds["dense"] + half.seconds["launches"] + half.seconds["exchange"]
    assert 1 / half.tokens_per_second == pytest.approx(fixed + 43 * 1e-3 * squares, rel=0.01)


def test_experts_that_travel_are_computed_afterwards() -> None:
    found = predict(by_mode(with_shares(0.5, 0.5, 0), "off"), DESKTOP).decode
    each = found.seconds
    assert each["vram"] == pytest.approx(PER_TOKEN / 1400e9)
    assert each["bus"] == pytest.approx(PER_TOKEN / 2 / 52e9)
    assert 1 / found.tokens_per_second == pytest.approx(sum(each.values()))


# ---- the layer that is waited for ----

ONE = _ExpertSeconds(vram=1.0, outside=10.0, drive=100.0)


def test_one_selection_takes_the_time_of_where_it_falls() -> None:
    # An expert on the drive is read there, and computed meanwhile: 100, not 110.
    assert _expected_seconds(ONE, (0.5, 0.25, 0.25), 1) == pytest.approx(0.5 + 2.5 + 25)


def test_two_selections_are_averaged_over_all_ways_to_fall() -> None:
    # Both in VRAM: 2. One each: 10. Both in memory: 20.
    expected = 0.25 * 2 + 0.5 * 10 + 0.25 * 20
    assert _expected_seconds(ONE, (0.5, 0.5, 0.0), 2) == pytest.approx(expected)


def test_many_selections_are_near_their_average() -> None:
    assert _expected_seconds(ONE, (0.5, 0.25, 0.25), 64) == 16 * 100


# ---- prefill ----


def prefilled(chunk: int, speeds: Speeds, *, in_memory: bool) -> float:
    """Tokens per second of a chunk with no expert on the card, and a CPU that cannot help."""
    speeds = dataclasses.replace(speeds, products=1e9)
    options = EngineOptions(context=16_384, prefill_chunk=chunk)
    needed = needed_bytes(options=options)
    plan = place_experts(
        request(
            options=options,
            vram_bytes=needed,
            ram_bytes=HOST_BYTES + 43 * 256 * EXPERT if in_memory else 1,
        )
    )
    assert sum(plan.vram.slots) == 0
    assert sum(plan.ram.slots) == (43 * 256 if in_memory else 0)
    (found,) = (p for p in predict(plan, speeds).prefill if p.tokens == chunk)
    return found.tokens_per_second


@pytest.mark.parametrize(("chunk", "pcie4", "pcie5", "nvme5"), [(512, 89, 181, 42)])
def test_chunk_sets_the_speed_of_streaming(
    chunk: int, pcie4: float, pcie5: float, nvme5: float
) -> None:
    assert prefilled(chunk, RTX_4090, in_memory=True) == pytest.approx(pcie4, abs=0.5)
    assert prefilled(chunk, DESKTOP, in_memory=True) == pytest.approx(pcie5, abs=0.5)
    assert prefilled(chunk, DESKTOP, in_memory=False) == pytest.approx(nvme5, abs=0.5)


@pytest.mark.parametrize(("to_card", "expected"), [(25.5e9, 710), (52e9, 1447)])
def test_chunk_of_4096_tokens(to_card: float, expected: float) -> None:
    speeds = dataclasses.replace(DESKTOP, to_card=to_card)
    assert prefilled(4096, speeds, in_memory=True) == pytest.approx(expected, abs=1)


@pytest.mark.parametrize(
    ("products", "seconds"),
    [
        # 512 tokens x 43 layers x 6 experts x 25.2 M weights are 3.32 T products; reading the
        # experts takes 2.10 s, the bus 2.83 s.
        (1e15, {"cpu": 147.18e9 / 70e9}),
        (1.3e12, {"cpu": 3.324e12 / 1.3e12}),
        (1e12, {"bus": 147.18e9 / 52e9}),
        (0.0, {"bus": 147.18e9 / 52e9}),
    ],
)
def test_cpu_computes_a_chunk_where_it_is_faster_than_the_bus(
    products: float, seconds: dict[str, float]
) -> None:
    speeds = dataclasses.replace(DESKTOP, products=products)
    plan = place_experts(request(vram_bytes=needed_bytes()))
    found = {
        name: value
        for name, value in predict(plan, speeds).prefill[0].seconds.items()
        if name in ("cpu", "bus")
    }
    assert found == {name: pytest.approx(value, rel=1e-3) for name, value in seconds.items()}


def test_short_chunk_waits_for_the_cpu_in_every_layer() -> None:
    plan = place_experts(request(vram_bytes=needed_bytes()))
    speeds = dataclasses.replace(DESKTOP, cpu_chunk=((1.0, 1e-13), (64.0, 64e-13)))
    found = predict(plan, speeds).prefill[0]
    assert set(found.seconds) == {"compute", "cpu", "drive"}
    total = found.seconds["compute"] + found.seconds["cpu"]
    assert found.tokens_per_second == pytest.approx(512 / total)


def test_prompts_that_are_asked_for_are_predicted() -> None:
    options = EngineOptions(context=4096, prefill_chunk=2048)
    plan = place_experts(request(options=options))
    assert [p.tokens for p in predict(plan, DESKTOP, prompts=(7, 2048)).prefill] == [7, 2048]


def test_cpu_computes_a_chunk_in_the_measured_time_of_its_experts() -> None:
    plan = place_experts(request(vram_bytes=None, ram_bytes=400 << 30))
    speeds = dataclasses.replace(DESKTOP, cpu_chunk=((1.0, 1e-11), (64.0, 1e-11)))
    found = predict(plan, speeds).prefill[0].seconds
    used = 43 * 256 * (1 - (1 - 6 / 256) ** 512)
    attention = attention_products(FLASH, 512)
    dense = 512 * 7e9 / 1e12 + attention / 1e12
    assert found["compute"] == pytest.approx(dense + used * 3 * 4096 * 2048 * 1e-11)
    slow = dataclasses.replace(speeds, dense_products=1e11, float_products=1e10)
    more = predict(plan, slow).prefill[0].seconds["compute"] - found["compute"]
    assert more == pytest.approx(512 * 7e9 / 1e11 + attention / 1e10 - dense)


def test_prompt_longer_than_the_chunk_is_as_fast_as_a_chunk() -> None:
    plan = place_experts(request())
    assert [found.tokens for found in predict(plan, DESKTOP).prefill] == [512]


def test_bus_is_never_faster_than_the_memory_it_reads() -> None:
    speeds = dataclasses.replace(DESKTOP, memory=20e9, experts=1e9)
    found = predict(by_mode(with_shares(0, 1, 0), "off"), speeds).decode
    assert found.seconds["bus"] == pytest.approx(PER_TOKEN / 20e9)


def test_short_context_has_a_short_prompt() -> None:
    options = EngineOptions(context=100, prefill_chunk=512)
    found = predict(place_experts(request(options=options)), DESKTOP)
    assert [one.tokens for one in found.prefill] == [100]


def test_products_bound_a_chunk_that_is_all_in_vram() -> None:
    plan = place_experts(request(vram_bytes=400 << 30))
    found = predict(plan, dataclasses.replace(DESKTOP, card_products=1e10)).prefill[0]
    per_token = 7e9 + 6 * 43 * 3 * 4096 * 2048 + attention_products(FLASH, 512) / 512
    assert found.tokens_per_second == pytest.approx(1e10 / per_token, rel=1e-3)
    assert found.limit == "compute"


def test_everything_that_a_card_does_in_a_chunk_adds_up() -> None:
    plan = place_experts(request(vram_bytes=400 << 30))
    weights = 3 * 4096 * 2048
    speeds = dataclasses.replace(
        DESKTOP,
        card_products=1e14,
        launch_seconds=3e-6,
        card_chunk=((1.0, 1e-13), (100.0, 2e-12)),
    )
    found = predict(plan, speeds).prefill[0].seconds
    used = 256 * (1 - (1 - 6 / 256) ** 512)
    each = 512 * 6 / used
    seconds = [
        512 * 7e9 / 1e14,
        attention_products(FLASH, 512) / 1e14,
        (7.9e9 + 4 * 7e9 + 512 * activation_bytes(FLASH)) / 1400e9,
        43 * 45 * 3e-6,
        43 * used * weights * (1e-13 + (2e-12 - 1e-13) * (each - 1) / 99),
    ]
    assert found == {"compute": pytest.approx(sum(seconds), rel=1e-9), "drive": 0}


def test_cpu_prefill_is_bound_by_products_or_by_the_drive() -> None:
    plan = place_experts(request(vram_bytes=None, ram_bytes=400 << 30))
    found = predict(plan, DESKTOP).prefill[0]
    assert (found.limit, found.seconds["drive"]) == ("compute", 0)
    few = place_experts(request(vram_bytes=None, ram_bytes=12 << 30))
    assert predict(few, dataclasses.replace(DESKTOP, drive=1e9)).prefill[0].limit == "drive"


# ---- what is unknown ----


@pytest.mark.parametrize(
    ("changes", "ram", "unknown"),
    [
        ({}, 1, ()),
        ({"drive": 0.0}, 1, ("drive",)),
        ({"drive": 0.0}, 400 << 30, ()),
        ({"vram": 0.0, "to_card": 0.0, "memory": 0.0}, 1, ("memory", "vram", "to_card")),
        ({"products": 0.0}, 1, ()),
    ],
)
def test_only_rates_that_the_plan_needs_have_to_be_known(
    changes: dict[str, Any], ram: int, unknown: tuple[str, ...]
) -> None:
    plan, speeds = place_experts(request(ram_bytes=ram)), dataclasses.replace(DESKTOP, **changes)
    assert unknown_rates(plan, speeds) == unknown
    if unknown:
        with pytest.raises(ConfigError, match=unknown[0]):
            predict(plan, speeds)


def test_without_a_card_its_rates_are_not_needed() -> None:
    plan = place_experts(request(vram_bytes=None, ram_bytes=400 << 30))
    speeds = Speeds(memory=1e9, experts=1e9, products=0, drive=0)
    assert unknown_rates(plan, speeds) == ("products",)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
def test_impossible_rate_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="drive"):
        dataclasses.replace(DESKTOP, drive=value)


def test_prediction_is_json() -> None:
    found = json.loads(json.dumps(predict(place_experts(request()), DESKTOP).to_json()))
    assert set(found["shares"]) == {"vram", "ram", "drive"}
    assert found["decode"]["limit"] == "cpu"

"""What is told of a placement: rates of a machine, advice, and how a run compares."""

from __future__ import annotations

import dataclasses
import json

import pytest
from link_samples import CARD, DRIVE, expert_rate, links
from tier_samples import ALL_EXPERTS, COST, DESKTOP, OPTIONS, needed_bytes, request

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.runtime.tier_plan import HOST_BYTES, place_experts
from edgedsv4.runtime.tier_rates import speeds_of
from edgedsv4.runtime.tier_report import (
    Deviation,
    Outcome,
    advise,
    compare,
    limit_text,
    plan_tiers,
    report,
)
from edgedsv4.runtime.tier_speed import predict


def test_speeds_are_those_of_the_model_and_its_drive() -> None:
    found = speeds_of(links(), {"MXFP4": 7}, DRIVE, has_card=True)
    assert found.memory == 70e9
    assert found.experts == pytest.approx(60e9)
    assert found.products == pytest.approx(16 * 50e9)
    assert (found.drive, found.vram, found.to_card) == (12e9, 1400e9, 52e9)
    assert (found.card_products, found.exchange_seconds) == (1e14, 45e-6)


def test_types_that_are_mixed_take_the_time_of_each() -> None:
    rates = (expert_rate("A", 8, 1, 40e9), expert_rate("B", 8, 1, 10e9))
    found = speeds_of(links(experts=rates), {"A": 2, "B": 1}, None, has_card=False)
    # Three weights in 2 / 40 + 1 / 10 ns, half a byte each.
    assert found.experts == pytest.approx(3 / (2 / 40e9 + 1 / 10e9) / 2)


def test_what_was_not_measured_is_unknown() -> None:
    found = speeds_of(links(), {"MXFP4": 1, "Q4_K": 1}, None, has_card=False)
    assert (found.experts, found.products, found.drive, found.vram) == (0, 0, 0, 0)
    without_reads = links(card=dataclasses.replace(CARD, read=()))
    assert speeds_of(without_reads, {"MXFP4": 1}, None, has_card=True).vram == 1300e9


def test_report_predicts_where_everything_is_known() -> None:
    found = report(request(), links(), DRIVE)
    assert found.prediction == predict(
        found.plan, speeds_of(links(), COST.block_types, DRIVE, has_card=True)
    )
    assert found.missing == ()


def test_report_says_what_has_to_be_measured() -> None:
    found = report(request(ram_bytes=1), links(experts=(), card=None), None)
    assert found.prediction is None
    assert found.missing == (
        "experts on the CPU",
        "the drive that holds the model (--path)",
        "a card",
    )
    assert report(request(), None, None).missing == ("everything",)


def test_report_is_json_with_the_keys_of_a_memory_plan() -> None:
    found = json.loads(json.dumps(report(request(), links(), DRIVE).to_json(), allow_nan=False))
    assert {"fits", "context", "items", "placement", "prediction", "advice"} <= set(found)
    assert found["experts_fit"]
    assert not report(request(ram_bytes=1), None, None).to_json()["experts_fit"]


# ---- advice ----


def test_more_memory_is_advised_where_the_drive_limits() -> None:
    plan = place_experts(request(ram_bytes=64 << 30))
    first, *others = advise(plan, DESKTOP)
    enough = plan.ram_bytes - plan.ram_staging_bytes + plan.drive.nbytes
    assert first.startswith(f"--ram {-(-enough // (1 << 30))}G, which holds every expert: decode")
    assert any(text.startswith("a drive of twice the rate") for text in others)


def test_advised_memory_really_holds_every_expert() -> None:
    plan = place_experts(request(ram_bytes=64 << 30, options=EngineOptions()))
    told = int(advise(plan, DESKTOP)[0].split()[1].rstrip("G,"))
    assert sum(place_experts(request(ram_bytes=told << 30)).drive.slots) == 0


def test_more_vram_is_advised_where_it_would_help() -> None:
    texts = advise(place_experts(request()), DESKTOP)
    assert texts[0].startswith("--vram 48G: decode")


def test_a_larger_chunk_is_advised_where_streaming_limits() -> None:
    texts = advise(place_experts(request()), DESKTOP)
    assert any(text.startswith("--chunk 4096: decode") for text in texts)
    options = dataclasses.replace(OPTIONS, prefill_chunk=4096)
    texts = advise(place_experts(request(options=options)), DESKTOP)
    assert not any("--chunk" in text for text in texts)


def test_nothing_is_advised_where_everything_is_in_vram() -> None:
    options = dataclasses.replace(OPTIONS, prefill_chunk=4096)
    plan = place_experts(request(vram_bytes=400 << 30, options=options))
    assert advise(plan, DESKTOP) == ()


def test_kernels_that_limit_are_named() -> None:
    speeds = dataclasses.replace(DESKTOP, experts=14e9, to_card=10e9)
    last = advise(place_experts(request()), speeds)[-1]
    assert last.startswith("experts of type MXFP4 take 5.0 times as long as reading them")


def test_every_limit_has_words() -> None:
    names = ("dense", "exchange", "vram", "cpu", "bus", "drive", "compute")
    assert all(limit_text(name) for name in names)


# ---- a model file ----


def test_model_is_placed_from_its_header() -> None:
    options = EngineOptions(ram_bytes=1 << 30, context=1000)
    found = plan_tiers("random-tiny", options)
    assert found.plan.memory.context == 1000
    assert not found.plan.has_card
    assert found.plan.drive.nbytes == 0
    cost = found.plan.request.cost
    assert dict(cost.block_types) == {"BF16": 4 * 3 * 128 * 64}
    assert sum(cost.dense_types.values()) == cost.dense_weights
    assert set(cost.dense_types) == {"BF16", "F32"}


@pytest.mark.parametrize(
    ("options", "vram"),
    [
        ({}, 31 << 30),
        ({"device": "cpu"}, None),
        ({"device": "cuda:1"}, 31 << 30),
        ({"vram_bytes": 5 << 30}, 5 << 30),
        ({"vram_bytes": 5 << 30, "device": "cpu"}, None),
    ],
    ids=str,
)
def test_card_takes_part_if_it_was_measured_or_given(
    options: dict[str, object], vram: int | None
) -> None:
    chosen = EngineOptions(ram_bytes=1 << 30, **options)  # type: ignore[arg-type]  # by name
    assert plan_tiers("random-tiny", chosen, links=links()).plan.request.vram_bytes == vram


def test_card_that_nothing_is_known_of_is_refused() -> None:
    with pytest.raises(ConfigError, match="--vram"):
        plan_tiers("random-tiny", EngineOptions(device="cuda"))
    assert not plan_tiers("random-tiny", EngineOptions()).plan.has_card


def test_context_and_counts_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="context"):
        plan_tiers("random-tiny", EngineOptions(context=1 << 20))
    with pytest.raises(ConfigError, match="counts"):
        plan_tiers("random-tiny", EngineOptions(), counts=[[1, 2]])


# ---- afterwards ----


def test_run_is_compared_figure_by_figure() -> None:
    prediction = predict(place_experts(request(ram_bytes=64 << 30)), DESKTOP)
    half = prediction.decode.tokens_per_second / 2
    outcome = Outcome(
        decode_tokens_per_second=half,
        prefill_tokens_per_second=100.0,
        prefill_tokens=700,
        hits=(20, 30, 50),
        drive_bytes_per_token=1e9,
    )
    found = {one.name: one for one in compare(prediction, outcome)}
    assert list(found) == [
        "decode tokens/s",
        "prefill tokens/s (predicted for 512 tokens)",
        "share in VRAM",
        "share in RAM",
        "share in the drive",
        "drive bytes per token",
    ]
    assert found["decode tokens/s"].ratio == pytest.approx(0.5)
    assert found["share in RAM"].found == 0.3
    assert found["share in RAM"].predicted == prediction.shares[1]


def test_what_a_run_did_not_do_is_not_compared() -> None:
    prediction = predict(place_experts(request(ram_bytes=HOST_BYTES + ALL_EXPERTS)), DESKTOP)
    assert compare(prediction, Outcome()) == ()
    names = [one.name for one in compare(prediction, Outcome(hits=(3, 1, 0)))]
    assert names == ["share in VRAM", "share in RAM"]
    assert [one.found for one in compare(prediction, Outcome(hits=(0, 0, 0)))] == [0, 0]
    with pytest.raises(ConfigError, match="hits"):
        compare(prediction, Outcome(hits=(-1, 0, 0)))


def test_deviation_reads_well() -> None:
    assert str(Deviation("decode tokens/s", 20.0, 15.0)) == (
        "decode tokens/s 15, predicted 20 (75%)"
    )
    assert str(Deviation("share in VRAM", 0.0, 0.5)) == "share in VRAM 0.5, predicted 0"


def test_needed_bytes_do_not_depend_on_memory_beside_the_card() -> None:
    assert needed_bytes(ram_bytes=1) == needed_bytes()

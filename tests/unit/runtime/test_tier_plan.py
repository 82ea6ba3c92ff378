"""Where experts lie, against figures worked out from the published sizes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from tier_samples import (
    ALL_EXPERTS,
    COST,
    EXPERT,
    OPTIONS,
    WEIGHTS,
    needed_bytes,
    request,
)

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.checkpoint import Checkpoint
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.runtime.memory_plan import GPU_CHUNKS
from edgedsv4.runtime.shipped_models import open_model
from edgedsv4.runtime.synthetic_network import synthetic_config
from edgedsv4.runtime.tier_plan import (
    HOST_BYTES,
    STAGING_EXPERTS,
    TierRequest,
    TokenCost,
    place_experts,
)


def test_experts_fill_what_dense_weights_leave_after_staging() -> None:
    room = (STAGING_EXPERTS + 43 * 128 + 5) * EXPERT
    plan = place_experts(request(vram_bytes=needed_bytes() + room))
    assert plan.vram_staging_bytes == STAGING_EXPERTS * EXPERT
    assert plan.vram.slots == (129,) * 5 + (128,) * 38
    assert plan.vram.nbytes == (43 * 128 + 5) * EXPERT
    assert plan.vram_bytes == needed_bytes() + room


def test_tiers_exclude_each_other_and_hold_everything() -> None:
    plan = place_experts(request(ram_bytes=64 << 30))
    assert {sum(found) for found in zip(*(t.slots for t in plan.tiers), strict=True)} == {256}
    assert sum(tier.nbytes for tier in plan.tiers) == ALL_EXPERTS
    assert sum(tier.share for tier in plan.tiers) == pytest.approx(1)


def test_even_selections_hit_a_tier_as_often_as_it_holds_experts() -> None:
    room = (STAGING_EXPERTS + 43 * 64) * EXPERT
    plan = place_experts(request(vram_bytes=needed_bytes() + room))
    assert plan.vram.share == pytest.approx(0.25)


def test_what_fits_whole_needs_no_staging() -> None:
    plan = place_experts(request(vram_bytes=needed_bytes() + ALL_EXPERTS))
    assert plan.vram.slots == (256,) * 43
    assert (plan.vram_staging_bytes, plan.ram_staging_bytes) == (0, 0)
    assert (plan.ram.nbytes, plan.drive.nbytes) == (0, 0)
    plan = place_experts(request(ram_bytes=HOST_BYTES + ALL_EXPERTS))
    assert (plan.ram_staging_bytes, plan.drive.share) == (0, 0)


def test_without_a_card_memory_holds_dense_weights_too() -> None:
    needed = needed_bytes(vram_bytes=None)
    room = (STAGING_EXPERTS + 43 * 100) * EXPERT
    plan = place_experts(request(vram_bytes=None, ram_bytes=needed + room))
    assert plan.vram.slots == (0,) * 43
    assert plan.ram.slots == (100,) * 43
    assert plan.ram_bytes == needed + room
    assert plan.vram_bytes == 0


def test_small_room_gives_an_eighth_to_staging() -> None:
    room = 160 * EXPERT
    plan = place_experts(request(vram_bytes=needed_bytes() + room))
    assert plan.vram_staging_bytes == room // 8
    assert sum(plan.vram.slots) == 140


def test_room_for_less_than_two_tokens_of_a_layer_holds_nothing() -> None:
    plan = place_experts(request(vram_bytes=needed_bytes() + 12 * EXPERT - 1))
    assert (sum(plan.vram.slots), plan.vram_staging_bytes) == (0, 0)
    assert not place_experts(request(vram_bytes=None, ram_bytes=1)).has_slots_for_a_token
    assert place_experts(request()).has_slots_for_a_token


def test_budget_below_the_dense_weights_does_not_fit() -> None:
    plan = place_experts(request(vram_bytes=1 << 30))
    assert not plan.memory.fits
    assert sum(plan.vram.slots) == 0


def test_layers_of_larger_experts_get_as_many_slots() -> None:
    sizes = (EXPERT,) * 20 + (2 * EXPERT,) * 23
    cost = TokenCost(
        dense_bytes=1,
        dense_weights=1,
        expert_bytes=sizes,
        expert_weights=1,
        block_types={"MXFP4": 1},
    )
    room = 2 * STAGING_EXPERTS * EXPERT + 30 * sum(sizes) + EXPERT
    plan = place_experts(request(cost=cost, vram_bytes=needed_bytes() + room))
    assert plan.vram.slots == (31,) + (30,) * 42


def skewed() -> list[list[int]]:
    """Experts 0 to 3 of every layer have a quarter of the selections each."""
    return [[25, 25, 25, 25] + [0] * 252 for _ in range(43)]


def test_frequent_experts_are_in_the_fastest_tier() -> None:
    room = -(-43 * 3 * EXPERT * 8 // 7)  # less an eighth for staging: three of each layer
    counts = [row[::-1] for row in skewed()]
    plan = place_experts(request(vram_bytes=needed_bytes() + room, counts=counts))
    assert plan.vram.slots == (3,) * 43
    assert [tier.share for tier in plan.tiers] == pytest.approx([0.75, 0.25, 0])


def test_counts_may_be_an_array() -> None:
    array = np.array(skewed(), dtype=np.uint64)
    found = place_experts(request(counts=array))
    assert found.chances == place_experts(request(counts=skewed())).chances
    json.dumps(found.to_json())


def test_layer_nobody_used_counts_as_even() -> None:
    counts = skewed()
    counts[7] = [0] * 256
    plan = place_experts(request(counts=counts))
    assert plan.chances[7] == (6 / 256,) * 256
    assert plan.chances[8][:5] == (1.0, 1.0, 1.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("tokens", "expected"), [(8, 44), (32, 136), (64, 200), (128, 244), (512, 256)]
)
def test_different_experts_of_a_chunk(tokens: int, expected: int) -> None:
    plan = place_experts(request())
    assert round(sum(plan.used(0, tokens))) == expected


@pytest.mark.parametrize(
    ("tokens", "expected"), [(8, 45), (32, 152), (64, 244), (128, 333), (512, 384)]
)
def test_different_experts_of_a_chunk_of_384(tokens: int, expected: int) -> None:
    config = synthetic_config("pro", 2)
    cost = TokenCost(
        dense_bytes=1,
        dense_weights=1,
        expert_bytes=(1, 1),
        expert_weights=1,
        block_types={"MXFP4": 1},
    )
    found = request(config=config, cost=cost, vram_bytes=None)
    assert round(sum(place_experts(found).used(0, tokens))) == expected


def test_card_takes_the_largest_chunk_that_leaves_room() -> None:
    free = EngineOptions(context=4096)
    assert place_experts(request(options=free, vram_bytes=80 << 30)).chunk == GPU_CHUNKS[0]
    assert place_experts(request(options=free, vram_bytes=10 << 30)).chunk < GPU_CHUNKS[0]
    assert place_experts(request(options=free, vram_bytes=1)).chunk == GPU_CHUNKS[-1]
    assert place_experts(request()).chunk == 512
    assert place_experts(request(options=free, vram_bytes=None)).chunk == free.chunk


def test_plan_is_json() -> None:
    found = json.loads(json.dumps(place_experts(request()).to_json(), allow_nan=False))
    assert [tier["name"] for tier in found["tiers"]] == ["vram", "ram", "drive"]
    assert found["expert_bytes_per_token"] == 6 * 43 * EXPERT == 3_449_290_752


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"vram_bytes": 0}, "vram_bytes"),
        ({"vram_bytes": (1 << 50) + 1}, "vram_bytes"),
        ({"ram_bytes": 0}, "ram_bytes"),
        ({"counts": [[1] * 256] * 42}, "counts"),
        ({"counts": [[1] * 255] * 43}, "counts"),
        ({"counts": [[-1] * 256] * 43}, "counts"),
    ],
    ids=["vram-0", "vram-huge", "ram-0", "layers", "experts", "negative"],
)
def test_request_out_of_range_is_refused(change: dict[str, Any], name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        request(**change)
    assert caught.value.name == name


def test_sizes_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match="entry per layer"):
        TierRequest(
            config=synthetic_config("flash", 2),
            weights=WEIGHTS,
            cost=COST,
            options=OPTIONS,
            vram_bytes=None,
            ram_bytes=1,
        )


@pytest.mark.parametrize("name", ["random-tiny", "pocket-v4"])
def test_cost_of_a_file_is_what_its_header_says(name: str) -> None:
    with open_model(name) as checkpoint:
        assert isinstance(checkpoint, Checkpoint)
        bound = bind_weights(checkpoint)
        config = checkpoint.config
        cost = TokenCost.of(bound)
    assert len(cost.expert_bytes) == config.num_layers
    assert cost.expert_weights == 3 * config.hidden_size * config.expert_width
    stored = sum(
        m.nbytes for e in bound.experts[: config.num_layers] for m in (*e.w1, *e.w3, *e.w2)
    )
    assert sum(cost.expert_bytes) * config.num_experts == stored
    assert sum(cost.block_types.values()) == config.num_layers * cost.expert_weights
    assert 0 < cost.dense_weights <= cost.dense_bytes * 8

"""Placements keep their budgets, and nothing gets slower by more memory or a faster link."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tier_samples import DESKTOP, EXPERT, needed_bytes, request

from edgedsv4.runtime.synthetic_network import synthetic_config
from edgedsv4.runtime.tier_plan import HOST_BYTES, TierPlan, TierRequest, TokenCost, place_experts
from edgedsv4.runtime.tier_speed import Speeds, predict

CONFIG = synthetic_config("flash", 3)
SIZES = st.tuples(*[st.integers(1, 2 * EXPERT)] * 3)
ROOM = st.integers(0, 900 * EXPERT)
FASTER = st.sampled_from(
    ["memory", "experts", "products", "drive", "vram", "to_card", "card_products"]
)


def drawn_counts(seed: int) -> list[list[int]]:
    """Selections of skewed experts; drawn by numpy, since lists of hypothesis are slow."""
    draw = np.random.default_rng(seed)
    counts: list[list[int]] = draw.zipf(1.5, (3, 256)).clip(0, 1 << 40).tolist()
    return counts


COUNTS = st.none() | st.integers(0, 1 << 30).map(drawn_counts)


def cost(sizes: tuple[int, int, int]) -> TokenCost:
    return TokenCost(
        dense_bytes=1 << 30,
        dense_weights=1 << 30,
        expert_bytes=sizes,
        expert_weights=3 * 4096 * 2048,
        block_types={"MXFP4": 1},
    )


@functools.cache
def card_needs() -> int:
    return needed_bytes(config=CONFIG, cost=cost((1, 1, 1)))


@functools.cache
def host_needs() -> int:
    return needed_bytes(config=CONFIG, cost=cost((1, 1, 1)), vram_bytes=None)


@st.composite
def requests(draw: st.DrawFn) -> TierRequest:
    has_card = draw(st.booleans())
    fixed = HOST_BYTES if has_card else host_needs()
    return request(
        config=CONFIG,
        cost=cost(draw(SIZES)),
        counts=draw(COUNTS),
        vram_bytes=card_needs() + draw(ROOM) if has_card else None,
        ram_bytes=fixed + draw(ROOM),
    )


def more(plan: TierRequest, name: str, extra: int) -> TierPlan:
    value = getattr(plan, name)
    return place_experts(dataclasses.replace(plan, **{name: value + extra}))


@given(requests())
def test_no_budget_is_exceeded(wanted: TierRequest) -> None:
    plan = place_experts(wanted)
    assert plan.memory.fits
    assert plan.ram_bytes <= wanted.ram_bytes
    assert plan.vram_bytes <= (wanted.vram_bytes or 0)


@given(requests())
def test_every_expert_is_in_one_tier(wanted: TierRequest) -> None:
    plan = place_experts(wanted)
    together = [sum(found) for found in zip(*(tier.slots for tier in plan.tiers), strict=True)]
    assert together == [256] * 3
    assert min(min(tier.slots) for tier in plan.tiers) >= 0
    for layer in range(3):
        assert abs(sum(tier.shares[layer] for tier in plan.tiers) - 1) < 1e-9


@given(requests(), ROOM)
def test_more_memory_never_holds_less(wanted: TierRequest, extra: int) -> None:
    before, after = place_experts(wanted), more(wanted, "ram_bytes", extra)
    assert after.ram.nbytes >= before.ram.nbytes
    assert after.drive.share <= before.drive.share + 1e-12
    if wanted.vram_bytes is not None:
        assert more(wanted, "vram_bytes", extra).vram.share >= before.vram.share - 1e-12


@given(requests(), ROOM)
def test_more_memory_is_never_slower(wanted: TierRequest, extra: int) -> None:
    before = predict(place_experts(wanted), DESKTOP)
    after = predict(more(wanted, "ram_bytes", extra), DESKTOP)
    limit = 1 - 1e-9
    assert after.decode.tokens_per_second >= limit * before.decode.tokens_per_second
    for fast, slow in zip(after.prefill, before.prefill, strict=True):
        assert fast.tokens_per_second >= limit * slow.tokens_per_second


@given(requests(), FASTER, st.floats(1, 100))
def test_faster_link_is_never_slower(wanted: TierRequest, name: str, factor: float) -> None:
    plan = place_experts(wanted)
    faster: Speeds = dataclasses.replace(DESKTOP, **{name: factor * getattr(DESKTOP, name)})
    before, after = predict(plan, DESKTOP), predict(plan, faster)
    limit = 1 - 1e-9
    assert after.decode.tokens_per_second >= limit * before.decode.tokens_per_second
    assert after.prefill[-1].tokens_per_second >= limit * before.prefill[-1].tokens_per_second


@given(requests())
def test_waiting_for_the_slowest_tier_is_never_faster_than_its_average(wanted: TierRequest) -> None:
    found = predict(place_experts(wanted), DESKTOP).decode
    assert found.tokens_per_second <= found.bound_tokens_per_second * (1 + 1e-9)

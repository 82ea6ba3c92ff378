"""Placements of V4-Flash with MXFP4 experts, as the published figures of one have them."""

from __future__ import annotations

import dataclasses
from typing import Any

from edgedsv4.config import EngineOptions, ModelConfig
from edgedsv4.runtime.synthetic_network import synthetic_config
from edgedsv4.runtime.tier_plan import TierPlan, TierRequest, TokenCost, place_experts
from edgedsv4.runtime.tier_speed import Speeds

EXPERT = 13_369_344
"""Bytes of one expert: 3 * 4096 * 2048 weights of 4.25 bits."""
DENSE = 7_900_000_000
FLASH: ModelConfig = synthetic_config("flash")
COST = TokenCost(
    dense_bytes=DENSE,
    dense_weights=7_000_000_000,
    expert_bytes=(EXPERT,) * 43,
    expert_weights=3 * 4096 * 2048,
    block_types={"MXFP4": 43 * 3 * 4096 * 2048},
)
ALL_EXPERTS = 43 * 256 * EXPERT
WEIGHTS = {"attention": DENSE, "routed experts": ALL_EXPERTS}
OPTIONS = EngineOptions(context=4096, prefill_chunk=512)

DESKTOP = Speeds(
    memory=70e9,
    experts=70e9,
    products=1e12,
    drive=12e9,
    vram=1400e9,
    to_card=52e9,
    card_products=1e30,
)
"""An RTX 5090 on PCIe 5, DDR5-6000, an NVMe drive on PCIe 5; products cost nothing."""


def request(**changes: Any) -> TierRequest:
    fields: dict[str, Any] = {
        "config": FLASH,
        "weights": WEIGHTS,
        "cost": COST,
        "options": OPTIONS,
        "vram_bytes": 32 << 30,
        "ram_bytes": 192_000_000_000,
    }
    return TierRequest(**(fields | changes))


def needed_bytes(**changes: Any) -> int:
    """What a card or machine has to have beside experts."""
    return place_experts(request(**changes)).memory.needed_bytes


def with_shares(vram: float, ram: float, drive: float) -> TierPlan:
    """A placement whose tiers are hit as often as told."""
    plan = place_experts(request())
    tiers = {
        tier.name: dataclasses.replace(
            tier, shares=(share,) * 43, slots=((1,) if share else (0,)) * 43
        )
        for tier, share in zip(plan.tiers, (vram, ram, drive), strict=True)
    }
    return dataclasses.replace(plan, **tiers)

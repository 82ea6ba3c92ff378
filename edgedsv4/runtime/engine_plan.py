"""Where the routed experts of an open engine lie, as a plan that speeds are predicted from.

Nothing is decided anew: the card's residents and the store's slots are those that the engine was
given. A store's slots take experts of any layer; each layer is expected to have as many as the
next. Of files that are mapped the system's cache holds what memory has left.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgedsv4.runtime.tier_plan import (
    TierPlan,
    TierRequest,
    place_experts,
    plan_of_slots,
    spread_slots,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edgedsv4.config import EngineOptions, ModelConfig
    from edgedsv4.runtime.backends import BackendChoice
    from edgedsv4.runtime.memory_plan import MemoryPlan
    from edgedsv4.runtime.store_plan import StorePlan
    from edgedsv4.runtime.tier_plan import TokenCost


def plan_of_engine(
    config: ModelConfig,
    cost: TokenCost,
    options: EngineOptions,
    memory: MemoryPlan,
    choice: BackendChoice,
    weights: Mapping[str, int],
) -> TierPlan:
    """The plan of what an engine was given.

    Args:
        config: shape of the model.
        cost: of a token.
        options: of the engine, with the chunk that was chosen.
        memory: the plan that it was opened with.
        choice: what computes, with the card's experts and the store's slots.
        weights: bytes by item of the memory plan.
    """
    is_on_gpu = choice.name == "triton"
    every = (config.num_experts,) * config.num_layers
    card, store = choice.card, choice.store
    vram = every if is_on_gpu else (0,) * config.num_layers
    if card is not None:
        options = replace(options, cpu_experts=card.mode)
        vram = tuple(len(ids) for ids in card.experts.placement.resident[: config.num_layers])
    request = TierRequest(
        config=config,
        weights=weights,
        cost=cost,
        options=options,
        vram_bytes=memory.available_bytes if is_on_gpu else None,
        ram_bytes=max(1, memory.available_bytes),
    )
    rest = tuple(all_of - here for all_of, here in zip(every, vram, strict=True))
    return plan_of_slots(
        request,
        memory,
        options.chunk,
        (vram, _in_memory(request, memory, store, rest)),
        staging_bytes=(
            card.experts.staging_bytes if card is not None else 0,
            store.staging * store.slot_bytes if store is not None else 0,
        ),
        store=store,
    )


def _in_memory(
    request: TierRequest, memory: MemoryPlan, store: StorePlan | None, rest: tuple[int, ...]
) -> tuple[int, ...]:
    """Experts of each layer in main memory."""
    if store is not None:
        return spread_slots(store.slots, rest)
    # Beside a card files are mapped, and it is the system that finds memory for them.
    if request.vram_bytes is not None or memory.experts_fit:
        return rest
    mapped = replace(request, options=replace(request.options, context=memory.context))
    return place_experts(mapped).ram.slots

"""What of a model goes to a card, and with which chunk, before anything is copied.

Everything where it fits; else dense weights and sessions, and of the routed experts what is left.
The larger the chunk the better, and most of all where experts have to travel for each one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from edgedsv4.kernels.native.library import HAVE_NATIVE, WHY_NOT
from edgedsv4.model.native_network import model_obstacle
from edgedsv4.runtime.device_weights import expert_layers
from edgedsv4.runtime.expert_placement import CardExperts, Counts, place_experts, staging_bytes
from edgedsv4.runtime.memory_plan import DEFAULT_CONTEXT, DRAFT, EXPERTS, plan_memory

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, EngineOptions, ModelConfig
    from edgedsv4.model.bound_weights import BoundWeights

GPU_CHUNKS = (4096, 2048, 1024, 512, 256)
"""Tokens evaluated at once on a GPU, the best first: more tokens share each read of an expert."""
STAGING = "passing experts"
"""Item of the memory plan: slots and buffers of experts on their way through the card."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardPlan:
    """A model of which only a part of the experts lives on the card."""

    mode: CpuExperts
    """What the CPU computes."""
    experts: CardExperts
    options: EngineOptions
    """With the chunk that was chosen."""
    weights: dict[str, int]
    """Bytes on the card by item of the memory plan."""
    elsewhere: int
    """Experts that may be asked for in main memory: those that are not on the card, and with `on`
    all of them."""
    elsewhere_bytes: int
    """Of those, as they are stored."""
    counts: Counts | None
    """By which experts were placed; None where they were placed evenly."""
    notes: tuple[str, ...]


def with_gpu_chunk(
    config: ModelConfig, weights: dict[str, int], options: EngineOptions, budget: int
) -> EngineOptions:
    """Options with the largest chunk that leaves room for the context, where none was asked for."""
    if options.prefill_chunk is not None:
        return options
    for size in GPU_CHUNKS:
        chosen = replace(options, prefill_chunk=size)
        if needed_bytes(config, weights, chosen) <= budget:
            return chosen
    return replace(options, prefill_chunk=GPU_CHUNKS[-1])


def needed_bytes(config: ModelConfig, weights: dict[str, int], options: EngineOptions) -> int:
    """Bytes of a model on a card with one session of the context asked for."""
    context = options.context or min(config.max_context, DEFAULT_CONTEXT)
    plan = plan_memory(config, weights, options, available_bytes=0, context=context, on_gpu=True)
    return plan.needed_bytes


def plan_card(
    bound: BoundWeights,
    weights: dict[str, int],
    options: EngineOptions,
    budget: int,
    counts: Counts | None = None,
) -> CardPlan | None:
    """Decide which experts live on the card.

    Args:
        bound: the model's weights.
        weights: bytes by item if everything is on the card.
        options: as asked for.
        budget: bytes of the card.
        counts: how often each expert was selected, [L][E]; None places evenly.

    Returns:
        None where all experts fit and the CPU was not asked to compute them.
    """
    config = bound.config
    whole = with_gpu_chunk(config, weights, options, budget)
    if options.cpu_experts != "on" and needed_bytes(config, weights, whole) <= budget:
        return None
    mode, notes = _mode(bound, options)
    layers = expert_layers(bound, has_draft=options.draft > 0)
    least = config.experts_per_token
    dense = dict(weights)
    dense[EXPERTS] = 0
    if options.draft:
        # The block's experts are placed like those of all layers.
        dense[DRAFT] -= layers[-1].card_bytes * config.num_experts
    smallest = {**dense, STAGING: staging_bytes(layers, least)}
    chosen = with_gpu_chunk(config, smallest, options, budget)
    room = budget - needed_bytes(config, dense, chosen)
    experts = place_experts(layers, config.num_experts, room, least_staged=least, counts=counts)
    split = {**dense, EXPERTS: experts.resident_bytes, STAGING: experts.staging_bytes}
    there = experts.placement.resident if mode != "on" else ((),) * len(layers)
    absent = [config.num_experts - len(ids) for ids in there]
    stored = (count * layer.stored_bytes for count, layer in zip(absent, layers, strict=True))
    return CardPlan(
        mode=mode,
        experts=experts,
        options=chosen,
        weights=split,
        elsewhere=sum(absent),
        elsewhere_bytes=sum(stored),
        counts=counts,
        notes=(*notes, _note(mode, experts)),
    )


def _mode(bound: BoundWeights, options: EngineOptions) -> tuple[CpuExperts, tuple[str, ...]]:
    """What the CPU computes; without kernels that can, nothing, unless it was asked to."""
    matrices = (m for e in bound.experts for m in (*e.w1, *e.w3, *e.w2))
    types = sorted({matrix.block_type.name for matrix in matrices})
    obstacle = model_obstacle(bound.config, types) if HAVE_NATIVE else WHY_NOT
    if obstacle is None or options.cpu_experts != "auto":
        return options.cpu_experts, ()
    return "off", (f"routed experts pass through the card, which is slow: {obstacle}",)


def _note(mode: CpuExperts, experts: CardExperts) -> str:
    elsewhere = {
        "auto": "the CPU computes the others",
        "on": "they serve long prompts, and the CPU computes all experts of a reply",
        "off": "the others pass through it",
    }
    return (
        f"{experts.resident:,} of {experts.total:,} routed experts live on the card"
        f" ({experts.resident_bytes:,} bytes); {elsewhere[mode]}"
    )

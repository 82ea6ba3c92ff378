"""What to expect of a random network before it is measured: the plan of exactly its placement.

Sizes come from the outline of the network that is built, and which experts lie where from the same
placement; the rates are those of `links`, measured in the same process unless they are given. Then
every reading is held against its prediction.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgedsv4.config import EngineOptions
from edgedsv4.errors import ConfigError
from edgedsv4.runtime.link_bench import LinkOptions, Progress, measure_links
from edgedsv4.runtime.memory_plan import EXPERTS, plan_memory
from edgedsv4.runtime.synthetic_hybrid import expert_sizes
from edgedsv4.runtime.synthetic_network import EXPERT_TYPES, network_outline
from edgedsv4.runtime.synthetic_traffic import network_bytes, operations_per_token
from edgedsv4.runtime.tier_plan import TierPlan, TierRequest, TokenCost, plan_of_slots
from edgedsv4.runtime.tier_rates import speeds_of
from edgedsv4.runtime.tier_report import Deviation, Outcome, compare
from edgedsv4.runtime.tier_speed import Prediction, predict, unknown_rates

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.runtime.expert_placement import CardExperts
    from edgedsv4.runtime.links import Links
    from edgedsv4.runtime.synthetic_options import SyntheticOptions
    from edgedsv4.runtime.synthetic_report import SyntheticReading

_MEMORY_BYTES = 6 << 30
_RUN_SECONDS = 0.05


def synthetic_cost(config: ModelConfig, options: SyntheticOptions) -> TokenCost:
    """What a token of a random network reads and multiplies."""
    types = EXPERT_TYPES[options.experts]
    outline = network_outline(config, types)
    apart = [outline.embed, *(layer.experts for layer in outline.layers)]
    each = config.expert_width * config.hidden_size
    elements: dict[str, int] = {}
    for name, count in ((types.gate_up, 2), (types.down, 1)):
        elements[name] = elements.get(name, 0) + count * each * config.num_layers
    routed = 3 * each * config.experts_per_token * config.num_layers
    return TokenCost(
        dense_bytes=network_bytes(outline) - sum(network_bytes(part) for part in apart),
        dense_weights=operations_per_token(config, outline) // 2 - routed,
        expert_bytes=tuple(size.stored_bytes for size in expert_sizes(config, types)),
        expert_weights=3 * each,
        block_types=elements,
    )


def synthetic_plan(
    config: ModelConfig, options: SyntheticOptions, chosen: CardExperts | None
) -> TierPlan:
    """The plan of a random network.

    Args:
        config: its shape.
        options: what is built and run.
        chosen: the experts on the card; None: all of them.
    """
    cost = synthetic_cost(config, options)
    vram = (config.num_experts,) * config.num_layers
    if chosen is not None:
        vram = tuple(len(ids) for ids in chosen.placement.resident)
    context, chunk = options.capacity_in(config), max(options.prompts, default=1)
    engine = EngineOptions(cpu_experts=options.cpu_experts or "auto")
    experts = sum(size * config.num_experts for size in cost.expert_bytes)
    weights = {"dense weights": cost.dense_bytes, EXPERTS: experts}
    request = TierRequest(
        config=config,
        weights=weights,
        cost=cost,
        options=engine,
        vram_bytes=max(1, options.vram_bytes or experts),
        ram_bytes=max(1, experts),
    )
    memory = plan_memory(
        config, weights, engine, available_bytes=experts, context=context, on_gpu=True
    )
    ram = tuple(config.num_experts - count for count in vram)
    return plan_of_slots(request, memory, chunk, (vram, ram))


def needed_links(config: ModelConfig, options: SyntheticOptions, report: Progress) -> Links:
    """Measure what a prediction of a random network rests on; some seconds.

    Raises:
        As `measure_links`.
    """
    types = tuple(sorted(synthetic_cost(config, options).block_types))
    return measure_links(
        LinkOptions(
            types=types,
            threads=options.expert_threads,
            device=options.device,
            run_seconds=_RUN_SECONDS,
            memory_bytes=_MEMORY_BYTES,
            is_thorough=False,
        ),
        on_progress=report,
    )


@dataclass(frozen=True, slots=True)
class Expectation:
    """What is expected of each reading."""

    decode: tuple[tuple[int, Prediction], ...]
    """By depth."""
    prefill: Prediction
    """Of all prompts."""

    @classmethod
    def of(cls, plan: TierPlan, options: SyntheticOptions, links: Links) -> Expectation:
        """Predict every reading of a measurement.

        Raises:
            ConfigError: figures are missing.
        """
        speeds = speeds_of(links, plan.request.cost.block_types, None, has_card=True)
        missing = unknown_rates(plan, speeds)
        if missing:
            raise ConfigError(
                f"the links do not tell {', '.join(missing)}; measure them with `edgedsv4 bench"
                f" links --types {','.join(sorted(plan.request.cost.block_types))}`"
            )
        depths = options.depths_in(plan.request.config)
        prompts = options.prompts
        return cls(
            tuple((depth, predict(plan, speeds, depth=depth)) for depth in depths),
            predict(plan, speeds, prompts=prompts),
        )

    def deviation(self, reading: SyntheticReading) -> Deviation | None:
        """A reading beside its prediction; None where nothing was expected of it."""
        if reading.work == "decode":
            for depth, prediction in self.decode:
                if depth == reading.depth:
                    outcome = Outcome(decode_tokens_per_second=reading.rate)
                    return compare(prediction, outcome)[0]
            return None
        outcome = Outcome(prefill_tokens_per_second=reading.rate, prefill_tokens=reading.tokens)
        return compare(self.prefill, outcome)[0]

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "decode": [
                {"depth": depth, **_decode_json(prediction)} for depth, prediction in self.decode
            ],
            "prefill": self.prefill.to_json()["prefill"],
            "shares": self.prefill.to_json()["shares"],
        }


def _decode_json(prediction: Prediction) -> dict[str, object]:
    found = prediction.to_json()["decode"]
    return found if isinstance(found, dict) else {}

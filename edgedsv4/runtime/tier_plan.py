"""Where the routed experts of a model lie: in a card's memory, in main memory, or on the drive.

Pure arithmetic: no torch, no file, no look at the machine. Dense weights, state and working memory
come first, on the card where there is one; what they leave of its budget holds experts, then main
memory does, and the rest stays in the file. The tiers exclude each other. Each layer gets as many
slots as the next, since each layer is waited for alone; the most frequent experts of a layer go
into the fastest tier. Without counts every expert is taken to be as likely as another, which real
texts are not: a cache that follows the text hits more often than this plan says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

from edgedsv4.errors import ConfigError
from edgedsv4.runtime.memory_plan import EXPERTS, GPU_CHUNKS, MemoryPlan, PlanItem, plan_memory
from edgedsv4.runtime.token_bytes import TokenBytes

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions, ModelConfig
    from edgedsv4.model.bound_weights import BoundWeights
    from edgedsv4.runtime.store_plan import StorePlan

STAGING_EXPERTS = 64
"""Experts on their way from a slower tier: one half is filled while the other is used."""
STAGING_SHARE = 8
"""One part of so many of the room for experts may be spent on staging."""
HOST_BYTES = 1 << 30
"""Main memory of the process itself where a card computes: interpreter, libraries, driver."""
WORKSPACE_SHARE = 4
"""One part of so many of what dense weights leave on a card may be working memory."""
_MOST_BYTES = 1 << 50
_OF_FEW = ("embed", ".tid2eid", "head")
"""Roles of which a token needs a row, or of which only the last token of a chunk needs any."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCost:
    """What one token reads and multiplies; all sizes from the header of a file."""

    dense_bytes: int
    """Every weight but routed experts and the MTP block, once."""
    dense_weights: int
    """Elements of them that every token of a chunk is multiplied with: all but the head's."""
    expert_bytes: tuple[int, ...]
    """Of one routed expert, by layer."""
    expert_weights: int
    """Elements of one routed expert."""
    block_types: Mapping[str, int]
    """Elements by storage type, of one expert of each layer."""
    dense_types: Mapping[str, int] = field(default_factory=dict)
    """Elements of the dense weights by storage type; empty where a card has them."""

    @classmethod
    def of(cls, bound: BoundWeights) -> TokenCost:
        """Count the weights of a model."""
        config = bound.config
        dense: dict[str, int] = {}
        for role, tensor in bound.tensors.items():
            if not role.startswith("draft.") and not role.endswith(_OF_FEW):
                rows = 1
                for size in tensor.shape[:-1]:
                    rows *= size
                kind = tensor.block_type.name
                dense[kind] = dense.get(kind, 0) + rows * tensor.columns
        sizes, types = [], dict[str, int]()
        per_matrix = config.hidden_size * config.expert_width
        for experts in bound.experts[: config.num_layers]:
            matrices = (*experts.w1, *experts.w3, *experts.w2)
            sizes.append(-(-sum(matrix.nbytes for matrix in matrices) // config.num_experts))
            for stack in (experts.w1, experts.w3, experts.w2):
                name = stack[0].block_type.name
                types[name] = types.get(name, 0) + per_matrix
        return cls(
            dense_bytes=TokenBytes.of(bound).dense_weights,
            dense_weights=sum(dense.values()),
            expert_bytes=tuple(sizes),
            expert_weights=3 * per_matrix,
            block_types=types,
            dense_types=dense,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TierRequest:
    """Everything that a placement follows from."""

    config: ModelConfig
    weights: Mapping[str, int]
    """Bytes by item of the memory plan (`weight_items`)."""
    cost: TokenCost
    options: EngineOptions
    """Context, profile, chunk and drafts count."""
    vram_bytes: int | None
    """Budget on the card, 1..2^50; None without a card."""
    ram_bytes: int
    """Budget in main memory, 1..2^50."""
    counts: Sequence[Sequence[int]] | None = None
    """How often each expert was selected, [layers][experts]; None takes all as equally likely."""

    def __post_init__(self) -> None:
        for name in ("vram_bytes", "ram_bytes"):
            value = getattr(self, name)
            if value is not None and not 1 <= value <= _MOST_BYTES:
                raise ConfigError(f"{name} must be 1..2^50 bytes, found {value}", name=name)
        if len(self.cost.expert_bytes) != self.config.num_layers:
            raise ConfigError(
                f"expert_bytes needs an entry per layer ({self.config.num_layers}), found"
                f" {len(self.cost.expert_bytes)}"
            )
        if self.counts is not None:
            self._check_counts(self.counts)

    def _check_counts(self, counts: Sequence[Sequence[int]]) -> None:
        layers, experts = self.config.num_layers, self.config.num_experts
        if len(counts) != layers or any(len(row) != experts for row in counts):
            found = sorted({len(row) for row in counts})
            raise ConfigError(
                f"counts must be [{layers}][{experts}], found {len(counts)} layers of {found}"
                " experts; is the frequency file of another model?",
                name="counts",
            )
        if any(count < 0 for row in counts for count in row):
            raise ConfigError("counts must be numbers >= 0, found a negative one", name="counts")


@dataclass(frozen=True, slots=True)
class Tier:
    """One place for experts."""

    name: str
    """`vram`, `ram` or `drive`."""
    slots: tuple[int, ...]
    """Experts of each layer that lie there."""
    nbytes: int
    shares: tuple[float, ...]
    """Of the selections of each layer, those that find their expert there."""

    @property
    def share(self) -> float:
        """Of all selections; 0 of a model without layers."""
        return sum(self.shares) / max(1, len(self.shares))

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "name": self.name,
            "experts": sum(self.slots),
            "bytes": self.nbytes,
            "share": self.share,
            "slots_per_layer": list(self.slots),
        }


@dataclass(frozen=True, kw_only=True)
class TierPlan:
    """Where everything lies."""

    request: TierRequest
    memory: MemoryPlan
    """Of the memory that dense weights and state are in: the card's where there is one."""
    chunk: int
    """Tokens evaluated at once in prefill."""
    vram: Tier
    ram: Tier
    drive: Tier
    vram_staging_bytes: int
    ram_staging_bytes: int
    chances: tuple[tuple[float, ...], ...]
    """[layers][experts] probability that a token uses the expert, the likeliest first."""
    store: StorePlan | None = None
    """Of the experts in main memory, whose lines `memory` then has; None where files are mapped."""

    @property
    def has_card(self) -> bool:
        """Whether a card computes."""
        return self.request.vram_bytes is not None

    @property
    def tiers(self) -> tuple[Tier, Tier, Tier]:
        """The fastest first."""
        return self.vram, self.ram, self.drive

    @property
    def vram_bytes(self) -> int:
        """Planned on the card, experts and staging included; 0 without one."""
        if not self.has_card:
            return 0
        return self.memory.needed_bytes + self.vram_staging_bytes + self.vram.nbytes

    @property
    def ram_bytes(self) -> int:
        """Planned in main memory, experts and staging included."""
        fixed = HOST_BYTES if self.has_card else self.memory.needed_bytes
        if self.store is not None and not self.has_card:
            return fixed
        return fixed + self.ram_staging_bytes + self.ram.nbytes

    @property
    def has_slots_for_a_token(self) -> bool:
        """Whether every layer can hold what one token uses, above the drive or in all."""
        needed = self.request.config.experts_per_token
        pairs = zip(self.vram.slots, self.ram.slots, strict=True)
        return all(fast + slow >= needed for fast, slow in pairs)

    @cached_property
    def bytes_per_token(self) -> int:
        """Routed experts that one token uses, of all layers."""
        return self.request.config.experts_per_token * sum(self.request.cost.expert_bytes)

    def used(self, layer: int, tokens: int) -> tuple[float, float, float]:
        """Different experts that so many tokens use, by tier, as they are expected.

        An expert of chance p is used by at least one of T tokens with probability 1 - (1 - p)^T.
        """
        chances, found, first = self.chances[layer], [], 0
        for tier in self.tiers:
            last = first + tier.slots[layer]
            found.append(sum(1 - (1 - chance) ** tokens for chance in chances[first:last]))
            first = last
        return found[0], found[1], found[2]

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "chunk": self.chunk,
            "vram_bytes": self.vram_bytes,
            "ram_bytes": self.ram_bytes,
            "vram_staging_bytes": self.vram_staging_bytes,
            "ram_staging_bytes": self.ram_staging_bytes,
            "expert_bytes_per_token": self.bytes_per_token,
            "tiers": [tier.to_json() for tier in self.tiers],
        }


def place_experts(request: TierRequest) -> TierPlan:
    """Place dense weights, state and experts within the budgets.

    A plan whose dense part does not fit has no experts in that memory; `TierPlan.memory` says so.
    """
    config, sizes = request.config, request.cost.expert_bytes
    memory, chunk = _dense_plan(request)
    left = max(0, memory.available_bytes - memory.needed_bytes)
    all_slots = (config.num_experts,) * config.num_layers
    vram, vram_staging, ram_room = (0,) * config.num_layers, 0, left
    if request.vram_bytes is not None:
        vram, vram_staging = _fill(left, sizes, all_slots, config.experts_per_token)
        ram_room = max(0, request.ram_bytes - HOST_BYTES)
    rest = tuple(config.num_experts - count for count in vram)
    ram, ram_staging = _fill(ram_room, sizes, rest, config.experts_per_token)
    return plan_of_slots(
        request, memory, chunk, (vram, ram), staging_bytes=(vram_staging, ram_staging)
    )


def plan_of_slots(
    request: TierRequest,
    memory: MemoryPlan,
    chunk: int,
    slots: tuple[tuple[int, ...], tuple[int, ...]],
    *,
    staging_bytes: tuple[int, int] = (0, 0),
    store: StorePlan | None = None,
) -> TierPlan:
    """The plan of a placement that was decided elsewhere.

    Args:
        request: what it follows from; its budgets are not looked at.
        memory: of everything but experts.
        chunk: tokens evaluated at once in prefill.
        slots: experts of each layer on the card, and in main memory; the rest is on the drive.
        staging_bytes: on the card and in main memory.
        store: that the experts in main memory are in.
    """
    (vram, ram), sizes = slots, request.cost.expert_bytes
    none = (0,) * request.config.num_layers
    held = tuple(a + b for a, b in zip(vram, ram, strict=True))
    drive = tuple(request.config.num_experts - count for count in held)
    chances = _chances(request)
    starts = (none, vram, held)
    tiers = [
        Tier(
            name,
            held_here,
            sum(count * size for count, size in zip(held_here, sizes, strict=True)),
            _shares(chances, start, held_here),
        )
        for name, start, held_here in zip(
            ("vram", "ram", "drive"), starts, (vram, ram, drive), strict=True
        )
    ]
    return TierPlan(
        request=request,
        memory=memory,
        chunk=chunk,
        vram=tiers[0],
        ram=tiers[1],
        drive=tiers[2],
        vram_staging_bytes=staging_bytes[0],
        ram_staging_bytes=staging_bytes[1],
        chances=chances,
        store=store,
    )


def spread_slots(slots: int, most: Sequence[int]) -> tuple[int, ...]:
    """Slots for any expert, as experts of each layer that are expected in them.

    Args:
        slots: in all.
        most: experts of each layer that may be there.
    """
    return _spread(slots, (1,) * len(most), most)


def with_store(plan: TierPlan, memory: MemoryPlan, store: StorePlan) -> TierPlan:
    """A plan whose experts outside the card's memory are in a store."""
    rest = [plan.request.config.num_experts - count for count in plan.vram.slots]
    return plan_of_slots(
        plan.request,
        memory,
        plan.chunk,
        (plan.vram.slots, spread_slots(store.slots, rest)),
        staging_bytes=(plan.vram_staging_bytes, store.staging * store.slot_bytes),
        store=store,
    )


def _dense_plan(request: TierRequest) -> tuple[MemoryPlan, int]:
    """(plan of everything but experts, chunk), where that is computed."""
    options, budget = request.options, request.vram_bytes
    if budget is None:
        plan = _planned(request, options, request.ram_bytes)
        return plan, options.chunk
    if options.prefill_chunk is not None:
        return _planned(request, options, budget), options.prefill_chunk
    dense = sum(nbytes for name, nbytes in request.weights.items() if name != EXPERTS)
    most = max(0, budget - dense) // WORKSPACE_SHARE
    for chunk in GPU_CHUNKS:
        plan = _planned(request, replace(options, prefill_chunk=chunk), budget)
        workspace = next(item.nbytes for item in plan.items if item.name == "workspace")
        if plan.fits and workspace <= most:
            break
    return plan, chunk


def _planned(request: TierRequest, options: EngineOptions, budget: int) -> MemoryPlan:
    """The memory plan, with the experts as bytes that may be elsewhere."""
    weights = {name: nbytes for name, nbytes in request.weights.items() if name != EXPERTS}
    plan = plan_memory(
        request.config,
        weights,
        options,
        available_bytes=budget,
        context=options.context,
        on_gpu=request.vram_bytes is not None,
    )
    items = [item for item in plan.items if item.name != EXPERTS]
    experts = PlanItem(EXPERTS, request.weights.get(EXPERTS, 0), is_required=False)
    return replace(plan, items=(*items, experts))


def _fill(
    room: int, sizes: Sequence[int], most: Sequence[int], per_token: int
) -> tuple[tuple[int, ...], int]:
    """(experts of each layer that a memory holds, bytes of staging); none where all of them fit."""
    if sum(count * size for count, size in zip(most, sizes, strict=True)) <= room:
        return tuple(most), 0
    largest = max(sizes)
    wanted = min(STAGING_EXPERTS * largest, room // STAGING_SHARE)
    least = 2 * per_token * largest  # two tokens' worth of a layer, or streaming would stand still
    staging = max(wanted, least)
    if staging > room:
        return (0,) * len(sizes), 0
    return _spread(room - staging, sizes, most), staging


def _spread(room: int, sizes: Sequence[int], most: Sequence[int]) -> tuple[int, ...]:
    """Experts of each layer: as many of each as fit, then one more from the first layer on."""
    found = [0] * len(sizes)
    while True:
        growing = [layer for layer, count in enumerate(found) if count < most[layer]]
        together = sum(sizes[layer] for layer in growing)
        rounds = min((most[layer] - found[layer] for layer in growing), default=0)
        rounds = min(rounds, room // together) if together else 0
        if not rounds:
            break
        for layer in growing:
            found[layer] += rounds
        room -= rounds * together
    for layer in growing:
        # No smaller one instead of it: with more room there are then never fewer experts.
        if sizes[layer] > room:
            break
        found[layer] += 1
        room -= sizes[layer]
    return tuple(found)


def _chances(request: TierRequest) -> tuple[tuple[float, ...], ...]:
    """[layers][experts] chance of each expert to be used by a token, the likeliest first."""
    config = request.config
    even = (config.experts_per_token / config.num_experts,) * config.num_experts
    if request.counts is None:
        return (even,) * config.num_layers
    return tuple(
        even if sum(row) == 0 else _row_chances(row, config.experts_per_token)
        for row in request.counts
    )


def _row_chances(row: Sequence[int], per_token: int) -> tuple[float, ...]:
    """Chances of a layer's experts; their sum is that of the selections, but none exceeds 1."""
    total = sum(row)
    return tuple(min(1.0, per_token * count / total) for count in sorted(row, reverse=True))


def _shares(
    chances: Sequence[Sequence[float]], start: Sequence[int], slots: Sequence[int]
) -> tuple[float, ...]:
    """Of each layer's selections, those of the experts from `start` on."""
    found = []
    for row, first, count in zip(chances, start, slots, strict=True):
        sums = list(accumulate(row, initial=0.0))
        found.append((sums[first + count] - sums[first]) / sums[-1])
    return tuple(found)

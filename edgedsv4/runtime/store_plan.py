"""How many routed experts stay in memory when not all do: arithmetic before anything is opened.

The store gets what the budget has left beside everything else and a second session of the planned
size (a saved session is loaded beside the live one). Beside a card there is nothing else in main
memory but the process itself and buffers for copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from edgedsv4.errors import BackendUnavailableError, CapacityError
from edgedsv4.formats.range_reader import HAVE_READER, LARGEST_ALIGNMENT, WHY_NO_READER
from edgedsv4.runtime.memory_plan import MemoryPlan, StateLayout, plan_memory

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np
    import numpy.typing as npt

    from edgedsv4.config import EngineOptions, ModelConfig
    from edgedsv4.formats.next_pairs import NextPairs
    from edgedsv4.model.bound_weights import BoundExperts
    from edgedsv4.runtime.slot_filler import Verification

BANK = "expert bank"
STAGING = "expert staging"
LEAST_STAGING, MOST_STAGING = 2, 64
PAGE = 4096


@dataclass(frozen=True, slots=True)
class StorePlan:
    """Sizes of an expert store."""

    slots: int
    """Experts that stay in memory."""
    staging: int
    """Further slots, for experts that only pass through."""
    slot_bytes: int
    total: int
    """Routed experts of the model."""
    prior: npt.NDArray[np.float64] | None = field(default=None, compare=False, repr=False)
    """[layers, experts], uses per token in a corpus."""
    pairs: NextPairs | None = field(default=None, compare=False, repr=False)
    """Which experts follow which in a corpus."""
    verification: Verification | None = field(default=None, compare=False, repr=False)
    """Compares what is read with checksums."""

    is_elsewhere: Callable[[int, int], bool] = field(
        default=lambda _layer, _expert: False, compare=False, repr=False
    )
    """Whether a (layer, expert) is on a card, and never asked for."""

    @property
    def nbytes(self) -> int:
        """Memory of all slots."""
        return (self.slots + self.staging) * self.slot_bytes

    def to_json(self) -> dict[str, object]:
        """As JSON types."""
        return {
            "slots": self.slots,
            "staging_slots": self.staging,
            "slot_bytes": self.slot_bytes,
            "experts": self.total,
            "bytes": self.nbytes,
        }

    def items(self) -> dict[str, int]:
        """Lines of the memory plan."""
        return {BANK: self.slots * self.slot_bytes, STAGING: self.staging * self.slot_bytes}


def largest_object_bytes(experts: Sequence[BoundExperts], alignment: int) -> int:
    """Bytes that any expert fits into, wherever it lies, when reads are aligned to `alignment`."""
    largest = 0
    for layer in experts:
        for expert_id in range(layer.count if layer.form is None else 1):
            sizes = (extent.nbytes for extent in layer.extents(expert_id))
            widened = sum(-(-(size + alignment - 1) // alignment) * alignment for size in sizes)
            largest = max(largest, widened)
    return largest


def padded(nbytes: int) -> int:
    """Bytes of a slot for an object of so many."""
    return -(-nbytes // PAGE) * PAGE


def store_obstacle(experts: Sequence[BoundExperts]) -> str | None:
    """Why a store cannot read a model's experts, as the end of a sentence; None if it can."""
    if not HAVE_READER:
        return WHY_NO_READER
    if not all(layer.has_extents for layer in experts):
        return "its experts are no whole rows of stored tensors"
    return None


def plan_store(
    config: ModelConfig,
    weights: Mapping[str, int],
    options: EngineOptions,
    experts: Sequence[BoundExperts],
    available_bytes: int,
) -> tuple[StorePlan, MemoryPlan]:
    """Sizes of a store, and the memory plan with it.

    Args:
        config: shape of the model.
        weights: bytes by item, without a store.
        options: of the engine.
        experts: by layer.
        available_bytes: the memory budget.

    Raises:
        CapacityError: the budget does not hold the experts of one token beside everything else, or
            not as many as `expert_ram_bytes` says.
        BackendUnavailableError: the experts cannot be read by a store.
    """
    least = _least(config, experts)

    def planned(store: StorePlan, context: int | None) -> MemoryPlan:
        items = {**weights, **store.items()}
        return plan_memory(config, items, options, available_bytes=available_bytes, context=context)

    smallest = planned(least, options.context)
    if options.expert_ram_bytes is not None and options.expert_ram_bytes < least.nbytes:
        raise CapacityError(
            f"expert_ram_bytes must hold {least.slots + least.staging} experts",
            needed_bytes=least.nbytes,
            available_bytes=options.expert_ram_bytes,
        )
    if not smallest.fits:
        return least, smallest
    layout = StateLayout(config, options.profile, options.dtype, options.draft)
    spare = smallest.available_bytes - smallest.needed_bytes - layout.state_bytes(smallest.context)
    room = least.nbytes + max(0, spare)
    if options.expert_ram_bytes is not None:
        room = _asked_room(options.expert_ram_bytes, least, smallest)
    store = _split(room // least.slot_bytes, least)
    return store, planned(store, smallest.context)


def plan_card_store(
    config: ModelConfig,
    options: EngineOptions,
    experts: Sequence[BoundExperts],
    available_bytes: int,
    wanted: int,
) -> StorePlan:
    """Sizes of a store beside a card.

    Args:
        config: shape of the model.
        options: of the engine.
        experts: by layer.
        available_bytes: main memory for experts.
        wanted: experts that may be asked for, those that do not live on the card.

    Raises:
        CapacityError: it does not hold the experts of one token, or not what `expert_ram_bytes`
            asks for, or that is less.
        BackendUnavailableError: the experts cannot be read by a store.
    """
    least = _least(config, experts)
    room, what = available_bytes, "the experts of one token in main memory"
    asked = options.expert_ram_bytes
    if asked is not None and asked > available_bytes:
        raise CapacityError(
            "the experts that expert_ram_bytes asks for do not fit into main memory",
            needed_bytes=asked,
            available_bytes=available_bytes,
        )
    if asked is not None:
        room, what = asked, f"expert_ram_bytes must hold {least.slots + least.staging} experts"
    if room < least.nbytes:
        raise CapacityError(what, needed_bytes=least.nbytes, available_bytes=max(0, room))
    found = _split(room // least.slot_bytes, replace(least, total=max(wanted, least.slots)))
    return replace(found, total=least.total)


def _least(config: ModelConfig, experts: Sequence[BoundExperts]) -> StorePlan:
    """The smallest store of a model."""
    obstacle = store_obstacle(experts)
    if obstacle is not None:
        raise BackendUnavailableError(f"the experts cannot be kept in a store: {obstacle}")
    slot_bytes = padded(largest_object_bytes(experts, LARGEST_ALIGNMENT))
    total = sum(layer.count for layer in experts)
    return StorePlan(config.experts_per_token, LEAST_STAGING, slot_bytes, total)


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """Whether routed experts get a store."""

    store: StorePlan | None
    """None where they stay mapped."""
    memory: MemoryPlan
    """With the store's lines; what it was without one."""
    why: str
    """Why they stay mapped although they do not fit, as a sentence; else empty."""


def choose_store(
    config: ModelConfig,
    weights: Mapping[str, int],
    options: EngineOptions,
    experts: Sequence[BoundExperts],
    memory: MemoryPlan,
) -> StoreChoice:
    """Decide where the routed experts of a model on the CPU are used, as opening does.

    Args:
        config: shape of the model.
        weights: bytes by item, without a store.
        options: of the engine.
        experts: by layer.
        memory: the plan without a store.

    Returns:
        A choice whose memory does not fit where a store was asked for and has no room.

    Raises:
        CapacityError: `expert_ram_bytes` holds too little, or does not fit beside the rest.
        BackendUnavailableError: a store was asked for, and cannot read the experts.
    """
    is_asked = options.expert_place == "stored"
    if options.expert_place == "mapped" or (not is_asked and memory.experts_fit):
        return StoreChoice(None, memory, "")
    obstacle = store_obstacle(experts)
    if not is_asked and obstacle is not None:
        why = f"the routed experts do not fit in memory, and stay mapped: {obstacle}"
        return StoreChoice(None, memory, why)
    store, stored = plan_store(config, weights, options, experts, memory.available_bytes)
    if stored.fits or is_asked:
        return StoreChoice(store, stored, "")
    why = (
        "the routed experts do not fit in memory, and stay mapped: with those of one token in"
        f" slots {stored.needed_bytes:,} bytes are needed, {stored.available_bytes:,} are available"
    )
    return StoreChoice(None, memory, why)


def _asked_room(asked: int, least: StorePlan, smallest: MemoryPlan) -> int:
    most = least.nbytes + smallest.available_bytes - smallest.needed_bytes
    if asked > most:
        raise CapacityError(
            "the experts that expert_ram_bytes asks for do not fit beside the rest",
            needed_bytes=asked,
            available_bytes=most,
        )
    return asked


def _split(count: int, least: StorePlan) -> StorePlan:
    if count >= least.total + LEAST_STAGING:
        return StorePlan(least.total, LEAST_STAGING, least.slot_bytes, least.total)
    staging = min(MOST_STAGING, max(LEAST_STAGING, count // 8))
    slots = max(least.slots, min(count - staging, least.total))
    return StorePlan(slots, staging, least.slot_bytes, least.total)

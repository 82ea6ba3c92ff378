"""Parts of opening a model: threads, memory plan, tokenizer, and what a user should know."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from edgedsv4.config import EngineOptions
from edgedsv4.errors import BackendUnavailableError, CapacityError, ConfigError
from edgedsv4.formats.expert_frequency import read_expert_frequency
from edgedsv4.runtime.backends import BackendChoice, choose_backend
from edgedsv4.runtime.card_plan import plan_card, with_gpu_chunk
from edgedsv4.runtime.device import (
    engine_device,
    memory_budget,
    unused_budget,
    unused_expert_options,
)
from edgedsv4.runtime.device_weights import device_weight_items
from edgedsv4.runtime.host import physical_cores
from edgedsv4.runtime.memory_plan import (
    EXPERTS,
    MemoryPlan,
    plan_memory,
    weight_items,
)
from edgedsv4.runtime.shipped_models import SHIPPED_MODELS
from edgedsv4.runtime.slot_filler import SAMPLE, Verification
from edgedsv4.runtime.store_plan import (
    BANK,
    STAGING,
    choose_store,
    plan_card_store,
)
from edgedsv4.runtime.tier_plan import HOST_BYTES
from edgedsv4.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from edgedsv4.formats.checkpoint import Checkpoint
    from edgedsv4.formats.expert_frequency import ExpertFrequency
    from edgedsv4.model.bound_weights import BoundWeights
    from edgedsv4.runtime.card_plan import CardPlan
    from edgedsv4.runtime.store_plan import StorePlan


logger = logging.getLogger(__name__)

ONE_THREAD_BYTES = 16 << 20
"""Dense weights below which a second thread waits longer than it works: a decode step of a 3 MB
model takes 27 ms with one thread and, when anything else runs on the machine, 20 times that with
two."""


def use_threads(options: EngineOptions, weights: dict[str, int], choice: BackendChoice) -> int:
    """Threads of an engine; where torch computes they become torch's."""
    threads = options.threads or _default_threads(weights)
    if choice.name == "reference":
        torch.set_num_threads(threads)
    return threads


def _default_threads(weights: dict[str, int]) -> int:
    """Threads for a model of these weights, when nobody asks for a number."""
    elsewhere = (EXPERTS, BANK, STAGING)
    dense = sum(nbytes for name, nbytes in weights.items() if name not in elsewhere)
    return 1 if dense < ONE_THREAD_BYTES else physical_cores()


def weight_bytes(bound: BoundWeights) -> dict[str, int]:
    """Bytes by item of the memory plan, from the roles of the weights."""
    sizes = [(role, tensor.nbytes) for role, tensor in bound.tensors.items()]
    for layer, experts in enumerate(bound.experts):
        place = "draft" if layer == bound.config.num_layers else f"layers.{layer}"
        matrices = (*experts.w1, *experts.w3, *experts.w2)
        sizes += [(f"{place}.ffn.experts.w", matrix.nbytes) for matrix in matrices]
    return weight_items(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """Where a model is computed, by what, and with how much memory."""

    device: torch.device
    options: EngineOptions
    """With the chunk that was chosen."""
    choice: BackendChoice
    weights: dict[str, int]
    """Bytes by item of the memory plan."""
    plan: MemoryPlan
    notes: tuple[str, ...]


def place(checkpoint: Checkpoint, bound: BoundWeights, options: EngineOptions) -> Placement:
    """Decide where a model runs; with the device `auto` on the CPU if no card can hold it.

    Raises:
        ConfigError: a context beyond the model's own.
        CapacityError: it does not fit.
        BackendUnavailableError: a device or backend that cannot run it.
    """
    device = engine_device(options)
    if device.type == "cpu" and options.cpu_experts == "off":
        raise BackendUnavailableError(
            "cpu_experts 'off' keeps routed experts off the CPU, but the model is computed there;"
            " choose a GPU with device (--device cuda), or 'auto'"
        )
    try:
        return _place_on(device, checkpoint, bound, options)
    except CapacityError as error:
        is_bound = options.backend == "triton" or options.cpu_experts != "auto"
        if options.device != "auto" or device.type == "cpu" or is_bound:
            raise
        why = f"computed on the CPU, since the memory of {device} is too small: {error}"
    found = _place_on(torch.device("cpu"), checkpoint, bound, options)
    return replace(found, notes=(*found.notes, why))


def _place_on(
    device: torch.device, checkpoint: Checkpoint, bound: BoundWeights, options: EngineOptions
) -> Placement:
    choice = choose_backend(bound, options, device)
    is_on_gpu = choice.name == "triton"
    if options.expert_place == "stored" and device.type != "cpu" and not is_on_gpu:
        raise BackendUnavailableError(
            f"expert_place 'stored' needs the model to be computed by the CPU or by Triton kernels,"
            f" not by torch on {device}; leave it out, or choose another backend"
        )
    weights = device_weight_items(bound) if is_on_gpu else weight_bytes(bound)
    budget = memory_budget(device, options)
    if is_on_gpu:
        card = plan_card(bound, weights, options, budget, card_counts(checkpoint, bound, options))
        if card is None:
            options = with_gpu_chunk(checkpoint.config, weights, options, budget)
        else:
            options, weights = card.options, card.weights
            choice = replace(choice, notes=(*choice.notes, *card.notes), card=card)
    plan = checked_plan(checkpoint, weights, options, budget, is_on_gpu=is_on_gpu)
    found = Placement(
        device=device,
        options=options,
        choice=choice,
        weights=weights,
        plan=plan,
        notes=choice.notes,
    )
    if found.choice.card is not None:
        return _with_card_store(found, found.choice.card, checkpoint, bound)
    return found if is_on_gpu or device.type != "cpu" else _with_store(found, checkpoint, bound)


def card_counts(
    checkpoint: Checkpoint, bound: BoundWeights, options: EngineOptions
) -> list[list[int]] | None:
    """How often each expert was selected, by which they get places on a card; None without a file.

    Nobody counts the draft block's: each counts as the average expert does.

    Raises:
        ConfigError: a frequency file of another model.
        FormatError: a damaged one.
    """
    if options.expert_freq is None:
        return None
    frequency, config = _frequency(checkpoint, options.expert_freq), bound.config
    counts: list[list[int]] = frequency.counts.tolist()
    if options.draft > 0:
        counts.append([int(frequency.counts.mean())] * config.num_experts)
    return counts


def _frequency(checkpoint: Checkpoint, path: str | Path) -> ExpertFrequency:
    frequency, config = read_expert_frequency(Path(path)), checkpoint.config
    frequency.check_model(checkpoint.identity_sha256, config.num_layers, config.num_experts)
    return frequency


def _with_card_store(
    found: Placement, card: CardPlan, checkpoint: Checkpoint, bound: BoundWeights
) -> Placement:
    """The placement with a store for experts beside the card, where they do not fit in memory."""
    options = found.options
    memory = memory_budget(torch.device("cpu"), options)
    room = memory - HOST_BYTES - card.experts.bounce_bytes
    if options.expert_place == "mapped" or (
        options.expert_place == "auto" and card.elsewhere_bytes <= room
    ):
        return found
    try:
        store = plan_card_store(checkpoint.config, options, bound.experts, room, card.elsewhere)
    except (BackendUnavailableError, CapacityError) as error:
        if options.expert_place == "stored" or options.expert_ram_bytes is not None:
            raise
        why = f"experts that are not on the card do not fit in memory, and stay mapped: {error}"
        return replace(found, notes=(*found.notes, why))
    store = replace(store, total=card.experts.total)
    store = _with_knowledge(store, checkpoint, options)
    return replace(found, choice=replace(found.choice, store=store))


def _with_store(found: Placement, checkpoint: Checkpoint, bound: BoundWeights) -> Placement:
    """The placement with a store for the routed experts, where one is needed or asked for."""
    options, weights = found.options, found.weights
    choice = choose_store(checkpoint.config, weights, options, bound.experts, found.plan)
    store, stored = choice.store, choice.memory
    if store is None:
        return replace(found, notes=(*found.notes, choice.why)) if choice.why else found
    if not stored.fits:
        what = f"{checkpoint.path} with {stored.context:,} tokens and the experts of one token"
        raise too_large(what, stored)
    store = _with_knowledge(store, checkpoint, options)
    return replace(
        found,
        choice=replace(found.choice, store=store),
        weights={**weights, **store.items()},
        plan=stored,
    )


def _with_knowledge(store: StorePlan, checkpoint: Checkpoint, options: EngineOptions) -> StorePlan:
    """The plan with what is known of the experts: how often they are used, their checksums."""
    if options.expert_freq is not None:
        frequency = _frequency(checkpoint, options.expert_freq)
        if options.prefetch == "pairs" and frequency.pairs is None:
            raise ConfigError(
                f"prefetch 'pairs': {options.expert_freq} has none; make it with `profile --pairs`"
            )
        store = replace(store, prior=frequency.rates(), pairs=frequency.pairs)
    if options.expert_verify != "off" and checkpoint.pack is not None:
        share = SAMPLE if options.expert_verify == "sampled" else 1.0
        store = replace(store, verification=Verification(checkpoint.pack.digests, share))
    return store


def checked_plan(
    checkpoint: Checkpoint,
    weights: dict[str, int],
    options: EngineOptions,
    budget: int,
    *,
    is_on_gpu: bool,
) -> MemoryPlan:
    """The memory plan of a model and one session.

    Raises:
        ConfigError: a context beyond the model's own.
        CapacityError: it does not fit.
    """
    config = checkpoint.config
    if options.context is not None and options.context > config.max_context:
        raise ConfigError(
            f"context must be 1..{config.max_context} for {checkpoint.path},"
            f" found {options.context}"
        )
    plan = plan_memory(
        config,
        weights,
        options,
        available_bytes=budget,
        context=options.context,
        on_gpu=is_on_gpu,
    )
    if not plan.fits:
        what = f"{checkpoint.path} with {plan.context:,} tokens of context"
        raise too_large(what, plan, is_on_device=is_on_gpu)
    return plan


def too_large(
    what: str, plan: MemoryPlan, others: int = 0, *, is_on_device: bool = False
) -> CapacityError:
    """The error for something that the memory plan has no room for."""
    beside = f" beside {others:,} bytes of other sessions" if others else ""
    ends = f"; the memory ends in: {plan.limiting_item}" if plan.limiting_item else ""
    return CapacityError(
        f"{what}{beside} does not fit (at most {plan.largest_context:,} tokens would{ends});"
        " ask for less context, a smaller prefill_chunk or checkpoint_bytes",
        needed_bytes=plan.needed_bytes + others,
        available_bytes=plan.available_bytes,
        is_on_device=is_on_device,
    )


def tokenizer_of(checkpoint: Checkpoint) -> Tokenizer | None:
    """The tokenizer that comes with a model, if one does."""
    source = checkpoint.tokenizer
    if source is None:
        return None
    if isinstance(source, Path):
        return Tokenizer.from_json(source, vocab_size=checkpoint.config.vocab_size)
    return Tokenizer.from_spec(source)


def notes_of(
    model: str | Path,
    checkpoint: Checkpoint,
    found: Sequence[str],
    placement: Placement,
) -> tuple[str, ...]:
    """Everything a user should know; `found` is what the weights and the backend gave."""
    options = placement.options
    warnings = [*checkpoint.warnings, *found]
    unused = unused_budget(
        placement.device, options, has_card_plan=placement.choice.card is not None
    )
    if unused is not None:
        warnings.append(unused)
    unused = unused_expert_options(placement.device, placement.choice.name, options)
    if unused is not None:
        warnings.append(unused)
    warnings += _store_warnings(placement, checkpoint)
    for warning in warnings:
        logger.warning("%s: %s", checkpoint.name, warning)
    # What follows is no reason to warn: it is what was asked for.
    shipped = SHIPPED_MODELS.get(str(model))
    facts = [] if shipped is None else [shipped.note]
    if checkpoint.pack is not None:
        facts.append(
            f"the routed experts come from {checkpoint.pack.path}, everything else from"
            f" {checkpoint.dense_path}"
        )
    store = placement.choice.store
    if store is not None:
        place = "memory" if placement.choice.card is None else "main memory"
        facts.append(
            f"{store.slots:,} of {store.total:,} routed experts stay in {place}"
            f" ({store.nbytes / 1e9:.1f} GB), the others are read as they are needed"
        )
    if options.draft:
        facts.append(f"the MTP block drafts up to {options.draft} tokens ahead")
    elif checkpoint.config.num_draft_layers:
        facts.append("the MTP block is not used; draft (--draft N) makes it draft N tokens ahead")
    return (*facts, *warnings)


def _store_warnings(placement: Placement, checkpoint: Checkpoint) -> list[str]:
    """What a user should know of where routed experts are."""
    options, store, found = placement.options, placement.choice.store, []
    if options.expert_verify != "off" and (store is None or store.verification is None):
        found.append(
            "expert_verify has no effect: only experts that are stored, and come from a pack, have"
            " checksums"
        )
    elif options.expert_verify != "off" and options.draft:
        pack, block = checkpoint.pack, checkpoint.config.num_layers
        if pack is not None and pack.digests(block, 0) is None:
            found.append("the MTP block's experts are not in the pack and not compared")
    if store is not None:
        return found
    if options.expert_place == "stored":
        found.append("expert_place 'stored' has no effect: all routed experts are on the card")
    usual = EngineOptions()
    names = ["expert_ram_bytes", "expert_freq", "io", "io_depth", "prefetch"]
    if placement.choice.card is not None:
        names.remove("expert_freq")  # which places on the card
    idle = [name for name in names if getattr(options, name) != getattr(usual, name)]
    found += [
        f"{name} has no effect: the routed experts are not stored (see expert_place)"
        for name in idle
    ]
    if not placement.plan.experts_fit:
        found.append(
            "the routed experts do not fit in memory beside the rest; they are read from disk as"
            " they are needed, which is slow"
        )
    return found

"""What an open engine tells of its routed experts: where they are, and where they came from."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from edgedsv4.model.gpu_model import GpuModel
from edgedsv4.runtime.ram_store import ExpertStore
from edgedsv4.runtime.stats import ExpertStats

if TYPE_CHECKING:
    from edgedsv4.model.gpu_hybrid import HybridExperts
    from edgedsv4.model.model import Model
    from edgedsv4.runtime.backends import BackendChoice


def expert_stats(model: Model) -> ExpertStats | None:
    """Where experts came from; None where all are used in the mapped file, or on a card."""
    stats = model.experts.stats() if isinstance(model.experts, ExpertStore) else None
    hybrid = _hybrid_of(model)
    if hybrid is None or hybrid.host is None:
        return stats
    counts = hybrid.host.counts()
    if stats is None:
        return ExpertStats(card_hits=counts.left, ram_hits=counts.computed)
    return replace(stats, card_hits=counts.left)


def _hybrid_of(model: Model) -> HybridExperts | None:
    """Who computes experts of which a card holds only a part."""
    return model.network.hybrid if isinstance(model, GpuModel) else None


def expert_facts(model: Model, choice: BackendChoice) -> dict[str, object]:
    """Where routed experts are used, as JSON types."""
    source, plan, card = model.experts, choice.store, choice.card
    facts: dict[str, object] = {}
    if card is not None:
        facts = {"on_card": card.experts.resident, "experts": card.experts.total}
        hybrid = _hybrid_of(model)
        facts["moves"] = 0 if hybrid is None else hybrid.moves
    if not isinstance(source, ExpertStore) or plan is None:
        is_card = choice.name == "triton" and card is None
        return {"place": "device" if is_card else "mapped", **facts}
    stats = source.stats()
    return {
        **facts,
        "place": "stored",
        "slots": plan.slots,
        "staging_slots": plan.staging,
        "slot_bytes": plan.slot_bytes,
        "experts": plan.total,
        "resident": source.resident(),
        "reads": source.method,
        "hit_rate": stats.hit_rate,
        "read_bytes": stats.read_bytes,
        "prefetch": source.options.prefetch,
        "prefetched": stats.prefetched,
        "prefetch_hits": stats.prefetch_hits,
        "prefetch_late": stats.prefetch_late,
        "prefetch_wasted": stats.prefetch_wasted,
        "guess_recall": stats.guess_recall,
    }

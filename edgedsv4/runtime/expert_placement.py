"""Which routed experts live on a card that has no room for all of them: arithmetic, no device.

What dense weights, sessions and working memory leave goes first to two halves of a few slots each,
through which the other experts pass in a chunk, then to experts that stay. Those are the likeliest
by a list of counts, or without one the same number in every layer, for a router is trained to use
all alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from edgedsv4.errors import ConfigError
from edgedsv4.model.gpu_banks import HALVES, ExpertPlacement

STAGED_EXPERTS = 32
"""Experts of a half at most: enough to fill a card with work, and some ms of a bus."""
_STAGED_SHARE = 4
"""Staging takes at most one part in so many of what is there for experts, or what a token needs."""

Counts = Sequence[Sequence[int]]
"""[L][E], how often each expert was selected."""


@dataclass(frozen=True, slots=True)
class LayerExperts:
    """The routed experts of one layer, in bytes."""

    kind: tuple[object, ...]
    """Layers of equal kinds share a bank."""
    card_bytes: int
    """Of one expert on the card."""
    stored_bytes: int
    """Of one expert in the file, which pass through a buffer of the card."""


@dataclass(frozen=True, slots=True)
class CardExperts:
    """How much of a card's memory experts take, and which they are."""

    placement: ExpertPlacement
    resident_bytes: int
    staging_bytes: int
    """Slots of experts that pass through, and buffers for them as they are stored."""
    bounce_bytes: int
    """Page-locked host memory through which experts in pageable memory go."""
    total: int
    """Experts in all."""

    @property
    def resident(self) -> int:
        """Experts that live on the card."""
        return sum(len(ids) for ids in self.placement.resident)


def staging_bytes(layers: Sequence[LayerExperts], staged: int) -> int:
    """Bytes of a card for experts that pass through, `staged` to a half."""
    kinds = {layer.kind: layer.card_bytes for layer in layers}
    raw = max(layer.stored_bytes for layer in layers)
    return HALVES * staged * (sum(kinds.values()) + raw)


def place_experts(
    layers: Sequence[LayerExperts],
    experts: int,
    budget: int,
    *,
    least_staged: int,
    counts: Counts | None = None,
) -> CardExperts:
    """Fill a budget.

    Args:
        layers: one entry per layer, a draft block's last.
        experts: E.
        budget: bytes for experts; less than the least staging gives that and no resident.
        least_staged: slots of a half that a token may need at once.
        counts: how often each expert was selected; None places evenly.

    Raises:
        ConfigError: counts of another shape.
    """
    if counts is not None and [len(row) for row in counts] != [experts] * len(layers):
        raise ConfigError(
            f"counts of {len(layers)} layers with {experts} experts each are needed, found"
            f" {len(counts)} with {sorted({len(row) for row in counts})}"
        )
    most = max(least_staged, min(STAGED_EXPERTS, experts))
    sizes = range(most, least_staged, -1)
    fitting = (n for n in sizes if staging_bytes(layers, n) * _STAGED_SHARE <= budget)
    staged = next(fitting, least_staged)
    passing = staging_bytes(layers, staged)
    left = used = max(0, budget - passing)
    chosen: list[list[int]] = [[] for _ in layers]
    for layer, expert in _by_worth(layers, experts, counts):
        size = layers[layer].card_bytes
        if size <= left:
            left -= size
            chosen[layer].append(expert)
    resident = tuple(tuple(sorted(ids)) for ids in chosen)
    return CardExperts(
        placement=ExpertPlacement(resident, staged),
        resident_bytes=used - left,
        staging_bytes=passing,
        bounce_bytes=HALVES * staged * max(layer.stored_bytes for layer in layers),
        total=len(layers) * experts,
    )


def _by_worth(
    layers: Sequence[LayerExperts], experts: int, counts: Counts | None
) -> Iterator[tuple[int, int]]:
    """(layer, expert), those first that are worth most per byte; ties to lower ids, then layers."""
    pairs = ((layer, expert) for expert in range(experts) for layer in range(len(layers)))
    if counts is None:
        yield from pairs
        return
    yield from sorted(
        pairs, key=lambda pair: -counts[pair[0]][pair[1]] / layers[pair[0]].card_bytes
    )

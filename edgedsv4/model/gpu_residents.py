"""Which experts live on a card, decided anew while tokens are decoded.

Every choice of a token is counted, and counts fade with a half-life of `HALF_LIFE` tokens. Every
`PERIOD` tokens, between two steps, experts that are used often take the slots of experts of the
same layer that are not. A layer keeps as many experts on the card as it had, so a captured step
stays as it is: it reads the tables that say where an expert is.

An interrupt may come between any two steps of a move: an expert is taken over elsewhere before its
slot is given up, a slot that is free is remembered, and tables are made to agree before the next
step.

Counts of a few tokens are mostly chance. An expert moves only if it leads by `SIGMAS` deviations of
a count that is chance, and by the factor `LEAD`; then it will be used often enough before it fades
to be worth the copy, which takes as long as computing it some three times outside the card.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.model.gpu_banks import PlacedLayer

HALF_LIFE = 2000
PERIOD = 16
MOST_MOVES = 8
"""Experts that move at a time: some ms of a bus, a hundredth of the time of `PERIOD` tokens."""
SIGMAS = 4.0
LEAD = 1.2

Mover = Callable[["PlacedLayer", int, int], None]
"""(layer, expert, slot): copies an expert to the card, in the order of the current stream."""


class Residents:
    """Counts choices and moves experts of the layers of a model.

    Args:
        layers: placed; the first ones are those that are counted.
        bring: copies an expert.
        leave: (layer, expert) that will be computed elsewhere from now on.
        counts: [L][E], how often each expert was chosen in a corpus, by which it begins; None for
            experts that are all alike.
    """

    def __init__(
        self,
        layers: Sequence[PlacedLayer],
        bring: Mover,
        leave: Callable[[int, int], None],
        counts: npt.NDArray[np.float64] | None = None,
    ) -> None:
        self._layers = layers
        self._bring = bring
        self._leave = leave
        shape = (len(layers), layers[0].places.numel())
        self._counts = np.zeros(shape) if counts is None else counts.astype(np.float64)
        self._fading = 0.5 ** (PERIOD / HALF_LIFE)
        self._tokens = 0
        self._free: dict[int, list[int]] = {}
        self._changing: PlacedLayer | None = None
        self.moves = 0
        """Experts that came to the card so far."""

    def prepare(self) -> None:
        """Copy an expert of each bank to where it is, so that nothing is compiled in mid-reply."""
        seen: list[object] = []
        for layer in self._layers:
            if not layer.has_residents or any(layer.bank is bank for bank in seen):
                continue
            seen.append(layer.bank)
            expert = int((layer.places >= 0).nonzero()[0])
            self._bring(layer, expert, int(layer.places[expert]))

    def note(self, ids: Tensor) -> None:
        """Count a token's choices, and move experts if it is time; no step may be under way.

        Args:
            ids: int32 [L, k] on the CPU, -1 in layers that were not evaluated.
        """
        chosen = ids.numpy()
        rows = np.arange(len(chosen))[:, None]
        is_there = chosen >= 0
        np.add.at(
            self._counts, (np.broadcast_to(rows, chosen.shape)[is_there], chosen[is_there]), 1
        )
        self._tokens += 1
        if self._tokens % PERIOD == 0:
            self._move()
            self._counts *= self._fading

    def repair(self) -> None:
        """Before a step or a chunk: end what an interrupt left half done."""
        if self._changing is not None:
            self._changing.settle()
            self._changing = None

    def _move(self) -> None:
        """Let the most used experts in, those first that lead by most."""
        found = [swap for layer in self._layers if (swap := self._best_of(layer)) is not None]
        found.sort(key=lambda swap: -swap[0])
        for _, layer, goes, comes in found[:MOST_MOVES]:
            self._changing = layer
            used = set(layer.places.tolist())
            free = [slot for slot in self._free.get(layer.layer, ()) if slot not in used]
            self._free[layer.layer] = free
            if not free:
                self._leave(layer.layer, goes)
                free.append(int(layer.places[goes]))
                layer.vacate(goes)
            self._bring(layer, comes, free[-1])
            layer.occupy(comes, free[-1])
            free.pop()
            self._changing = None
            self.moves += 1

    def _best_of(self, layer: PlacedLayer) -> tuple[float, PlacedLayer, int, int] | None:
        """(lead, layer, expert that goes, expert that comes) of a layer, if any is worth it."""
        if not layer.missing or not layer.has_residents:
            return None
        counts = self._counts[layer.layer]
        is_here = layer.places.numpy() >= 0
        goes = int(np.where(is_here, counts, np.inf).argmin())
        comes = int(np.where(is_here, -np.inf, counts).argmax())
        few, many = float(counts[goes]), float(counts[comes])
        lead = many - few
        if lead <= SIGMAS * np.sqrt(many + few + 1) or many <= LEAD * few:
            return None
        return lead, layer, goes, comes

"""Experts that are used often come to the card, and chance moves none."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from line_interrupt import Interrupt
from torch import Tensor

from edgedsv4.errors import ConfigError
from edgedsv4.model.gpu_banks import PlacedLayer, missing_of
from edgedsv4.model.gpu_residents import MOST_MOVES, PERIOD, Residents

EXPERTS, K = 32, 4
ALWAYS = torch.tensor([[20, 21, 22, 23]], dtype=torch.int32)


class Card:
    """Placed layers, and what was copied."""

    def __init__(self, resident: Sequence[Sequence[int]]) -> None:
        self.slots: dict[tuple[int, int], int] = {}
        self.brought: list[tuple[int, int, int]] = []
        self.left: list[tuple[int, int]] = []
        self.layers = []
        slot = 0
        for layer, ids in enumerate(resident):
            places = torch.full((EXPERTS,), -1, dtype=torch.int32)
            places[list(ids)] = torch.arange(slot, slot + len(ids), dtype=torch.int32)
            slot += len(ids)
            bank: Any = None
            made = PlacedLayer(layer, bank, places, places.clone(), missing_of(places))
            self.layers.append(made)

    def residents(self, counts: np.ndarray | None = None) -> Residents:
        return Residents(
            self.layers, self.bring, lambda layer, expert: self.left.append((layer, expert)), counts
        )

    def bring(self, placed: PlacedLayer, expert: int, slot: int) -> None:
        assert int(placed.places[expert]) < 0
        assert slot not in placed.places.tolist()
        self.brought.append((placed.layer, expert, slot))

    def here(self, layer: int) -> set[int]:
        return set((self.layers[layer].places >= 0).nonzero().flatten().tolist())


def draw(rng: np.random.Generator, weights: np.ndarray) -> Tensor:
    """[L, K] ids of a token."""
    rows = [rng.choice(EXPERTS, K, replace=False, p=row / row.sum()) for row in weights]
    return torch.from_numpy(np.stack(rows).astype(np.int32))


def test_experts_that_are_used_often_take_the_places_of_others() -> None:
    card, rng = Card([range(8), range(8)]), np.random.default_rng(1)
    residents = card.residents()
    weights = np.ones((2, EXPERTS))
    weights[0, 20:28] = 12
    for _ in range(3000):
        residents.note(draw(rng, weights))
    assert card.here(0) == set(range(20, 28))
    assert card.here(1) == set(range(8))
    assert residents.moves == len(card.brought) == len(card.left) == 8
    for layer in card.layers:
        assert torch.equal(layer.places, layer.table)
        assert layer.missing == missing_of(layer.places)
    assert sorted(card.layers[0].places[20:28].tolist()) == list(range(8))


def test_habits_that_change_are_followed() -> None:
    card, rng = Card([range(8)]), np.random.default_rng(2)
    residents = card.residents()
    for hot in (range(20, 28), range(4, 12)):
        weights = np.ones((1, EXPERTS))
        weights[0, list(hot)] = 12
        for _ in range(8000):
            residents.note(draw(rng, weights))
        assert card.here(0) == set(hot)


def test_chance_moves_nothing() -> None:
    card, rng = Card([range(8)] * 8), np.random.default_rng(3)
    residents = card.residents()
    for _ in range(4000):
        residents.note(draw(rng, np.ones((8, EXPERTS))))
    assert residents.moves == 0


def test_few_move_at_a_time() -> None:
    card = Card([range(8)] * (MOST_MOVES + 5))
    residents = card.residents()
    always = torch.tensor([[20, 21, 22, 23]] * (MOST_MOVES + 5), dtype=torch.int32)
    moved = [0]
    for _ in range(12 * PERIOD):
        residents.note(always)
        moved.append(residents.moves)
    steps = [after - before for before, after in pairwise(moved)]
    assert max(steps) == MOST_MOVES
    assert all(n == 0 for i, n in enumerate(steps) if (i + 1) % PERIOD)
    assert all({20, 21, 22, 23} <= card.here(layer) for layer in range(MOST_MOVES + 5))


def test_preparing_copies_an_expert_of_each_bank_to_its_own_slot() -> None:
    card = Card([[], range(3, 8), range(8)])
    banks: list[Any] = [object(), object()]
    card.layers[0].bank = card.layers[1].bank = banks[0]
    card.layers[2].bank = banks[1]
    copied: list[tuple[int, int, int]] = []
    residents = card.residents()
    residents._bring = lambda placed, expert, slot: copied.append((placed.layer, expert, slot))
    residents.prepare()
    assert copied == [(1, 3, 0), (2, 0, 5)]
    assert residents.moves == 0


def test_what_is_known_before_counts() -> None:
    counts = np.zeros((1, EXPERTS))
    counts[0, 10] = 500.0
    card = Card([range(8)])
    residents = card.residents(counts)
    for _ in range(PERIOD):
        residents.note(torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))
    assert 10 in card.here(0)
    assert counts[0, 10] == 500.0


@pytest.mark.parametrize("resident", [[], range(EXPERTS)], ids=["none", "all"])
def test_a_layer_without_a_choice_stays(resident: Sequence[int]) -> None:
    card = Card([resident])
    residents = card.residents()
    for _ in range(20 * PERIOD):
        residents.note(torch.tensor([[0, 1, 2, 3]], dtype=torch.int32))
    assert residents.moves == 0


def test_layers_that_were_not_evaluated_do_not_count() -> None:
    card = Card([range(8), range(8)])
    residents = card.residents()
    for _ in range(20 * PERIOD):
        residents.note(torch.tensor([[20, 21, 22, 23], [-1] * 4, [-1] * 4], dtype=torch.int32))
    assert {20, 21, 22, 23} <= card.here(0)
    assert card.here(1) == set(range(8))


def test_an_expert_has_one_place() -> None:
    (layer,) = Card([range(8)]).layers
    with pytest.raises(ConfigError, match="expert 9 of layer 0 has no slot"):
        layer.vacate(9)
    with pytest.raises(ConfigError, match="expert 4 of layer 0 has a slot"):
        layer.occupy(4, 3)


def agree(card: Card) -> None:
    """Whether everything says the same of who is where, and no slot is given twice."""
    for layer in card.layers:
        assert torch.equal(layer.places, layer.table)
        assert layer.missing == missing_of(layer.places)
        used = layer.places[layer.places >= 0].tolist()
        assert len(used) == len(set(used))
        assert set(used) <= set(range(8))


def test_a_copy_that_fails_leaves_a_free_slot_that_is_used_again() -> None:
    card = Card([range(8)])
    residents = card.residents()

    def fail(*_: object) -> None:
        raise OSError("no")

    def decode(tokens: int) -> None:
        for _ in range(tokens):
            residents.note(ALWAYS)

    residents._bring = fail
    with pytest.raises(OSError, match="no"):
        decode(20 * PERIOD)
    residents.repair()
    agree(card)
    assert card.here(0) < set(range(8))
    residents._bring = card.bring
    decode(20 * PERIOD)
    agree(card)
    assert {20, 21, 22, 23} <= card.here(0)
    assert len(card.here(0)) == 8


def ready_to_move() -> tuple[Card, Residents]:
    """After one more token four experts move."""
    card = Card([range(8)])
    residents = card.residents()
    residents._counts[0, 20:24] = 40
    for _ in range(PERIOD - 1):
        residents.note(ALWAYS)
    return card, residents


def interrupted(residents: Residents, at: int) -> tuple[bool, int]:
    """Whether a token was interrupted at a line, and lines in all."""
    interrupt = Interrupt(("model/gpu_residents.py", "model/gpu_banks.py"), at)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        residents.note(ALWAYS)
    except KeyboardInterrupt:
        return True, interrupt.count
    finally:
        sys.settrace(before)
    return False, interrupt.count


def test_an_interrupt_between_any_two_lines_leaves_places_that_agree() -> None:
    _, lines = interrupted(ready_to_move()[1], -1)
    assert lines > 20
    for at in range(1, lines + 1):
        card, residents = ready_to_move()
        assert interrupted(residents, at) == (True, at)
        residents.repair()
        agree(card)
        # Whoever went is computed elsewhere.
        assert set(range(8)) - card.here(0) <= {expert for _, expert in card.left}
        for _ in range(20 * PERIOD):
            residents.note(ALWAYS)
        agree(card)
        assert {20, 21, 22, 23} <= card.here(0)
        assert len(card.here(0)) == 8

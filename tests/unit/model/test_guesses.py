"""Guesses at the next layer's experts: its router, on what the router of this layer saw."""

from __future__ import annotations

import numeric
import numpy as np
import pytest
import torch
from memory_model import BACKENDS, ids_tensor, model_of
from tiny_model import random_tensors, random_tokens, tiny_config

from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.moe import likeliest_first

CONFIG = tiny_config(compress_ratios=(0, 4, 128, 0), num_hash_layers=1, num_experts=16)
COUNT = 20

Ids = dict[int, torch.Tensor]


def tensors(*, has_one_router: bool) -> dict[str, np.ndarray]:
    """Random ones; with one router, all layers that route by score have that of layer 1."""
    found = random_tensors(CONFIG, seed=8)
    if has_one_router:
        for layer in (2, 3):
            for part in ("weight", "bias"):
                found[f"layers.{layer}.ffn.gate.{part}"] = found[f"layers.1.ffn.gate.{part}"]
    return found


def watched(backend: str, *, has_one_router: bool, guesses: int) -> tuple[Ids, Ids]:
    """Experts and guesses of a chunk, by layer."""
    chosen: Ids = {}
    guessed: Ids = {}
    hooks = ForwardHooks(
        on_experts=lambda layer, _scores, ids: chosen.setdefault(layer, ids),
        on_guesses=lambda layer, ids: guessed.update({layer: ids.clone()}),
        guesses=guesses,
    )
    model = model_of(CONFIG, tensors(has_one_router=has_one_router), backend=backend)
    model.forward(ids_tensor(random_tokens(CONFIG, COUNT, 1)), model.new_cache(COUNT), hooks=hooks)
    return chosen, guessed


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_guess_is_what_the_next_router_says_of_the_input_of_this_one(backend: str) -> None:
    k = CONFIG.experts_per_token
    chosen, guessed = watched(backend, has_one_router=True, guesses=k)
    for layer in (2, 3):  # with the router of the layer before it
        assert guessed[layer].sort(dim=1).values.equal(chosen[layer - 1].long())


@pytest.mark.parametrize("backend", BACKENDS)
def test_layers_that_route_by_a_table_and_the_first_are_not_guessed(backend: str) -> None:
    chosen, guessed = watched(backend, has_one_router=False, guesses=99)
    assert sorted(chosen) == [0, 1, 2, 3]
    assert sorted(guessed) == [1, 2, 3]
    for ids in guessed.values():
        assert ids.sort(dim=1).values.equal(torch.arange(16).expand(COUNT, 16))


def test_guesses_in_c_are_those_of_torch() -> None:
    ours, theirs = (watched(b, has_one_router=False, guesses=3)[1] for b in BACKENDS)
    same = torch.stack([(ours[n] == theirs[n]).all(dim=1) for n in ours])
    assert same.double().mean() > 0.95  # but for near ties


@pytest.mark.parametrize("backend", BACKENDS)
def test_guessing_changes_no_logit(backend: str) -> None:
    model = model_of(CONFIG, tensors(has_one_router=False), backend=backend)
    ids = ids_tensor(random_tokens(CONFIG, COUNT, 1))
    plain = model.forward(ids, model.new_cache(COUNT), logits="all").logits
    hooks = ForwardHooks(on_guesses=lambda _layer, _ids: None)
    found = model.forward(ids, model.new_cache(COUNT), logits="all", hooks=hooks).logits
    assert plain is not None
    assert found is not None
    numeric.assert_same_bits("logits", found, plain)


def test_guesses_of_a_token_do_not_depend_on_others() -> None:
    model = model_of(CONFIG, tensors(has_one_router=False), backend="native")
    rows: list[torch.Tensor] = []
    hooks = ForwardHooks(on_guesses=lambda _layer, ids: rows.append(ids))
    ids = ids_tensor(random_tokens(CONFIG, 9, 1))
    model.forward(ids, model.new_cache(9), hooks=hooks)
    cache = model.new_cache(9)
    together, rows[:] = list(rows), []
    for token in ids:
        model.forward(token[None], cache, hooks=hooks)
    for layer, found in enumerate(together):
        assert found.equal(torch.cat(rows[layer::3]))


def test_guesses_of_several_tokens_are_taken_in_turns() -> None:
    ids = torch.tensor([[5, 1, 7], [2, 5, 9]])
    assert likeliest_first(ids) == [5, 2, 1, 7, 9]

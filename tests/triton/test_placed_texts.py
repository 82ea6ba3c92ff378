"""Texts of the pocket models for every part of the experts on the card; see placement_tolerance."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

import pocket
import pytest
import torch
from gpu_models import gpu_model_of
from hybrid_models import Setting, hybrid_model_of
from numeric import mean_kl
from placement_tolerance import (
    DEFAULT_KL,
    EXACT_LOGITS,
    Greedy,
    assert_parts_at_a_near_tie,
    first_difference,
    largest_difference,
)
from pocket.judging import open_model
from triton_device import DEVICE

import edgedsv4
from edgedsv4 import Engine, EngineOptions
from edgedsv4.runtime.convert import QuantizeOptions, quantize_model
from edgedsv4.runtime.gpu_devices import gpu_of

if TYPE_CHECKING:
    from edgedsv4.config import CpuExperts, Profile
    from edgedsv4.model.model import Model

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="a token takes minutes in the interpreter")

PROMPT = "Tell me a story about a fox and then another one about the sea."
TOKENS = 500
BITS_TOKENS = 100
PREFIX = 100
"""Tokens that texts have in common when their mean KL says something."""
E8, E16 = "pocket-v4", "pocket-v4-e16"
BUDGETS = {E8: (0, 2, 4, 6, 8), E16: (0, 2, 4, 8, 16)}
"""Experts of each layer on the card."""
ALL = -1
"""A card that holds everything."""


def _path(name: str) -> Path:
    if name == E16:
        return Path(pocket.__file__).parent / "models" / f"{E16}.gguf"
    return Path(edgedsv4.__file__).parent / "data" / E8 / f"{E8}.gguf"


@cache
def _prompt(path: Path) -> tuple[list[int], int]:
    """Token ids, and the one that would end the text."""
    with Engine.open(path, EngineOptions(threads=1, context=256)) as engine:
        end = engine.config.eos_id
        assert end is not None
        return engine.tokenizer.encode(PROMPT), end


@contextmanager
def _placed(path: Path, profile: Profile, mode: CpuExperts, count: int) -> Iterator[Model]:
    """A model with the first experts of each layer on the card."""
    family = gpu_of(torch.device(DEVICE)).family
    with open_model(path, profile=profile) as model:
        if count == ALL:
            yield gpu_model_of(model, family)
            return
        blocks = model.config.num_layers + (model.weights.draft is not None)
        resident = [range(count)] * blocks
        setting = Setting(mode=mode, family=family, prefers_cpu=lambda tokens: tokens < 64)
        yield hybrid_model_of(model, resident, setting, staged=model.config.experts_per_token)


def _text(
    path: Path, profile: Profile, mode: CpuExperts, count: int, tokens: int = TOKENS
) -> Greedy:
    prompt, end = _prompt(path)
    chosen: list[int] = []
    rows: list[torch.Tensor] = []
    with _placed(path, profile, mode, count) as model:
        timeline = model.new_cache(len(prompt) + tokens + 1)
        following = prompt
        while len(chosen) < tokens:
            logits = model.forward(torch.tensor(following), timeline).logits
            assert logits is not None
            row = logits[-1].clone()
            row[end] = row.min()
            rows.append(row)
            following = [int(row.argmax())]
            chosen += following
    return Greedy(tuple(chosen), torch.stack(rows).cpu())


_stored_text = cache(_text)


@cache
def _texts(name: str, profile: Profile) -> dict[str, Greedy]:
    path = _path(name)
    made = {f"auto {count}": _stored_text(path, profile, "auto", count) for count in BUDGETS[name]}
    made["on"] = _stored_text(path, profile, "on", 0)
    made["off"] = _stored_text(path, profile, "off", 0)
    return made


@pytest.mark.parametrize(("name", "profile"), [(E8, "exact"), (E8, "default"), (E16, "exact")])
def test_texts_part_only_at_near_ties(name: str, profile: Profile) -> None:
    for (one, first), (other, second) in combinations(_texts(name, profile).items(), 2):
        assert_parts_at_a_near_tie(f"{name}, {one} and {other}", first, second, profile)


def _in_common(one: Greedy, other: Greedy) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits behind the same tokens, those of the first difference included."""
    found = first_difference(one, other)
    rows = len(one.tokens) if found is None else found.place + 1
    return one.logits[:rows], other.logits[:rows]


@pytest.mark.parametrize("name", [E8, E16])
def test_exact_logits_depend_little_on_the_placement(name: str) -> None:
    for (one, first), (other, second) in combinations(_texts(name, "exact").items(), 2):
        rows = _in_common(first, second)
        worst = float((rows[0] - rows[1]).abs().max())
        assert worst < EXACT_LOGITS, f"{name}, {one} and {other}: {largest_difference(*rows)}"


def test_default_predictions_depend_little_on_the_placement() -> None:
    texts, compared = _texts(E8, "default"), 0
    for (one, first), (other, second) in combinations(texts.items(), 2):
        rows = _in_common(first, second)
        if len(rows[0]) < PREFIX:
            continue
        compared += 1
        cost = mean_kl(*rows)
        assert cost < DEFAULT_KL, f"{one} and {other}: {cost:.3g} nats over {len(rows[0])} tokens"
    assert compared


def _assert_same(name: str, found: Sequence[Greedy], expected: Greedy) -> None:
    for count, text in enumerate(found):
        different = first_difference(text, expected)
        assert different is None, f"{name}, budget {count}: {different}"
        where = largest_difference(text.logits, expected.logits)
        assert torch.equal(text.logits, expected.logits), f"{name}, budget {count}: {where}"


@pytest.mark.parametrize("mode", ["on", "off"])
def test_text_has_the_same_bits_for_every_budget(mode: CpuExperts) -> None:
    path = _path(E8)
    found = [_stored_text(path, "default", mode, count) for count in BUDGETS[E8]]
    _assert_same(mode, found[1:], found[0])


def test_off_has_the_bits_of_a_card_that_multiplies_bytes_of_all(tmp_path: Path) -> None:
    path = tmp_path / "q2.gguf"
    quantize_model(_path(E8), path, QuantizeOptions(experts="Q2_K", mtp="none"))
    expected = _text(path, "default", "off", ALL, BITS_TOKENS)
    found = [_text(path, "default", "off", count, BITS_TOKENS) for count in (0, 2, 8)]
    _assert_same("off", found, expected)

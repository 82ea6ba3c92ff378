"""Drafts on a real network, crossing windows of every kind: bit for bit the plain text and state.

From the prompt on, every operation computes its rows alone, as the native kernels do for small
chunks, so a difference can only come from a cache that was not brought back exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from memory_model import model_of
from row_invariant import compute_rows_alone
from tiny_model import random_tensors, random_tokens, tiny_config

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.runtime.memory_plan import StateLayout
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.speculation import Speculation
from edgedsv4.runtime.timeline import Timeline

if TYPE_CHECKING:
    from edgedsv4.model.model import Model

CONFIG = tiny_config(
    num_draft_layers=1, compress_ratios=(0, 4, 128), window=8, index_topk=4, num_hash_layers=1
)
PROMPT = random_tokens(CONFIG, 117, seed=3).tolist()
COUNT = 20


@cache
def tensors() -> Any:
    return random_tensors(CONFIG, seed=8)


@pytest.fixture(scope="module")
def model() -> Model:
    return model_of(CONFIG, tensors(), profile="default")


def timeline_of(model: Model, draft: int) -> Timeline:
    timeline = Timeline(
        model,
        capacity=300,
        options=EngineOptions(draft=draft, profile=model.numerics.profile, prefill_chunk=64),
        check_files=lambda: None,
        should_stop=lambda: False,
        clock=lambda: 0.0,
    )
    timeline.sync(PROMPT)
    return timeline


def decode(timeline: Timeline, options: SamplingOptions) -> list[int]:
    sampler = Sampler(options, CONFIG.vocab_size)
    sampler.observe(timeline.token_ids)
    return list(timeline.decode(sampler, (), lambda: None))


def assert_same_state(one: Timeline, other: Timeline) -> None:
    assert one.token_ids == other.token_ids
    np.testing.assert_array_equal(one.logits(), other.logits())
    tail = random_tokens(CONFIG, 9, seed=5).tolist()
    np.testing.assert_array_equal(
        one.evaluate(tail, rows="all"),  # type: ignore[arg-type]
        other.evaluate(tail, rows="all"),  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("pattern", [0b000000, 0b111111, 0b010110, 0b101101])
def test_forced_drafts_give_the_plain_text_and_state(
    model: Model, pattern: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    greedy = SamplingOptions(temperature=0, max_tokens=COUNT)
    plain, drafted = timeline_of(model, 0), timeline_of(model, 3)
    compute_rows_alone(monkeypatch)
    text = [*PROMPT, *decode(plain, greedy)]

    def propose(_: Speculation, ids: Sequence[int], *__: object, room: int, **___: object) -> Any:
        places = range(len(ids) + 1, min(len(ids) + 4, len(text), len(ids) + 1 + room))
        return [text[at] if pattern >> at % 6 & 1 else (text[at] + 1) % 384 for at in places]

    monkeypatch.setattr(Speculation, "propose", propose)
    decode(drafted, greedy)
    assert drafted.drafts is not None
    assert sum(drafted.drafts.drafted) > 0
    assert_same_state(drafted, plain)


@pytest.mark.parametrize(("draft", "temperature"), [(1, 0.0), (3, 0.0), (2, 0.8)])
def test_drafts_of_the_block_give_the_plain_text_and_state(
    model: Model, draft: int, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = SamplingOptions(temperature=temperature, seed=4, max_tokens=COUNT)
    plain, drafted = timeline_of(model, 0), timeline_of(model, draft)
    compute_rows_alone(monkeypatch)
    assert decode(drafted, options) == decode(plain, options)
    assert_same_state(drafted, plain)


def test_block_says_the_same_after_a_rewind(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the block drafts depends on the text alone, not on how the timeline came to it."""
    greedy = SamplingOptions(temperature=0, max_tokens=COUNT)
    straight, turned = timeline_of(model, 2), timeline_of(model, 2)
    compute_rows_alone(monkeypatch)
    decode(turned, greedy)
    turned.rewind(COUNT)
    decode(turned, greedy)
    turned.rewind(COUNT)
    sampler = Sampler(greedy, CONFIG.vocab_size)
    token_id = sampler.sample(straight.logits())
    assert sampler.sample(turned.logits()) == token_id
    said = []
    for timeline in (straight, turned):
        speculation = timeline._speculation
        assert speculation is not None
        speculation._pace.is_drafting = True
        said.append(speculation.propose(PROMPT, token_id, sampler, room=5, stop_ids=()))
    assert said[0] == said[1]
    assert len(said[0]) == 2


def test_session_takes_what_the_plan_says(model: Model) -> None:
    profile = model.numerics.profile
    extra = [StateLayout(CONFIG, profile, "f32", draft).state_bytes(300) for draft in (3, 0)]
    plain, drafted = timeline_of(model, 0), timeline_of(model, 3)
    rows = 4 * CONFIG.vocab_size * 4
    grown = drafted.nbytes() - plain.nbytes() - drafted.checkpoints.nbytes()
    assert grown + plain.checkpoints.nbytes() + rows == extra[0] - extra[1]
    one = StateLayout(CONFIG, profile, "f32", 3).checkpoint_bytes
    assert drafted.checkpoints.nbytes() <= one

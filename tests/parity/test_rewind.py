"""A timeline that went back is as if it had never gone on.

What was evaluated beyond the place it returns to are other tokens each time, so that a row that
stayed behind would show. Every position 1..300 of the stored model is returned to once; eight of
the right tokens later the state must equal that of a timeline that never went back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numeric
import numpy as np
import pytest
import torch
from file_model import open_model
from memory_model import BACKENDS, chunk_sizes, evaluate, ids_tensor, model_of, state_of
from row_invariant import compute_rows_alone
from structure_data import STORED
from tiny_model import random_tensors, random_tokens, tiny_config

from edgedsv4.config import EngineOptions
from edgedsv4.model.kv_cache import REWIND_TOKENS
from edgedsv4.runtime.engine import Engine

if TYPE_CHECKING:
    from edgedsv4.model.kv_cache import KvCache
    from edgedsv4.model.model import Model

POSITIONS = 300
PER_TEST = 50
AHEAD = 8
TO_THE_END = (1, 3, 4, 63, 64, 127, 128, 129, 200, 291)

STATE_LIMIT = 1e-5
"""Relative to a tensor's largest value; see `test_chunking`: eight tokens at once round otherwise
than one by one. A stale row is of order 1."""


@pytest.fixture(scope="module", params=BACKENDS)
def model(request: pytest.FixtureRequest) -> Model:
    return open_model(STORED / "official", backend=request.param)


@pytest.fixture(scope="module")
def token_ids() -> np.ndarray:
    return np.fromfile(STORED / "tokens.i32", dtype=np.int32)


@pytest.fixture(scope="module")
def whole(model: Model, token_ids: np.ndarray) -> torch.Tensor:
    """Logits of one prefill."""
    return evaluate(model, token_ids)


def others(token_ids: np.ndarray, first: int, count: int, vocab_size: int) -> np.ndarray:
    """`count` tokens that differ from the right ones at the same positions."""
    return (np.resize(token_ids[first:], count) + 1 + np.arange(count) % 7) % vocab_size


def assert_same_state(model: Model, got: KvCache, expected: KvCache, where: str) -> None:
    assert got.length == expected.length
    got_state, expected_state = state_of(model, got), state_of(model, expected)
    assert got_state.keys() == expected_state.keys()
    for name, values in expected_state.items():
        part = f"{where}: {name}"
        numeric.assert_within_tensor_max(part, got_state[name], values, STATE_LIMIT)


def advance(model: Model, cache: KvCache, ids: np.ndarray) -> None:
    model.forward(ids_tensor(ids), cache, logits="none")


@pytest.mark.parametrize("start", range(0, POSITIONS, PER_TEST))
def test_rewind_to_every_position_restores_the_state(
    start: int, model: Model, token_ids: np.ndarray
) -> None:
    """In steps of one: beyond the position by 1, 8, 61 or 128 other tokens, back, and on."""
    straight, cache = model.new_cache(len(token_ids)), model.new_cache(2 * len(token_ids))
    advance(model, straight, token_ids[: start + AHEAD])
    advance(model, cache, token_ids[: start + 1])
    for position in range(start + 1, start + PER_TEST + 1):
        beyond = (1, 8, 61, REWIND_TOKENS)[position % 4]
        advance(model, cache, others(token_ids, position, beyond, model.config.vocab_size))
        cache.rewind(position)
        advance(model, cache, token_ids[position : position + AHEAD])
        advance(model, straight, token_ids[position + AHEAD - 1 : position + AHEAD])
        assert_same_state(model, cache, straight, f"position {position}")
        cache.rewind(position + 1)


@pytest.mark.parametrize("position", TO_THE_END)
def test_rewind_then_on_to_the_end_gives_the_same_logits(
    position: int, model: Model, token_ids: np.ndarray, whole: torch.Tensor
) -> None:
    cache = model.new_cache(len(token_ids))
    advance(model, cache, token_ids[:position])
    far = min(REWIND_TOKENS, len(token_ids) - position)
    advance(model, cache, others(token_ids, position, far, model.config.vocab_size))
    cache.rewind(position)
    got = evaluate(model, token_ids[position:], cache=cache)
    numeric.assert_logits("logits", got, whole[position:], 2e-4)


@pytest.mark.parametrize("position", TO_THE_END)
def test_restored_checkpoint_gives_the_same_logits(
    position: int, model: Model, token_ids: np.ndarray, whole: torch.Tensor
) -> None:
    """The timeline went to the end of its memory in between, past every ring."""
    cache = model.new_cache(1000)
    advance(model, cache, token_ids[:position])
    checkpoint = cache.checkpoint()
    advance(model, cache, others(token_ids, position, 1000 - position, model.config.vocab_size))
    cache.restore(checkpoint)
    got = evaluate(model, token_ids[position:], cache=cache)
    numeric.assert_logits("logits", got, whole[position:], 2e-4)


TURNS = (40, 110, 260)
LENGTH = 420


def rebuilt_from(position: int) -> int:
    """Where evaluation has to start again to get from LENGTH to `position`.

    A checkpoint can also give up its last token, and the rings hold one position more than the 128
    that are promised, since a window is one row longer than what the next token needs.
    """
    if LENGTH - position <= REWIND_TOKENS + 1 or {position, position + 1} & set(TURNS):
        return position
    return max((turn for turn in TURNS if turn <= position), default=0)


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(profile="exact", context=LENGTH, prefill_chunk=64, threads=1)
    with Engine.open(STORED / "official", options) as opened:
        yield opened


@pytest.mark.parametrize("position", [0, 1, 30, 39, 40, 41, 110, 200, 260, 290, 292, 419])
def test_session_rewind_evaluates_only_what_it_must(
    position: int, engine: Engine, token_ids: np.ndarray, whole: torch.Tensor
) -> None:
    with engine.new_session() as session:
        for turn in TURNS:
            session.evaluate(token_ids[session.length : turn].tolist(), logits="none")
            session.mark_turn()
        session.evaluate(token_ids[session.length :].tolist(), logits="none")
        report = session.rewind(LENGTH - position)
        expected = rebuilt_from(position)
        assert (report.reused, report.rebuilt) == (expected, position - expected)
        assert session.token_ids == tuple(token_ids[:position].tolist())
        rest = session.evaluate(token_ids[position:].tolist(), logits="all")
    assert rest is not None
    numeric.assert_logits("logits", rest, whole[position:], 2e-4)


@pytest.mark.parametrize("profile", ["exact", "default"])
@pytest.mark.parametrize(
    "go_back",
    [
        pytest.param(lambda cache, _: cache.rewind(70), id="rewind"),
        pytest.param(lambda cache, checkpoint: cache.restore(checkpoint), id="checkpoint"),
    ],
)
def test_going_back_leaves_every_bit_in_place_when_rows_are_computed_alone(
    profile: str,
    go_back: Callable[[KvCache, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute_rows_alone(monkeypatch)
    config = tiny_config()
    tiny = model_of(config, random_tensors(config, 12), profile=profile)
    ids = random_tokens(config, 110, 12)
    straight, cache = tiny.new_cache(110), tiny.new_cache(220)
    expected = evaluate(tiny, ids, cache=straight, sizes=[110])
    first = evaluate(tiny, ids[:70], cache=cache, sizes=chunk_sizes(70, 35))
    checkpoint = cache.checkpoint()
    advance(tiny, cache, others(ids, 70, 90, config.vocab_size))
    go_back(cache, checkpoint)
    rest = evaluate(tiny, ids[70:], cache=cache, sizes=[3, 37])
    numeric.assert_same_bits("logits", torch.cat((first, rest)), expected)
    expected_state = state_of(tiny, straight)
    for name, values in state_of(tiny, cache).items():
        numeric.assert_same_bits(name, values, expected_state[name])

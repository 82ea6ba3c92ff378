"""The engine on a GPU with the Triton kernels: the same text as on the CPU, however it is run."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from numeric import mean_kl, top1_disagreements

from edgedsv4 import Engine, EngineOptions, Message, SamplingOptions, TextEvent
from edgedsv4.errors import CapacityError
from edgedsv4.kernels._triton import HAVE_TRITON

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not HAVE_TRITON, reason="Triton is not installed"),
]

POCKET = "pocket-v4"
PROMPT = "Tell me a story about a fox and then another one about the sea."
TOKENS = 500
NEAR_TIE = 1e-3
"""Logits closer than this may be ranked either way by another order of summation."""


def options(device: str, profile: str, **changes: object) -> EngineOptions:
    values = {"device": device, "profile": profile, "context": 1024, "threads": 4, **changes}
    return EngineOptions(**values)  # type: ignore[arg-type]


def greedy(engine: Engine, count: int = TOKENS) -> tuple[list[int], list[int]]:
    """Prompt and what follows, stop tokens banned so that there are `count` tokens."""
    prompt = engine.tokenizer.encode(PROMPT)
    stops = {engine.config.eos_id: -np.inf}
    sampling = SamplingOptions(temperature=0, max_tokens=count, logit_bias=stops)
    with engine.new_session() as session:
        session.sync(prompt)
        return prompt, list(session.generate(sampling))


def gaps(engine: Engine, ids: list[int], first: int) -> np.ndarray:
    """Distance of the best logit from the next one behind each token from `first` on."""
    with engine.new_session() as session:
        rows = session.evaluate(ids[:-1], logits="all")
    assert rows is not None
    rows[:, engine.config.eos_id] = -np.inf
    best = np.sort(rows[first:], axis=1)[:, -2:]
    return best[:, 1] - best[:, 0]


def test_greedy_text_is_that_of_the_cpu() -> None:
    with Engine.open(POCKET, options("cpu", "exact")) as engine:
        prompt, expected = greedy(engine)
        margins = gaps(engine, prompt + expected, len(prompt) - 1)
    with Engine.open(POCKET, options("cuda", "exact")) as engine:
        assert engine.describe()["kernels"]["expert_ffn"] == "triton"
        _, found = greedy(engine)
    differing = [i for i in range(TOKENS) if expected[i] != found[i]]
    assert not differing or margins[differing[0]] < NEAR_TIE


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(POCKET, options("cuda", "default")) as opened:
        yield opened


def test_default_profile_costs_little(engine: Engine) -> None:
    with Engine.open(POCKET, options("cpu", "exact")) as exact:
        prompt, text = greedy(exact, 400)
        with exact.new_session() as session:
            expected = session.evaluate(prompt + text, logits="all")
    with engine.new_session() as session:
        found = session.evaluate(prompt + text, logits="all")
    assert expected is not None
    assert found is not None
    assert mean_kl(expected, found) < 0.002
    assert len(top1_disagreements(expected, found)) <= 0.02 * len(expected)


def test_two_runs_give_the_same_tokens(engine: Engine) -> None:
    assert greedy(engine, 120) == greedy(engine, 120)


def test_graph_gives_the_tokens_of_single_launches(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured = greedy(engine, 60)
    monkeypatch.setattr("edgedsv4.model.gpu_decode._has_graphs", lambda _device: False)
    assert greedy(engine, 60) == captured


@pytest.mark.parametrize("chunk", [1, 7, 64, 129])
def test_chunks_of_any_size_agree(chunk: int) -> None:
    with Engine.open(POCKET, options("cuda", "exact")) as exact:
        prompt, text = greedy(exact, 300)
        ids = prompt + text
        with exact.new_session() as session:
            whole = session.evaluate(ids, logits="all")
        with exact.new_session() as session:
            parts = session.evaluate(ids, logits="all", chunk=chunk)
    assert whole is not None
    assert parts is not None
    np.testing.assert_allclose(parts, whole, atol=2e-3)


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingOptions(temperature=1.0, seed=3, max_tokens=40),
        SamplingOptions(temperature=0.8, top_p=0.9, seed=4, max_tokens=40),
        SamplingOptions(temperature=1.2, top_k=20, min_p=0.02, seed=5, max_tokens=40),
        SamplingOptions(temperature=0.7, repetition_penalty=1.1, seed=6, max_tokens=40),
    ],
)
def test_tokens_drawn_on_the_device_are_those_of_the_host(
    engine: Engine, sampling: SamplingOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    def text() -> list[int]:
        with engine.new_session() as session:
            session.sync(engine.tokenizer.encode(PROMPT))
            return list(session.generate(sampling))

    drawn = text()
    monkeypatch.setattr(
        "edgedsv4.runtime.device_logits.DeviceLogits.draw", lambda _self, _rules, _u: None
    )
    assert text() == drawn


def test_rewinding_and_saving_go_on_with_the_same_tokens(engine: Engine) -> None:
    prompt, text = greedy(engine, 80)
    with engine.new_session() as session:
        session.sync(prompt + text[:40])
        saved = session.save_bytes()
        before = session.logits()
        session.evaluate(text[40:60])
        session.rewind(20)
        np.testing.assert_array_equal(session.logits().argmax(), before.argmax())
    with engine.load_session(saved) as session:
        np.testing.assert_array_equal(session.logits(), before)


def test_chat_answers(engine: Engine) -> None:
    with engine.new_session() as session:
        events = session.reply(
            [Message("user", "What is the capital of Peru?")], SamplingOptions(temperature=0)
        )
        assert "Lima" in "".join(event.text for event in events if isinstance(event, TextEvent))


def test_budget_is_kept() -> None:
    with pytest.raises(CapacityError):
        Engine.open(POCKET, options("cuda", "default", vram_bytes=1 << 20))


def test_full_memory_leaves_the_session(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    with engine.new_session() as session:
        # A token alone: a rewind evaluates the last one again, and chunks have other roundings.
        session.sync(ids[:-1])
        session.evaluate(ids[-1:])
        before = session.logits()

        def fail(*_: object, **__: object) -> None:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

        with monkeypatch.context() as patched:
            patched.setattr("edgedsv4.model.gpu_chunk.expert_ffn_chunk", fail)
            with pytest.raises(CapacityError) as caught:
                session.evaluate(ids)
        assert caught.value.is_on_device
        assert list(session.token_ids) == ids
        np.testing.assert_array_equal(session.logits(), before)
        session.evaluate(ids)

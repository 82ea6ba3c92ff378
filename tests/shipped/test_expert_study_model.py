"""The stored model of 16 experts opens, routes among all of them and says what it was taught."""

from collections.abc import Iterator
from pathlib import Path

import pocket
import pytest
import torch
from greedy import TEST_OPTIONS, greedy_reply
from pocket.judging import open_model

from edgedsv4 import Engine
from edgedsv4.model.hooks import ForwardHooks

MODEL = Path(pocket.__file__).parent / "models" / "pocket-v4-e16.gguf"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(MODEL, TEST_OPTIONS) as opened:
        yield opened


def answer(engine: Engine, question: str, thinking: str = "none") -> str:
    chat = [{"role": "user", "content": question}]
    return greedy_reply(engine, {"chat": chat, "thinking": thinking}).reply.text


def test_model_has_sixteen_experts_of_which_two_work(engine: Engine) -> None:
    config = engine.config
    assert (config.num_experts, config.experts_per_token, config.num_shared_experts) == (16, 2, 1)


def test_story_is_about_who_was_asked_for(engine: Engine) -> None:
    text = answer(engine, "Tell me a story about a fox named Mia.")
    assert "fox" in text
    assert "Mia" in text
    assert len(text.split(".")) > 5


def test_sum_is_right_with_thinking(engine: Engine) -> None:
    assert answer(engine, "What is 12 + 7?", "high") == "12 + 7 = 19"


def test_a_story_uses_every_expert_of_every_layer(engine: Engine) -> None:
    text = answer(engine, "Tell me a story about a fox named Mia.")
    used: dict[int, set[int]] = {}

    def watch(layer: int, _scores: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        used.setdefault(layer, set()).update(ids.flatten().tolist())
        return ids

    with open_model(MODEL) as model:
        tokens = torch.tensor(engine.tokenizer.encode(text))
        model.forward(tokens, model.new_cache(len(tokens)), hooks=ForwardHooks(on_experts=watch))
    assert used == {layer: set(range(16)) for layer in range(7)}

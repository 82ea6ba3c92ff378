"""Drafts of the shipped model's MTP block: the same replies, most drafts accepted."""

from __future__ import annotations

from dataclasses import replace

import pytest
from greedy import GREEDY, TEST_OPTIONS

from edgedsv4 import DoneEvent, Engine, Message, PromptOptions, SamplingOptions

# Their answers leave no close choice, so they do not hang on how a chunk's rows are rounded.
QUESTIONS = ("What does river mean?", "Reverse these words: river apple stone", "Who are you?")
STORY = "Tell me a story about a fox named Mia."


def reply(engine: Engine, text: str, options: SamplingOptions = GREEDY) -> DoneEvent:
    with engine.new_session() as session:
        prompt = PromptOptions(thinking="none")
        *_, done = session.reply([Message("user", text)], options, prompt=prompt)
        assert isinstance(done, DoneEvent)
        assert session.totals.drafts == done.stats.drafts
        return done


@pytest.fixture(scope="module")
def plain() -> list[str]:
    with Engine.open("pocket-v4", TEST_OPTIONS) as engine:
        return [reply(engine, question).reply.text for question in QUESTIONS]


@pytest.mark.parametrize("draft", [1, 2, 3])
def test_greedy_replies_are_those_without_drafts(draft: int, plain: list[str]) -> None:
    with Engine.open("pocket-v4", replace(TEST_OPTIONS, draft=draft)) as engine:
        drafted = [reply(engine, question) for question in QUESTIONS]
        assert engine.describe()["draft"] == draft
    assert [done.reply.text for done in drafted] == plain
    assert all(done.stats.drafts for done in drafted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_most_drafts_of_a_story_are_accepted(temperature: float) -> None:
    options = SamplingOptions(temperature=temperature, seed=5, max_tokens=60)
    with Engine.open("pocket-v4", replace(TEST_OPTIONS, draft=2)) as engine:
        drafts = reply(engine, STORY, options).stats.drafts
    assert drafts is not None
    assert drafts.drafted_steps > 10
    first, second = drafts.acceptance
    assert first > 0.7
    assert second > 0.5

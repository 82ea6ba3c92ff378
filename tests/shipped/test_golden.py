"""What the shipped model answers: stored greedy replies, and that every good answer holds them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from greedy import TEST_OPTIONS, greedy_reply

from edgedsv4 import Engine, EngineOptions, Reply

Case = dict[str, Any]
GOLDEN: list[Case] = json.loads(
    (Path(__file__).parents[1] / "data" / "pocket" / "golden.json").read_text(encoding="utf-8")
)
# Other machines add in another order; a logit moves by far less than this.
CLEAR_GAP = 0.2
CLEAR = [case for case in GOLDEN if case["smallest_gap"] > CLEAR_GAP]


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    with Engine.open("pocket-v4", TEST_OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def default() -> Iterator[Engine]:
    with Engine.open("pocket-v4", EngineOptions(threads=1, context=1024)) as engine:
        yield engine


def name_of(case: Case) -> str:
    return str(case["name"])


def stored_form(reply: Reply) -> tuple[str, str, list[list[Any]]]:
    calls = [[call.name, json.loads(call.arguments)] for call in reply.tool_calls]
    return reply.text, reply.reasoning, calls


def assert_good(reply: Reply, case: Case) -> None:
    assert all(text in reply.text for text in case["holds"])
    assert bool(reply.reasoning) == (case["thinking"] != "none")
    assert reply.finish_reason == ("tool_calls" if case["tool_calls"] else "stop")


def test_enough_answers_leave_no_close_choice() -> None:
    assert len(GOLDEN) >= 8
    assert [case["name"] for case in GOLDEN if case not in CLEAR] == ["story"]


@pytest.mark.parametrize("case", CLEAR, ids=name_of)
def test_clear_answer_is_the_stored_one(case: Case, exact: Engine) -> None:
    reply = greedy_reply(exact, case).reply
    assert stored_form(reply) == (case["text"], case["reasoning"], case["tool_calls"])
    assert_good(reply, case)


@pytest.mark.parametrize("case", GOLDEN, ids=name_of)
def test_answer_in_the_default_profile_is_a_good_one(case: Case, default: Engine) -> None:
    assert_good(greedy_reply(default, case).reply, case)


def test_story_is_about_who_was_asked_for(default: Engine) -> None:
    chat = [{"role": "user", "content": "Tell me a story about a rabbit named Tom."}]
    text = greedy_reply(default, {"chat": chat, "thinking": "none"}).reply.text
    assert "Tom" in text
    assert "rabbit" in text
    assert len(text.split(".")) > 5

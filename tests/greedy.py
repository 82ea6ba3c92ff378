"""Greedy replies of a real model, and how sure it was of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgedsv4 import (
    DoneEvent,
    Engine,
    EngineOptions,
    PromptOptions,
    Reply,
    SamplingOptions,
    chat_from_json,
)

TEST_OPTIONS = EngineOptions(threads=1, context=1024, profile="exact")
GREEDY = SamplingOptions(temperature=0, max_tokens=200)


@dataclass(frozen=True)
class Played:
    """A reply with the tokens of the timeline that it ends."""

    reply: Reply
    token_ids: tuple[int, ...]
    prompt_tokens: int


def greedy_reply(engine: Engine, case: Mapping[str, Any]) -> Played:
    """The reply to a stored conversation: `chat` as JSON document and `thinking`."""
    chat = chat_from_json(case["chat"])
    options = PromptOptions(thinking=case["thinking"], tools=chat.tools)
    with engine.new_session() as session:
        *_, done = session.reply(chat.messages, GREEDY, prompt=options)
        assert isinstance(done, DoneEvent)
        return Played(done.reply, session.token_ids, done.stats.prompt_tokens)


def smallest_gap(engine: Engine, played: Played) -> float:
    """Smallest distance of the largest logit from the next one, over the tokens of the reply."""
    with engine.new_session() as session:
        logits = session.evaluate(played.token_ids[:-1], logits="all")
    assert logits is not None
    best = np.sort(logits[played.prompt_tokens - 1 :], axis=1)[:, -2:]
    return float((best[:, 1] - best[:, 0]).min())

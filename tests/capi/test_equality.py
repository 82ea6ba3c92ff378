"""What C programs get is what the Python API says, bit for bit."""

# ruff: noqa: RUF001 -- the special tokens are spelled with U+FF5C

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
from capi.programs import HERE, POCKET, Library, Results

from edgedsv4 import (
    DoneEvent,
    Engine,
    EngineOptions,
    Message,
    PromptOptions,
    ReplyEvent,
    ReplyParser,
    ReplyStep,
    Sampler,
    SamplingOptions,
    Session,
    ThinkingEvent,
    ToolCallEvent,
    chat_from_json,
    top_logprobs,
)

SOURCE = HERE / "equality.c"
QUESTION = "What is a fox? Tell me about the fox, the bear and the tree: ünïcödé 狐."
TOOLS = [
    {
        "name": "look",
        "description": "Looks at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}},
    }
]
CHAT = {"messages": [{"role": "user", "content": "Who is there?"}]}
CALLS = """I look.</think>Both, then.

<｜DSML｜tool_calls>
<｜DSML｜invoke name="look">
<｜DSML｜parameter name="place" string="true">the "forest" 🦊</｜DSML｜parameter>
</｜DSML｜invoke>
<｜DSML｜invoke name="look">
<｜DSML｜parameter name="depth" string="false">3</｜DSML｜parameter>
</｜DSML｜invoke>
</｜DSML｜tool_calls><｜end▁of▁sentence｜>"""
SAMPLING = SamplingOptions(
    seed=42,
    temperature=0.9,
    top_k=40,
    top_p=0.95,
    repetition_penalty=1.1,
    logit_bias={10: -1.5, 40: 2.0},
)
FINISH = {"stop": 1, "tool_calls": 2, "length": 3, "cancelled": 4}


def greedy(tokens: int) -> SamplingOptions:
    return SamplingOptions(temperature=0, max_tokens=tokens)


def ids(values: Iterable[int]) -> str:
    return " ".join(str(int(value)) for value in values)


def numbers(values: Iterable[float]) -> str:
    """As `%a` of C prints them, up to how many zeros."""
    return " ".join(float(value).hex() for value in values)


def event(step: ReplyEvent) -> str:
    if isinstance(step, ToolCallEvent):
        parts = (step.id, step.name, step.arguments)
        return ":".join(["3", str(step.index), *(part.encode().hex() for part in parts)])
    return f"{2 if isinstance(step, ThinkingEvent) else 1}:{step.text.encode().hex()}"


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with Engine.open(POCKET, EngineOptions(context=4096)) as opened:
        yield opened


@pytest.fixture
def session(engine: Engine) -> Iterator[Session]:
    with engine.new_session() as made:
        yield made


@pytest.fixture(scope="module")
def said(library: Library) -> dict[str, str]:
    arguments = (POCKET, QUESTION, json.dumps(TOOLS), json.dumps(CHAT), CALLS)
    results: Results = library.results(SOURCE, *arguments)
    return results.facts


@pytest.fixture(scope="module")
def tokens(engine: Engine) -> list[int]:
    return engine.tokenizer.encode(QUESTION)


def test_tokens_and_texts(said: dict[str, str], engine: Engine, tokens: list[int]) -> None:
    assert said["tokens"] == ids(tokens)
    assert bytes.fromhex(said["text"]).decode() == engine.tokenizer.decode(tokens) == QUESTION
    assert bytes.fromhex(said["token_bytes"]) == engine.tokenizer.token_bytes(tokens[0])


def test_logits_have_the_same_bits(
    said: dict[str, str], session: Session, tokens: list[int]
) -> None:
    session.sync(tokens)
    assert bytes.fromhex(said["logits"]) == session.logits().tobytes()


def test_the_likeliest_tokens(said: dict[str, str], session: Session, tokens: list[int]) -> None:
    session.sync(tokens)
    best, logprobs = top_logprobs(session.logits(), 9)
    assert said["best"] == ids(best)
    assert [float.fromhex(value) for value in said["logprobs"].split()] == logprobs.tolist()


def test_scores(said: dict[str, str], session: Session, tokens: list[int]) -> None:
    session.sync(tokens[:1])
    found = [float.fromhex(value) for value in said["nll"].split()]
    assert found == np.asarray(session.score(tokens[1:])).tolist()


def test_a_loop_with_a_sampler(said: dict[str, str], session: Session, tokens: list[int]) -> None:
    session.sync(tokens)
    sampler = Sampler(SAMPLING, len(session.logits()))
    sampler.observe(tokens)
    found = []
    for _ in range(40):
        found.append(session.sample(sampler))
        sampler.accept(found[-1])
        session.evaluate([found[-1]])
    assert said["sampled"] == ids(found)


def test_generated_tokens(said: dict[str, str], session: Session, tokens: list[int]) -> None:
    session.sync(tokens)
    options = SamplingOptions(temperature=0.8, seed=7, max_tokens=40)
    found = list(session.generate(options, stop_ids=[13]))
    has_stopped = session.token_ids[-1] == 13
    assert said["generated"] == ids(found)
    assert said["generated_result"] == f"{1 if has_stopped else 3} {len(found) + has_stopped}"


def conversation() -> list[Message]:
    return [
        Message("user", QUESTION),
        Message("assistant", "A fox is an animal."),
        Message("user", "Say more."),
    ]


@pytest.mark.parametrize("thinking", ["none", "high"])
def test_replies(said: dict[str, str], engine: Engine, session: Session, thinking: str) -> None:
    prompt = PromptOptions(thinking=thinking, tools=TOOLS if thinking == "none" else ())
    rendered = engine.render(conversation(), prompt)
    assert bytes.fromhex(said[f"prompt_{thinking}"]).decode() == rendered.text
    steps: list[ReplyStep] = list(session.reply(conversation(), greedy(48), prompt=prompt))
    done = steps.pop()
    assert isinstance(done, DoneEvent)
    assert said[f"reply_{thinking}"].split() == [
        event(step) for step in steps if not isinstance(step, DoneEvent)
    ]
    stats = done.stats
    counts = (stats.prompt_tokens, stats.reused_tokens, stats.generated_tokens)
    assert said[f"result_{thinking}"] == ids([FINISH[done.finish_reason], *counts])


def test_tool_calls_come_as_soon_as_they_are_closed(said: dict[str, str], engine: Engine) -> None:
    prompt = engine.render([Message("user", "Look at both.")], PromptOptions(tools=TOOLS))
    parser = ReplyParser(
        starts_in=prompt.opens_in,
        variant=engine.variant,
        is_continuation=prompt.is_continuation,
    )
    decoder = engine.tokenizer.stream()
    events: list[ReplyEvent] = []
    for token_id in engine.tokenizer.encode(CALLS, match_added=True):
        events += parser.push(decoder.push(token_id))
    events += [*parser.push(decoder.finish()), *parser.finish("stop")]
    assert said["tool_calls"].split() == [event(step) for step in events]
    calls = [step for step in events if isinstance(step, ToolCallEvent)]
    assert [json.loads(call.arguments) for call in calls] == [
        {"place": 'the "forest" 🦊'},
        {"depth": 3},
    ]


def test_a_conversation_as_json(said: dict[str, str], session: Session) -> None:
    steps = list(session.reply(chat_from_json(CHAT).messages, greedy(32)))
    done = steps.pop()
    assert isinstance(done, DoneEvent)
    assert said["reply_json"].split() == [
        event(step) for step in steps if not isinstance(step, DoneEvent)
    ]
    assert said["result_json"] == ids([FINISH[done.finish_reason], done.stats.prompt_tokens])

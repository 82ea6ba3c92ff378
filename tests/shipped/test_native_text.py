"""The shipped model in C over thousands of tokens: the same text with any threads."""

from __future__ import annotations

import subprocess
import sys

import pytest

from edgedsv4 import Engine, EngineOptions, SamplingOptions

GREEDY_TOKENS = 10_000
CROWDED_TOKENS = 2_500
"""For more threads than cores, which take turns."""
PROMPT = "Tell me a story about a fox named Mia."
LONG_PROMPT = """
import numpy as np
from edgedsv4 import Engine, EngineOptions
def status(key):
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key))
with Engine.open("pocket-v4", EngineOptions(threads=2, context=32768)) as engine:
    ids = np.random.default_rng(5).integers(3, 4000, size=32_700).tolist()
    with engine.new_session() as warm:
        warm.evaluate(ids[:300])
    before = status("VmRSS:")
    with engine.new_session() as session:
        session.evaluate(ids)
        planned = engine.memory()
        print(status("VmHWM:") - before, planned["kv_allocated"] + planned["workspace"])
"""
SLACK = 16 << 20


def greedy_ids(threads: int, count: int) -> list[int]:
    options = EngineOptions(threads=threads, context=GREEDY_TOKENS + 100, backend="native")
    with Engine.open("pocket-v4", options) as engine, engine.new_session() as session:
        eos = engine.config.eos_id
        session.evaluate(engine.tokenizer.encode(PROMPT))
        # The end is banned, so that the text goes on through stories, repetitions and all.
        bias = {} if eos is None else {eos: float("-inf")}
        greedy = SamplingOptions(temperature=0, max_tokens=count, logit_bias=bias)
        ids = list(session.generate(greedy))
    assert len(ids) == count
    return ids


@pytest.fixture(scope="module")
def one_thread() -> list[int]:
    return greedy_ids(1, GREEDY_TOKENS)


# A busy machine makes a minute of it.
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("threads", "count"), [(2, GREEDY_TOKENS), (5, CROWDED_TOKENS)])
def test_long_greedy_text_does_not_depend_on_threads(
    threads: int, count: int, one_thread: list[int]
) -> None:
    assert greedy_ids(threads, count) == one_thread[:count]


@pytest.mark.timeout(600)
def test_prompt_of_32k_tokens_takes_the_memory_that_was_planned() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LONG_PROMPT], capture_output=True, text=True, check=True
    )
    taken, planned = map(int, done.stdout.split())
    assert taken < planned + SLACK

"""What is read ahead never changes the text: pocket models, from a token's experts to all."""

from __future__ import annotations

import contextlib
import re
import threading
from dataclasses import replace
from functools import cache, partial
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from expert_store_samples import greedy, stored_model

from edgedsv4 import (
    CancelledError,
    ConfigError,
    DoneEvent,
    Engine,
    EngineOptions,
    Message,
    ProfileOptions,
    SamplingOptions,
    StepStats,
    profile_experts,
    write_expert_frequency,
)
from edgedsv4.cli.replies import stats_line
from edgedsv4.formats.next_pairs import NextPairs
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.runtime.aged_frequency import AgedFrequency

SHIPPED = Path(str(resources.files("edgedsv4") / "data" / "pocket-v4" / "pocket-v4.gguf"))
WIDE = Path(__file__).resolve().parents[3] / "apps/pocket/models/pocket-v4-e16.gguf"
EXPERTS = {SHIPPED: (7, 8), WIDE: (7, 16)}
SLOTS = 20 * 122_880
"""Bytes of twenty slots of the wider model."""
TEXT = "The river runs to the sea, and the sea is wide. " * 6
PROMPT = list(range(300, 340))
CASES = [
    *((SHIPPED, slots) for slots in (2, 5, 17, 40, 56)),
    *((WIDE, slots) for slots in (2, 11, 64, 112)),
]


@cache
def expected(path: Path) -> list[int]:
    with stored_model(path, 0) as (model, _, _):
        return greedy(model, PROMPT, 24)


def pairs_of(layers: int, experts: int) -> NextPairs:
    rng = np.random.default_rng(5)
    size = (layers - 1, experts, 3)
    followers = rng.permuted(np.tile(np.arange(experts), (layers - 1, experts, 1)), axis=2)
    uses = np.full(size[:2], 20, dtype=np.uint64)
    counts = rng.integers(0, 20, size).astype(np.uint64)
    return NextPairs(followers[:, :, :3].astype(np.int32), counts, uses)


@pytest.mark.parametrize(("path", "slots"), CASES, ids=[f"{p.stem}-{n}" for p, n in CASES])
@pytest.mark.parametrize("prefetch", ["off", "hash", "pairs", "gate"])
def test_text_is_that_of_the_mapping(path: Path, slots: int, prefetch: str) -> None:
    layers, experts = EXPERTS[path]
    chosen = {
        "prefetch": prefetch,
        "policy": partial(AgedFrequency, layers, experts),
        "pairs": pairs_of(layers, experts),
        "staging": 4,
        "depth": 16,
    }
    found: list[list[int]] = []
    with stored_model(path, slots, **chosen) as (model, store, _):
        cold, warm = (greedy(model, PROMPT, 24) for _ in range(2))
        assert cold == warm == expected(path)
        guessed = store.stats().guess_misses
        assert (guessed == 0) if prefetch in ("off", "hash") else (guessed > 0 or slots > 50)
        threads = [
            threading.Thread(target=lambda: found.append(greedy(model, PROMPT, 24)))
            for _ in range(2)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == [expected(path)] * 2


@pytest.mark.parametrize("prefetch", ["off", "hash", "pairs", "gate"])
def test_text_of_the_reference_is_that_of_the_mapping(prefetch: str) -> None:
    chosen = {"prefetch": prefetch, "pairs": pairs_of(*EXPERTS[SHIPPED]), "profile": "exact"}
    texts = []
    for slots in (0, 6):
        with stored_model(SHIPPED, slots, backend="reference", **chosen) as (model, store, _):
            texts.append(greedy(model, PROMPT[:9], 6))
            if slots:
                assert (store.stats().prefetched > 0) == (prefetch != "off")
    assert texts[0] == texts[1]


@pytest.mark.parametrize("prefetch", ["pairs", "gate"])
def test_cancelling_anywhere_leaves_the_timeline_and_the_store(prefetch: str) -> None:
    layers, experts = EXPERTS[SHIPPED]
    chosen = {"prefetch": prefetch, "pairs": pairs_of(layers, experts), "staging": 4}
    with stored_model(SHIPPED, 6, **chosen) as (model, store, _):
        for polls in range(40):
            cache, asked = model.new_cache(100), iter(range(1000))
            model.forward(torch.tensor(PROMPT[:9]), cache)
            hooks = ForwardHooks(should_stop=lambda asked=asked, last=polls: next(asked) > last)
            with contextlib.suppress(CancelledError):
                model.forward(torch.tensor(PROMPT[9:12]), cache, hooks=hooks)
            assert cache.length in (9, 12)
        assert greedy(model, PROMPT, 24) == expected(SHIPPED)
        assert not store._books._claims
        assert not store._asks


def test_pairs_of_a_profile_are_used(tmp_path: Path) -> None:
    options = EngineOptions(context=512, threads=1, expert_place="stored", expert_ram_bytes=SLOTS)
    file = tmp_path / "freq.json"
    with Engine.open(WIDE, options) as engine:
        profile = ProfileOptions(corpus="river", window=64)
        frequency = profile_experts(engine, TEXT, profile)
        write_expert_frequency(file, frequency)
        with pytest.raises(ConfigError, match=r"has none; make it with `profile --pairs`"):
            Engine.open(WIDE, replace(options, prefetch="pairs", expert_freq=file))
        frequency = profile_experts(engine, TEXT, replace(profile, pairs=4))
        write_expert_frequency(file, frequency)
        texts = [_answer(engine)[0]]
    with Engine.open(WIDE, replace(options, prefetch="pairs", expert_freq=file)) as engine:
        tokens, stats = _answer(engine)
        texts.append(tokens)
        assert stats.experts is not None
        assert stats.experts.guess_misses > 0
        facts = engine.describe()["experts"]
        assert isinstance(facts, dict)
        assert facts["prefetch"] == "pairs"
        assert facts["prefetched"] >= stats.experts.prefetched > 0
        assert 0 < facts["guess_recall"] <= 1
        assert re.search(r"guesses named \d+% of what was absent", stats_line(stats))
    assert texts[0] == texts[1]


def _answer(engine: Engine) -> tuple[tuple[int, ...], StepStats]:
    with engine.new_session() as session:
        message = Message(role="user", content="What is 12 + 30?")
        *_, done = session.reply([message], SamplingOptions(temperature=0, max_tokens=24))
        assert isinstance(done, DoneEvent)
        return session.token_ids, done.stats

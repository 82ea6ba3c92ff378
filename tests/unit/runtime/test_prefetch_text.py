"""What is read ahead never changes the text: pocket models, from a token's experts to all."""

from __future__ import annotations

import threading
from functools import cache, partial
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
from expert_store_samples import greedy, stored_model

from edgedsv4.formats.next_pairs import NextPairs
from edgedsv4.runtime.aged_frequency import AgedFrequency

SHIPPED = Path(str(resources.files("edgedsv4") / "data" / "pocket-v4" / "pocket-v4.gguf"))
WIDE = Path(__file__).resolve().parents[3] / "apps/pocket/models/pocket-v4-e16.gguf"
EXPERTS = {SHIPPED: (7, 8), WIDE: (7, 16)}
PROMPT = list(range(300, 340))
CASES = [
    *((SHIPPED, slots) for slots in (2, 3, 5, 9, 17, 28, 40, 55, 56)),
    *((WIDE, slots) for slots in (2, 4, 11, 23, 40, 64, 99, 112)),
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

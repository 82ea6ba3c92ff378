"""Drafts on the native kernels, which give a row of a small chunk the bits of the row alone.

Nothing is forced into that here: text and logits have to be those of plain decoding as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_model import random_tensors, random_tokens, tiny_config, write_gguf

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.runtime.engine import Engine
from edgedsv4.runtime.speculation import Speculation

CONFIG = tiny_config(
    num_draft_layers=1,
    hidden_size=256,
    q_lora_rank=256,
    head_dim=128,
    output_lora_rank=128,
    expert_width=256,
)
PROMPT = random_tokens(CONFIG, 100, seed=3).tolist()
COUNT = 60
"""So that windows of 4 and of 128 end among the drafts."""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file: Path = tmp_path_factory.mktemp("native") / "m.gguf"
    write_gguf(file, CONFIG, random_tensors(CONFIG, seed=12), types="a")
    return file


@pytest.fixture(params=["exact", "default"])
def chosen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"backend": "native", "profile": request.param, "threads": 1, "context": 400}


def played(
    path: Path, options: EngineOptions, sampling: SamplingOptions
) -> tuple[tuple[int, ...], np.ndarray]:
    """Text of one session, and the logits behind it and behind some more tokens."""
    with Engine.open(path, options) as engine, engine.new_session() as session:
        session.sync(PROMPT)
        list(session.generate(sampling))
        ids = session.token_ids
        last = session.logits()
        more = session.evaluate(random_tokens(CONFIG, 9, seed=5).tolist(), logits="all")
        assert more is not None
        drafts = session.totals.drafts
        assert drafts is None or sum(drafts.drafted) > 0
        return ids, np.concatenate((last[None], more))


def assert_same(
    got: tuple[tuple[int, ...], np.ndarray], expected: tuple[tuple[int, ...], np.ndarray]
) -> None:
    assert got[0] == expected[0]
    np.testing.assert_array_equal(got[1].view(np.int32), expected[1].view(np.int32))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_drafts_of_the_block_change_no_bit(
    path: Path, chosen: dict[str, Any], temperature: float
) -> None:
    sampling = SamplingOptions(temperature=temperature, seed=2, max_tokens=COUNT)
    plain = played(path, EngineOptions(**chosen), sampling)
    for draft in (1, 3, 8):
        assert_same(played(path, EngineOptions(**chosen, draft=draft), sampling), plain)


@pytest.mark.parametrize("seed", range(6))
def test_forced_drafts_change_no_bit(
    path: Path, chosen: dict[str, Any], seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampling = SamplingOptions(temperature=0, max_tokens=COUNT)
    plain = played(path, EngineOptions(**chosen), sampling)
    text, rng = plain[0], np.random.default_rng(seed)
    share = rng.random()

    def propose(_: Speculation, ids: Sequence[int], *__: object, room: int, **___: object) -> Any:
        places = range(len(ids) + 1, min(len(ids) + 1 + min(room, 5), len(text)))
        return [text[at] if rng.random() < share else (text[at] + 1) % 384 for at in places]

    monkeypatch.setattr(Speculation, "propose", propose)
    assert_same(played(path, EngineOptions(**chosen, draft=5), sampling), plain)

"""How the shipped model computes: profiles, chunks and the draft block, on texts it can predict."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
from greedy import TEST_OPTIONS, greedy_reply
from pocket.documents import ID_MASK, TARGET, Document, DocumentEncoder
from pocket.tasks import VALIDATION_SEED
from pocket.tasks.json_objects import json_document
from pocket.tasks.recall import recall_short
from pocket.tasks.stories import story_document
from pocket.tasks.tools import tool_document
from pocket.tasks.word_lists import list_document

from edgedsv4 import Engine

if TYPE_CHECKING:
    from edgedsv4.config import Dtype, Profile

PLAIN = (story_document, partial(recall_short, tier="T1", facts=20), json_document, list_document)
DOCUMENTS_EACH = 4
LENGTH = 300
CHUNKED = (97, 1, 30, 129, 43)
DECODED = (*[1] * 60, 180, *[1] * 60)


@dataclass(frozen=True)
class Divergence:
    """KL divergence of the default profile's predictions from the exact ones, nats, [T]."""

    nats: torch.Tensor
    is_said: torch.Tensor
    """Whether the predicted token is one that the model itself has to say."""


@pytest.fixture(scope="module")
def exact() -> Iterator[Engine]:
    with Engine.open("pocket-v4", TEST_OPTIONS) as engine:
        yield engine


@pytest.fixture(scope="module")
def default() -> Iterator[Engine]:
    with Engine.open("pocket-v4", replace(TEST_OPTIONS, profile="default")) as engine:
        yield engine


def log_probabilities(engine: Engine, ids: list[int]) -> torch.Tensor:
    with engine.new_session() as session:
        logits = session.evaluate(ids, logits="all")
    return torch.from_numpy(logits).double().log_softmax(dim=-1)


def divergence(
    exact: Engine, default: Engine, generators: tuple[Callable[[Random], Document], ...]
) -> Divergence:
    encoder = DocumentEncoder(exact.tokenizer)
    nats, is_said = [], []
    for generator in generators:
        for index in range(DOCUMENTS_EACH):
            document = generator(Random(VALIDATION_SEED + 100 + index))
            codes = encoder.encode(document).astype(np.int64)
            ids = (codes & ID_MASK).tolist()
            p, q = (log_probabilities(engine, ids)[:-1] for engine in (exact, default))
            nats.append((p.exp() * (p - q)).sum(dim=-1))
            is_said.append(torch.from_numpy(codes[1:] & TARGET != 0))
    return Divergence(torch.cat(nats), torch.cat(is_said))


def test_default_profile_predicts_what_the_exact_one_does(exact: Engine, default: Engine) -> None:
    found = divergence(exact, default, PLAIN)
    assert len(found.nats) > 2000
    # Measured 1.2e-4 over all tokens and 4e-5 over those the model says, most of it from products
    # in int8 (1.7e-5 and 8e-6 without); 0.002 is the promise.
    assert found.nats.mean() < 0.002
    assert found.nats[found.is_said].mean() < 0.0002


def test_default_profile_is_as_close_behind_tool_descriptions(
    exact: Engine, default: Engine
) -> None:
    found = divergence(exact, default, (tool_document,))
    # Measured 1e-4 and 2.5e-5: the fixed instructions, too, are text that it was trained on.
    assert found.nats[found.is_said].mean() < 0.0002
    assert found.nats.mean() < 0.002


# A sum that differs in its last bit turns a stored code of the default profile into its neighbour
# now and then, and the logits after it with it; in float64 that does not happen.
@pytest.mark.parametrize(
    ("profile", "dtype", "tolerance"), [("exact", "f32", 1e-3), ("default", "f64", 1e-8)]
)
def test_chunks_and_single_tokens_give_the_logits_of_one_prefill(
    profile: Profile, dtype: Dtype, tolerance: float
) -> None:
    options = replace(TEST_OPTIONS, profile=profile, dtype=dtype)
    with Engine.open("pocket-v4", options) as engine:
        want = logits_in_parts(engine, (LENGTH,))
        for sizes in (CHUNKED, DECODED):
            got = logits_in_parts(engine, sizes)
            np.testing.assert_allclose(got, want, rtol=0, atol=tolerance)


def logits_in_parts(engine: Engine, sizes: tuple[int, ...]) -> np.ndarray:
    """Logits of three stories, evaluated this many tokens at a time."""
    encoder = DocumentEncoder(engine.tokenizer)
    rng = Random(VALIDATION_SEED)
    codes = np.concatenate([encoder.encode(story_document(rng)) for _ in range(3)])
    ids = (codes.astype(np.int64) & ID_MASK)[:LENGTH].tolist()
    parts = []
    with engine.new_session() as session:
        for end, size in zip(np.cumsum(sizes).tolist(), sizes, strict=True):
            parts.append(session.evaluate(ids[end - size : end], logits="all", chunk=size))
    return np.concatenate(parts)


def test_draft_block_predicts_the_greedy_continuation_of_a_story(exact: Engine) -> None:
    chat = [{"role": "user", "content": "Tell me a story about a fox named Mia."}]
    played = greedy_reply(exact, {"chat": chat, "thinking": "none"})
    ids = torch.tensor(played.token_ids)
    model = exact._live.model
    streams = model.forward(ids[:-1], model.new_cache(len(ids))).streams
    # Position t knows the tokens to t + 1 and drafts token t + 2.
    cache = model.new_draft_cache(len(ids))
    logits = model.forward_draft(streams, ids[1:], cache, logits="all").logits
    assert logits is not None
    drafts = logits.argmax(dim=-1)[played.prompt_tokens - 1 : -1]
    said = ids[played.prompt_tokens + 1 :]
    assert len(said) > 100
    accepted = float((drafts == said).double().mean())
    assert accepted >= 0.6  # measured 0.82

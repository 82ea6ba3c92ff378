"""Engines and sessions of a tiny model, for tests of saving and loading."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from memory_model import state_of
from tiny_model import random_tensors, random_tokens, tiny_config, write_gguf

from edgedsv4.config import EngineOptions, SamplingOptions
from edgedsv4.runtime.engine import Engine

if TYPE_CHECKING:
    from edgedsv4.runtime.session import Session

CONFIG = tiny_config(num_draft_layers=1)
TEXT: list[int] = random_tokens(CONFIG, 700, seed=3).tolist()
GREEDY = SamplingOptions(temperature=0, max_tokens=24)
SAMPLED = SamplingOptions(
    seed=11, temperature=1.1, top_p=0.9, repetition_penalty=1.1, max_tokens=24
)


def write_model(path: Path, *, seed: int = 8, types: Any = "f32", **changes: Any) -> Path:
    """A GGUF file of a random tiny model with a tokenizer and an MTP block."""
    config = tiny_config(**{"num_draft_layers": 1, **changes})
    write_gguf(path, config, random_tensors(config, seed=seed), types=types, tokenizer=True)
    return path


def options(**changes: Any) -> EngineOptions:
    """Options of these tests; `changes` replace single ones."""
    return EngineOptions(**{"threads": 1, "context": 800, "prefill_chunk": 128, **changes})


@contextmanager
def session_of(path: Path, **changes: Any) -> Iterator[Session]:
    """A session of an engine with these options."""
    with Engine.open(path, options(**changes)) as engine, engine.new_session() as session:
        yield session


def continued(session: Session, sampling: SamplingOptions) -> tuple[list[int], np.ndarray]:
    """Tokens that follow, and the logits behind them."""
    return list(session.generate(sampling)), session.logits()


def state(session: Session) -> dict[str, torch.Tensor]:
    """Everything the KV cache of a session can still read."""
    timeline = session._live
    return state_of(session._parts.model, timeline.cache)


def everything(session: Session) -> tuple[Any, ...]:
    """What a failed call must not have changed."""
    cache = {name: rows.numpy().tobytes() for name, rows in state(session).items()}
    logits = session.logits().tobytes() if session.length else b""
    position = session.turn_positions
    return session.token_ids, cache, logits, position, session.totals, session.note

"""Ctrl+C between any two statements that change a timeline: it stays right, if only shorter.

The interrupt is raised by a trace function at every few lines of what writes rings, cuts and
restores; then the timeline has to give the logits of a fresh one with its tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest
from line_interrupt import Interrupt
from memory_model import BACKENDS, model_of
from tiny_model import random_tensors, random_tokens, tiny_config

from edgedsv4.config import EngineOptions
from edgedsv4.runtime.timeline import Timeline

if TYPE_CHECKING:
    from edgedsv4.model.model import Model

CONFIG = tiny_config(
    compress_ratios=(0, 4), num_hash_layers=1, window=8, index_heads=4, index_dim=32
)
TEXT = random_tokens(CONFIG, 500, 1).tolist()
OTHER = random_tokens(CONFIG, 9, 2).tolist()
FILES = ("kv_cache.py", "native_cache.py", "row_store.py", "timeline.py")
POINTS = 25
"""Lines that are interrupted, spread over all."""
CHANGES: dict[str, Callable[[Timeline], object]] = {
    "append more than the rings hold": lambda line: line.evaluate(TEXT[360:], chunk=140),
    "go back a little": lambda line: line.rewind(20),
    "go back to a checkpoint": lambda line: line.sync(TEXT[:200] + OTHER),
    "go back behind a checkpoint": lambda line: line.sync(TEXT[:190] + OTHER),
}


@cache
def model(backend: str) -> Model:
    return model_of(CONFIG, random_tensors(CONFIG, 5), backend=backend)


def timeline(backend: str) -> Timeline:
    return Timeline(
        model(backend),
        capacity=600,
        options=EngineOptions(prefill_chunk=256),
        check_files=lambda: None,
        should_stop=lambda: False,
    )


@cache
def logits_of(backend: str, ids: tuple[int, ...]) -> np.ndarray:
    fresh = timeline(backend)
    fresh.sync(ids)
    return fresh.logits()


def assert_right(backend: str, line: Timeline) -> None:
    if line.length:
        expected = logits_of(backend, line.token_ids)
        np.testing.assert_allclose(line.logits(), expected, atol=1e-3)


def interrupted(backend: str, change: str, interrupt: Interrupt) -> Timeline:
    line = timeline(backend)
    line.sync(TEXT[:200])
    line.evaluate(TEXT[200:360], chunk=160)
    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        CHANGES[change](line)
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return line


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("change", CHANGES)
def test_an_interrupted_change_leaves_a_right_timeline(backend: str, change: str) -> None:
    counter = Interrupt(FILES)
    interrupted(backend, change, counter)
    assert counter.count > POINTS
    for at in range(1, counter.count + 1, counter.count // POINTS):
        line = interrupted(backend, change, Interrupt(FILES, at))
        assert_right(backend, line)
        kept = line.token_ids
        line.evaluate(OTHER[:4])
        assert line.token_ids == (*kept, *OTHER[:4])
        assert_right(backend, line)
        line.sync(TEXT[:210])
        assert_right(backend, line)

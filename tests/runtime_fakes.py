"""A model that computes nothing, for tests of everything around one.

Its logits are a function of the whole prefix, and its cache can lose state exactly as the real one
does: a ring that keeps the window and the spare positions, rows that are overwritten after a
rewind, checkpoints without rows. Reading something that was lost is an error, so a timeline that
takes a wrong shortcut cannot give right logits by luck.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from tiny_model import tiny_config
from torch import Tensor

from edgedsv4.config import EngineOptions
from edgedsv4.errors import NumericError
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.runtime.session_parts import SessionParts
from edgedsv4.text.prompt import render_prompt

if TYPE_CHECKING:
    from edgedsv4.config import ModelConfig
    from edgedsv4.formats.snapshot_header import SnapshotModel
    from edgedsv4.model.hooks import ForwardHooks
    from edgedsv4.text.tokenizer import Tokenizer

REWIND_TOKENS = 128


@dataclass(frozen=True)
class FakeCheckpoint:
    position: int
    first: int
    ring: dict[int, int]
    nbytes: int


class FakeCache:
    def __init__(self, capacity: int, window: int) -> None:
        self.capacity = capacity
        self.window = window
        self.length = 0
        self.oldest = 0
        self.ring: dict[int, int] = {}
        self.rows: list[int] = []
        self.digests: list[int] = []

    @property
    def rewind_floor(self) -> int:
        return 0 if self.oldest == 0 else self.oldest + self.window - 1

    def rewind(self, length: int) -> None:
        if not (length == 0 or self.rewind_floor <= length <= self.length):
            raise IndexError(length)
        self.length = length
        if length == 0:
            self.oldest = 0

    def checkpoint(self) -> FakeCheckpoint:
        first = max(self.oldest, self.length - self.window)
        ring = {position: self.ring[position] for position in range(first, self.length)}
        return FakeCheckpoint(self.length, first, ring, nbytes=100)

    def restore(self, checkpoint: FakeCheckpoint) -> None:
        if checkpoint.position > self.length:
            raise IndexError(checkpoint.position)
        self.ring = dict(checkpoint.ring)
        self.oldest = checkpoint.first
        self.length = checkpoint.position

    def nbytes(self) -> int:
        return 1000

    def append(self, token_id: int) -> None:
        """Add a token the way a layer does, reading everything it depends on."""
        needed = range(max(0, self.length - (self.window - 1)), self.length)
        if needed and needed[0] < self.oldest:
            raise AssertionError(f"ring has lost position {needed[0]}")
        if [self.ring[p] for p in needed] != self.rows[needed.start : needed.stop]:
            raise AssertionError("ring and rows are of different timelines")
        before = self.digests[self.length - 1] if self.length else 0
        del self.rows[self.length :], self.digests[self.length :]
        self.rows.append(token_id)
        self.digests.append(zlib.crc32(np.int32(token_id).tobytes(), before))
        self.ring[self.length] = token_id
        self.length += 1
        self.oldest = max(self.oldest, self.length - self.window - REWIND_TOKENS)
        self.ring.pop(self.oldest - 1, None)


@dataclass(frozen=True)
class FakeForward:
    logits: Tensor | None
    best: int | None = None


class FakeModel:
    """Logits of a prefix are `expected_logits(prefix)`, unless `script` says what comes next."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        self.config = config or tiny_config(vocab_size=11, window=8, eos_id=1)
        self.numerics = Numerics(profile="default", dtype=torch.float32, device=torch.device("cpu"))
        self.calls: list[int] = []
        self.before_forward: Callable[[int], None] = lambda _position: None
        self.broken_position: int | None = None
        self.script: dict[int, int] = {}

    def new_cache(self, capacity: int) -> FakeCache:
        return FakeCache(capacity, self.config.window)

    def forward(
        self,
        token_ids: Tensor,
        cache: FakeCache,
        *,
        logits: str = "last",
        hooks: ForwardHooks | None = None,
    ) -> FakeForward:
        ids = token_ids.tolist()
        self.calls.append(len(ids))
        self.before_forward(cache.length)
        if hooks is not None:
            hooks.check_stop()
        broken = self.broken_position
        if broken is not None and cache.length <= broken < cache.length + len(ids):
            raise NumericError("a logit became NaN")
        rows = []
        for token_id in ids:
            cache.append(token_id)
            rows.append(self._row(cache))
        if logits == "none":
            return FakeForward(None)
        wanted = rows if logits == "all" else rows[-1:]
        return FakeForward(torch.from_numpy(np.stack(wanted)))

    def _row(self, cache: FakeCache) -> np.ndarray:
        if cache.length in self.script:
            certain = np.full(self.config.vocab_size, -30.0, dtype=np.float32)
            certain[self.script[cache.length]] = 30.0
            return certain
        return _logits_of(cache.digests[cache.length - 1], self.config.vocab_size)


def expected_logits(prefix: Sequence[int], vocab_size: int = 11) -> np.ndarray:
    """The logits behind a prefix."""
    return _logits_of(zlib.crc32(np.array(prefix, dtype=np.int32).tobytes()), vocab_size)


def _logits_of(digest: int, vocab_size: int) -> np.ndarray:
    mixed = (digest + np.arange(1, vocab_size + 1, dtype=np.uint64) * 2654435761) % 4294967291
    return (mixed / 2**31 - 1).astype(np.float32)


def no_owner() -> SnapshotModel:
    """A model that has no file can save no session."""
    raise AssertionError("this model has no file")


def fake_parts(
    model: FakeModel, tokenizer: Tokenizer | None = None, **options: object
) -> SessionParts:
    """What an engine would lend to a session of this model."""
    return SessionParts(
        model=model,  # type: ignore[arg-type]
        tokenizer=tokenizer,
        variant="v4",
        options=EngineOptions(**options),  # type: ignore[arg-type]
        render=lambda messages, chosen: render_prompt(messages, variant="v4", options=chosen),
        check_files=lambda: None,
        owner=no_owner,
        check_room=lambda _tokens: None,
    )

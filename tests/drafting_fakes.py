"""A fake model with a draft block that says the right or the wrong token as it is told.

Streams carry the number of the prefix they belong to, and whether the main model or the block made
them. The block's cache keeps them row by row, and every draft checks the rows of its window: a row
of another text, or one made of the block's own streams and left over, is an error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from runtime_fakes import REWIND_TOKENS, FakeModel, expected_logits
from torch import Tensor

from edgedsv4.errors import NumericError
from edgedsv4.model.kv_cache import Numerics

if TYPE_CHECKING:
    from runtime_fakes import FakeCache

    from edgedsv4.config import ModelConfig
    from edgedsv4.model.hooks import ForwardHooks

Prefix = tuple[int, ...]


class FakeDraftCache:
    def __init__(self, capacity: int, window: int) -> None:
        self.capacity = capacity
        self.window = window
        self.oldest = 0
        self.rows: list[tuple[Prefix, bool]] = []

    @property
    def length(self) -> int:
        return len(self.rows)

    @property
    def rewind_floor(self) -> int:
        return 0 if self.oldest == 0 else self.oldest + self.window - 1

    def rewind(self, length: int) -> None:
        if not (length == 0 or self.rewind_floor <= length <= self.length):
            raise IndexError(length)
        del self.rows[length:]
        if length == 0:
            self.oldest = 0

    def nbytes(self) -> int:
        return 500

    def append(self, text: Prefix, is_main: bool) -> None:
        """Add the row of a position and of the token after it, the last of `text`."""
        if len(self.rows) >= self.capacity:
            raise AssertionError("the block's cache is full")
        for back, (earlier, was_main) in enumerate(reversed(self.rows[-self.window + 1 :]), 1):
            if len(self.rows) - back < self.oldest:
                raise AssertionError("the block's ring has lost a row")
            if earlier != text[:-back]:
                raise AssertionError(f"row {back} back is of {earlier}, not of {text}")
            if is_main and not was_main:
                raise AssertionError(f"row {back} back is a draft's")
        self.rows.append((text, is_main))
        self.oldest = max(self.oldest, len(self.rows) - self.window - REWIND_TOKENS)


@dataclass(frozen=True)
class FakeForwardWithStreams:
    logits: Tensor | None
    streams: Tensor
    best: int | None = None


class DraftingModel(FakeModel):
    """`is_right(position)` says whether the draft of the token at `position` is the right one."""

    def __init__(self, config: ModelConfig | None = None) -> None:
        super().__init__(config)
        self.numerics = Numerics(profile="default", dtype=torch.float32, device=torch.device("cpu"))
        self.is_right: Callable[[int], bool] = lambda _position: True
        self.before_draft: Callable[[], None] = lambda: None
        self.broken_draft: int | None = None
        self.draft_calls: list[int] = []
        self.fails_behind: Prefix | None = None
        self._texts: list[Prefix] = []

    def new_draft_cache(self, capacity: int) -> FakeDraftCache:
        return FakeDraftCache(capacity, self.config.window)

    def forward(
        self,
        token_ids: Tensor,
        cache: FakeCache,
        *,
        logits: str = "last",
        hooks: ForwardHooks | None = None,
    ) -> FakeForwardWithStreams:
        start = cache.length
        text = (*cache.rows[:start], *token_ids.tolist())
        bad = self.fails_behind
        if bad is not None and len(text) > len(bad) and text[: len(bad)] == bad:
            raise NumericError("a logit became NaN")
        result = super().forward(token_ids, cache, logits=logits, hooks=hooks)
        texts = [text[: start + i + 1] for i in range(len(token_ids))]
        return FakeForwardWithStreams(result.logits, self._streams(texts, is_main=True))

    def forward_draft(
        self,
        streams: Tensor,
        next_ids: Tensor,
        cache: FakeDraftCache,
        *,
        logits: str = "last",
        hooks: ForwardHooks | None = None,
    ) -> FakeForwardWithStreams:
        self.before_draft()
        if hooks is not None:
            hooks.check_stop()
        self.draft_calls.append(len(next_ids))
        texts = []
        for row, token_id in zip(streams, next_ids.tolist(), strict=True):
            texts.append((*self._texts[int(row[0, 0])], token_id))
            if self.broken_draft == len(texts[-1]):
                raise NumericError("a draft became NaN")
            cache.append(texts[-1], bool(row[0, 1]))
        assert logits == "last"
        said = expected_logits(texts[-1], self.config.vocab_size)
        if len(texts[-1]) in self.script:
            said[self.script[len(texts[-1])]] = 30.0
        if not self.is_right(len(texts[-1])):
            said = -said
        made = self._streams(texts, is_main=False)
        return FakeForwardWithStreams(torch.from_numpy(said)[None], made)

    def _streams(self, texts: list[Prefix], *, is_main: bool) -> Tensor:
        shape = (len(texts), self.config.hc_streams, self.config.hidden_size)
        streams = torch.zeros(shape)
        streams[:, 0, 0] = torch.arange(len(self._texts), len(self._texts) + len(texts))
        streams[:, 0, 1] = float(is_main)
        self._texts += texts
        return streams

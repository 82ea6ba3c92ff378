"""Drafting with the model's own MTP block: several tokens per pass over the main model.

One step, when token t was just sampled for position n:

1. `propose`: the block gets the main model's streams of position n - 1 with t, and says what comes
   after t; each further draft feeds it its own streams and the draft before.
2. The timeline evaluates t and the drafts as one chunk, with the logits of every row.
3. The sampler draws the next token from the first row as ever, with the random number of its place.
   While that is the draft, the draft's row is evaluated already and the next token costs nothing;
   the first token that is none throws the rest away (`Timeline`).

So every token is one that the sampler drew from the main model's own logits: the text is that of
plain decoding, token by token, whatever the drafts are, for any seed and option. (Where a row of a
chunk is rounded unlike the row alone, as by torch's products, it is so up to that rounding.) A
draft is drawn with the random number and the penalties of its place too, because two similar
distributions give one token for one number far more often than they agree in their likeliest one.

State, owned by the timeline that made the `Speculation`, and never needed for right text:
streams of the last window + 128 positions (`PositionRing`), because the block has to read each
position together with the token after it and a rewind changes that token; and the block's own
cache. The cache holds the rows of timeline positions `_base` .. `_base` + its length - 1; it is
brought up to date by the next draft and forgets what a rewind or a rejected draft invalidates.
Prefill costs nothing but the copy of the streams: before the first draft the block reads the last
window of them. Where the timeline goes back further than its rings, a turn checkpoint brings back
the streams of its last position, and the block starts with an empty window.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Container, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.errors import ExpertReadError, NumericError
from edgedsv4.model.cache_state import fill_ring
from edgedsv4.model.kv_cache import REWIND_TOKENS
from edgedsv4.model.row_store import FloatRows, PositionRing
from edgedsv4.runtime.draft_pace import DraftPace
from edgedsv4.runtime.stats import DraftStats

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.model.cache_state import Fill
    from edgedsv4.model.hooks import ForwardHooks
    from edgedsv4.model.model import Model
    from edgedsv4.runtime.sampler import Sampler

logger = logging.getLogger(__name__)

DRAFT_ERRORS = (NumericError, ExpertReadError)
"""What a draft can break by itself, while the same step without it may be sound."""


class Speculation:
    """Drafts for one timeline, and how they fare.

    Args:
        model: with an MTP block.
        capacity: tokens of the timeline.
        count: tokens drafted at most per step.
        chunk: positions that the block reads at once when it has to catch up.
        hooks: stop the block as they stop the model.
        clock: seconds, for the measurement that pauses drafting.
    """

    def __init__(
        self,
        model: Model,
        *,
        capacity: int,
        count: int,
        chunk: int,
        hooks: ForwardHooks,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config, numerics = model.config, model.numerics
        self.clock = clock
        self._model = model
        self._count = count
        self._chunk = chunk
        self._hooks = hooks
        self._window = config.window
        self._shape = (config.hc_streams, config.hidden_size)
        width = config.hc_streams * config.hidden_size
        rows = FloatRows(width, numerics.dtype, numerics.device)
        self._streams = PositionRing(rows, config.window + REWIND_TOKENS)
        self._end = 0
        """Streams are held of positions from the ring's oldest to below this."""
        self._cache = model.new_draft_cache(capacity)
        self._base = 0
        self._pace = DraftPace()
        self._steps = [0, 0]
        """Without and with drafts."""
        self._drafted, self._accepted = [0] * count, [0] * count
        """By place in the step."""
        self._open_step: tuple[int, float] | None = None
        """Drafts and seconds of the step whose drafts are being used."""
        self._failure = ""

    def nbytes(self) -> int:
        """Bytes of the streams and of the block's cache."""
        return self._streams.nbytes + self._cache.nbytes()

    def stats(self) -> DraftStats:
        """What became of the drafts so far."""
        state = self._failure or ("paused: slower than without" if self._pace.is_paused else "on")
        return DraftStats(
            drafted=tuple(self._drafted),
            accepted=tuple(self._accepted),
            drafted_steps=self._steps[True],
            plain_steps=self._steps[False],
            state=state,
        )

    def keep(self, streams: Tensor, start: int) -> None:
        """Remember the main model's streams [T, hc, D] of positions start.., just evaluated."""
        if start != self._end or self._streams.oldest > start:
            self._forget_from(0)
            self._streams.oldest = start
        self._streams.stage(streams.flatten(1))
        self._streams.commit(start + streams.shape[0])
        self._end = start + streams.shape[0]

    def last_streams(self, length: int) -> Tensor | None:
        """Streams [1, hc * D] of the last of `length` tokens, a copy; None when not known."""
        if not self._streams.oldest < self._end == length:
            return None
        return self._streams.read(length - 1, length)

    def held_streams(self, length: int) -> tuple[int, Tensor] | None:
        """(first position, streams [N, hc * D]) up to the last of `length` tokens, as stored.

        None when those of the last token are not known.
        """
        if not self._streams.oldest < self._end == length:
            return None
        first = self._streams.oldest
        return first, self._streams.stored(first, length)[0]

    def fill_streams(self, first: int, length: int, fill: Fill) -> None:
        """Start with streams of positions first..length-1, from the bytes of `held_streams`."""
        fill_ring(self._streams, first, length, fill)
        self._end = length

    def rewind(self, length: int, last_streams: Tensor | None = None) -> None:
        """Follow the timeline back to `length` tokens.

        Args:
            length: tokens that stay.
            last_streams: of the last of them, from `last_streams` at a checkpoint there.
        """
        self._forget_from(length - 1)
        self._end = min(self._end, length)
        if last_streams is not None and not self._streams.oldest < self._end == length:
            self._forget_from(0)
            self._streams.load((last_streams,), length - 1, length)
            self._streams.oldest, self._end = length - 1, length

    def propose(
        self,
        token_ids: Sequence[int],
        token_id: int,
        sampler: Sampler,
        *,
        room: int,
        stop_ids: Container[int],
    ) -> list[int]:
        """Tokens that may follow `token_id`.

        Args:
            token_ids: tokens of the timeline.
            token_id: sampled, not evaluated.
            sampler: about to accept `token_id`; not changed.
            room: tokens that may follow it at most.
            stop_ids: nothing is drafted behind one of these.

        Returns:
            Drafts; none when drafting pauses, has failed, or nothing is known of the last position.

        Raises:
            CancelledError: as the model's forward.
        """
        length, count = len(token_ids), min(self._count, room)
        is_known = self._streams.oldest < self._end == length
        if count < 1 or self._failure or not (is_known and self._pace.is_drafting):
            return []
        try:
            return self._draft(token_ids, token_id, sampler, count, stop_ids)
        except DRAFT_ERRORS as error:
            self._failure = f"off: {error}"
            logger.warning("the MTP block failed and drafts no more: %s", error)
            return []
        finally:
            # Rows made of the block's own streams are no more than a means to the next draft.
            self._forget_from(length)

    def begin_step(self, drafts: int, seconds: float) -> None:
        """A step was evaluated, with so many drafts."""
        self._open_step = (drafts, seconds)

    def end_step(self, accepted: int, *, is_rejected: bool) -> None:
        """The step's drafts are used up: `accepted` became tokens, the next one was another token.

        Without `is_rejected` nobody asked for a token behind the accepted ones.
        """
        if self._open_step is None:
            return
        (drafts, seconds), self._open_step = self._open_step, None
        if is_rejected or accepted == drafts:
            self._pace.record(seconds, 1 + accepted, is_drafted=drafts > 0)
        self._steps[drafts > 0] += 1
        for place in range(drafts if is_rejected else accepted):
            self._drafted[place] += 1
            self._accepted[place] += place < accepted

    def _draft(
        self,
        token_ids: Sequence[int],
        token_id: int,
        sampler: Sampler,
        count: int,
        stop_ids: Container[int],
    ) -> list[int]:
        streams, logits = self._catch_up(token_ids, token_id)
        ahead = sampler.after((token_id,))
        drafts = [ahead.sample(logits)]
        while len(drafts) < count and drafts[-1] not in stop_ids:
            ahead.accept(drafts[-1])
            streams, logits = self._read(streams, drafts[-1:])
            drafts.append(ahead.sample(logits))
        return drafts

    def _catch_up(
        self, token_ids: Sequence[int], token_id: int
    ) -> tuple[Tensor, npt.NDArray[np.float32]]:
        """Read the positions the block has not seen; its streams and logits at the last one."""
        first = max(self._streams.oldest, self._end - self._window)
        start = self._base + self._cache.length
        if self._cache.length == 0 or start < first or self._base > first:
            self._cache.rewind(0)
            self._base = start = first
        following = [*token_ids[start + 1 : self._end], token_id]
        for at in range(start, self._end, self._chunk):
            stop = min(at + self._chunk, self._end)
            streams = self._streams.read(at, stop).view(-1, *self._shape)
            result = self._read(streams, following[at - start : stop - start])
        return result

    def _read(
        self, streams: Tensor, following: Sequence[int]
    ) -> tuple[Tensor, npt.NDArray[np.float32]]:
        ids = torch.tensor(following, dtype=torch.int64)
        result = self._model.forward_draft(
            streams, ids, self._cache, logits="last", hooks=self._hooks
        )
        if result.logits is None:
            raise RuntimeError("the draft block returned no logits")
        return result.streams[-1:], result.logits[-1].to(torch.float32).cpu().numpy()

    def _forget_from(self, position: int) -> None:
        """Drop the block's rows of timeline positions from `position` on."""
        rows = max(0, position - self._base)
        if rows < self._cache.length:
            self._cache.rewind(rows if rows >= self._cache.rewind_floor else 0)

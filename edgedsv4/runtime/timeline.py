"""The tokens a session has evaluated, and the shortest way from them to other tokens.

A `Timeline` joins a model's KV cache with the token ids in it, the logits behind the last one and
the turn checkpoints. It decides what has to be evaluated; locks, sampling and text are elsewhere.
After every call, also one that raised, it stands at its last complete token: token ids and cache
agree, and whatever a finished chunk added stays.

With drafts (`speculation`) the cache can be ahead of the timeline: a sampled token is evaluated
together with drafts of the next ones, and these become tokens when they are sampled. Where the
timeline ends is decided before that chunk is evaluated (`_certain`), and everything but taking a
draft first cuts the cache back to it (`_settle`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from edgedsv4.errors import ConfigError, ContextFullError, FormatError
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.runtime.checkpoints import TurnCheckpoint, TurnCheckpoints
from edgedsv4.runtime.device_logits import DeviceLogits, DeviceSampler
from edgedsv4.runtime.speculation import DRAFT_ERRORS, Speculation
from edgedsv4.runtime.stats import SessionTotals, SyncReport

if TYPE_CHECKING:
    from edgedsv4.config import EngineOptions
    from edgedsv4.model.hooks import GuessHook, SelectionHook
    from edgedsv4.model.kv_cache import KvCache
    from edgedsv4.model.model import LogitRows, Model
    from edgedsv4.runtime.sampler import Sampler
    from edgedsv4.runtime.stats import DraftStats

Progress = Callable[[int, int], None]
"""Called with (tokens done, tokens in all) after every chunk."""
Logits = npt.NDArray[np.float32]


class Timeline:
    """One sequence of tokens through one model.

    Args:
        model: evaluates; keeps nothing of the timeline.
        capacity: tokens the cache holds.
        options: tokens evaluated at once, tokens drafted, budget of the turn checkpoints.
        check_files: called before and after every chunk; raises when the model's file changed.
        should_stop: asked often while evaluating; True raises `CancelledError`.
        clock: seconds, by which drafting is judged.
    """

    def __init__(
        self,
        model: Model,
        *,
        capacity: int,
        options: EngineOptions,
        check_files: Callable[[], None],
        should_stop: Callable[[], bool],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.capacity = capacity
        self.totals = SessionTotals()
        self.checkpoints = TurnCheckpoints(options.checkpoint_bytes)
        self._model = model
        self._cache = model.new_cache(capacity)
        self._chunk = options.chunk
        self._check_files = check_files
        self._hooks = ForwardHooks(should_stop=should_stop)
        self._ids: list[int] = []
        """Of the cache's tokens."""
        self._logits: Logits | DeviceLogits | None = None
        """[V] after the last token of the timeline."""
        self._sampler: DeviceSampler | None = None
        """Draws from logits on a GPU; made with the first ones."""
        self._certain = capacity
        """Tokens of the cache beyond these are drafts that nobody sampled yet."""
        self._rows: Logits | None = None
        """[N, V] after the last N tokens of the cache, while some of them are drafts."""
        self._speculation: Speculation | None = None
        if options.draft:
            self._speculation = Speculation(
                model,
                capacity=capacity,
                count=options.draft,
                chunk=options.chunk,
                hooks=ForwardHooks(should_stop=should_stop),
                clock=clock,
            )

    @property
    def length(self) -> int:
        """Tokens of the timeline."""
        return min(self._cache.length, self._certain)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the tokens of the timeline."""
        return tuple(self._ids[: self.length])

    @property
    def drafts(self) -> DraftStats | None:
        """What became of the drafts so far; None without drafting."""
        return None if self._speculation is None else self._speculation.stats()

    @property
    def cache(self) -> KvCache:
        """The KV cache; after `settle` it holds the tokens of the timeline and no drafts."""
        return self._cache

    @property
    def speculation(self) -> Speculation | None:
        """What drafts; None without drafting."""
        return self._speculation

    def last_logits(self) -> Logits | None:
        """[V] after the last token as they are kept, None when they are not known."""
        return _on_host(self._logits)

    def watch_experts(
        self, on_experts: SelectionHook | None, on_guesses: GuessHook | None = None
    ) -> None:
        """Have the routing of the main model watched from now on; see `ForwardHooks`."""
        self._hooks = replace(self._hooks, on_experts=on_experts, on_guesses=on_guesses)

    def settle(self) -> None:
        """Throw away drafts that nobody sampled."""
        self._settle()

    def take_over(self, token_ids: Sequence[int], logits: Logits | None) -> None:
        """Let a cache that was filled from elsewhere be this timeline, which was empty.

        Args:
            token_ids: of the cache's tokens.
            logits: [V] after the last one, when they are known.
        """
        if len(token_ids) != self._cache.length:
            raise RuntimeError(f"{len(token_ids)} ids for {self._cache.length} tokens")
        self._ids = list(token_ids)
        self._logits = logits

    def nbytes(self) -> int:
        """Bytes of cache, checkpoints, logits and drafting."""
        logits = sum(kept.nbytes for kept in (self._logits, self._rows) if kept is not None)
        drafting = 0 if self._speculation is None else self._speculation.nbytes()
        return self._cache.nbytes() + self.checkpoints.nbytes() + logits + drafting

    def check_ids(self, token_ids: Sequence[int]) -> None:
        """Raise `ConfigError` unless every id is in the vocabulary."""
        size = self._model.config.vocab_size
        bad = next((i for i, token in enumerate(token_ids) if not 0 <= token < size), None)
        if bad is not None:
            raise ConfigError(
                f"token ids must be 0..{size - 1}, found {token_ids[bad]} at position {bad}"
            )

    def check_room(self, token_ids: Sequence[int]) -> None:
        """Raise what `evaluate` would raise for these tokens before it evaluates any.

        Raises:
            ConfigError: for an id outside the vocabulary.
            ContextFullError: when the tokens do not fit.
        """
        self.check_ids(token_ids)
        self._check_room(self.length + len(token_ids))

    def sync(self, token_ids: Sequence[int], on_progress: Progress | None = None) -> SyncReport:
        """Make the timeline equal to `token_ids`, evaluating as little as possible.

        Raises:
            ConfigError: for an id outside the vocabulary; nothing changed.
            ContextFullError: when the ids do not fit; nothing changed.
            CancelledError, NumericError, FormatError: the timeline is a prefix of `token_ids` that
                ends with the last finished chunk.
        """
        self.check_ids(token_ids)
        self._check_room(len(token_ids))
        self._settle()
        shared = _shared_prefix(self._ids, token_ids)
        reached = self._go_back(shared)
        self._run(token_ids[reached:], "last", rebuilt=shared - reached, on_progress=on_progress)
        evaluated = len(token_ids) - shared
        if evaluated > 1:
            self.mark_turn()
        return SyncReport(reused=reached, evaluated=evaluated, rebuilt=shared - reached)

    def evaluate(
        self,
        token_ids: Sequence[int],
        *,
        rows: LogitRows = "last",
        chunk: int | None = None,
        on_progress: Progress | None = None,
    ) -> Logits | None:
        """Append tokens.

        Args:
            token_ids: ids to append.
            rows: whose logits to return.
            chunk: tokens evaluated at once; None takes the timeline's own.
            on_progress: told after every chunk.

        Returns:
            [T, V] for "all", [1, V] for "last" ([0, V] without tokens), None for "none".

        Raises:
            As `sync`; after a failure the finished chunks stay appended.
        """
        self.check_room(token_ids)
        self._settle()
        result = self._run(token_ids, rows, chunk=chunk, on_progress=on_progress)
        logits = _on_host(self._logits)
        if rows == "last" and token_ids and logits is not None:
            return logits[None].copy()
        return result

    def rewind(self, count: int) -> SyncReport:
        """Drop the last `count` tokens.

        Raises:
            ConfigError: when there are fewer tokens; nothing changed.
            CancelledError, NumericError, FormatError: while tokens were evaluated again; the
                timeline is shorter than asked for and ends with the last finished chunk.
        """
        if not 0 <= count <= self.length:
            raise ConfigError(f"rewind must be 0..{self.length} tokens, found {count}")
        self._settle()
        target = self._ids[: self.length - count]
        reached = self._go_back(len(target))
        rebuilt = len(target) - reached
        self._run(target[reached:], "last", rebuilt=rebuilt)
        return SyncReport(reused=reached, evaluated=0, rebuilt=rebuilt)

    def logits(self) -> Logits:
        """[V] after the last token, a copy; evaluates that token again when they are not known.

        Raises:
            ConfigError: when the timeline is empty.
            CancelledError, NumericError, FormatError: while evaluating; the timeline has then lost
                its last token.
        """
        logits = _on_host(self._last_logits())
        if logits is None:
            raise RuntimeError("the model returned no logits")
        return logits.copy()

    def decode(
        self, sampler: Sampler, stop_ids: Container[int], check: Callable[[], None]
    ) -> Iterator[int]:
        """Sample and evaluate tokens, each yielded once it is part of the timeline.

        Ends after a stop token (yielded as well), the sampler's `max_tokens`, or when the context
        is full.

        Args:
            sampler: chooses, and learns what was chosen.
            stop_ids: tokens that end it.
            check: called before each token; may raise to stop.

        Raises:
            As `logits` and `evaluate`; the tokens yielded so far stay.
        """
        limit = sampler.options.max_tokens or self.capacity
        while sampler.num_generated < limit and self.length < self.capacity:
            check()
            token_id = sampler.sample(self._last_logits())
            room = min(limit - sampler.num_generated, self.capacity - self.length) - 1
            self._append(token_id, sampler, stop_ids, room)
            sampler.accept(token_id)
            self.totals.generated += 1
            yield token_id
            if token_id in stop_ids:
                break
        self._settle()

    def mark_turn(self) -> None:
        """Keep a checkpoint here, within the budget."""
        self._settle()
        speculation = self._speculation
        streams = None if speculation is None else speculation.last_streams(self.length)
        self.checkpoints.add(TurnCheckpoint(self._cache.checkpoint(), self.last_logits(), streams))

    def _last_logits(self) -> Logits | DeviceLogits:
        if self.length == 0:
            raise ConfigError("the session has no token yet; sync or evaluate some first")
        if self._logits is None:
            self._evaluate_last_again()
        if self._logits is None:
            raise RuntimeError("the model returned no logits")
        return self._logits

    def _append(self, token_id: int, sampler: Sampler, stop_ids: Container[int], room: int) -> None:
        """Make the token just sampled the next one; `room` more may follow it."""
        if self._is_evaluated(token_id):
            self._take_draft()
            return
        self._settle(is_rejected=True)
        speculation = self._speculation
        if speculation is None or token_id in stop_ids:
            # Nobody samples behind a stop token, so its logits (a pass over the head) can wait.
            self._run((token_id,), "none" if token_id in stop_ids else "last")
            return
        began = speculation.clock()
        drafts = speculation.propose(self._ids, token_id, sampler, room=room, stop_ids=stop_ids)
        if not (drafts and self._run_ahead(token_id, drafts)):
            drafts = []
            self._run((token_id,), "last")
        speculation.begin_step(len(drafts), speculation.clock() - began)

    def _is_evaluated(self, token_id: int) -> bool:
        """Whether the cache went on with this token behind the end of the timeline."""
        is_ahead = self._rows is not None and self.length < self._cache.length
        return is_ahead and self._ids[self.length] == token_id

    def _take_draft(self) -> None:
        """Make the first draft the next token."""
        if self._rows is None:
            raise RuntimeError("no draft was evaluated")
        self._logits = None
        self._certain += 1
        self._logits = self._rows[self._certain - self._cache.length - 1].copy()
        self.totals.evaluated += 1

    def _run_ahead(self, token_id: int, drafts: Sequence[int]) -> bool:
        """Evaluate a token and drafts of the next ones; whether that worked.

        Drafts can lead into states that the text never reaches: when something breaks there, the
        timeline stays as it was.
        """
        self._certain = self.length + 1
        try:
            rows = _on_host(self._forward((token_id, *drafts), "all"))
        except DRAFT_ERRORS:
            self._certain = self.capacity
            return False
        if rows is None:
            raise RuntimeError("the model returned no logits")
        self._rows, self._logits = rows, rows[0].copy()
        self.totals.evaluated += 1
        return True

    def _settle(self, *, is_rejected: bool = False) -> None:
        """Cut the cache back to the timeline: the drafts that are left will not be used."""
        length = self.length
        if self._speculation is not None:
            evaluated = 1 if self._rows is None else self._rows.shape[0]
            accepted = length - (self._cache.length - evaluated) - 1
            self._speculation.end_step(accepted, is_rejected=is_rejected)
        if length < self._cache.length:
            self._cut(length)
        self._rows = None
        self._certain = self.capacity
        # Also what an interrupt kept from being dropped.
        self.checkpoints.drop_from(length + 1)
        del self._ids[length:]

    def _cut(self, length: int) -> None:
        """Drop what the rings can drop."""
        self._cache.rewind(length)
        del self._ids[length:]
        if self._speculation is not None:
            self._speculation.rewind(length)

    def _evaluate_last_again(self) -> None:
        self._settle()
        target = list(self._ids)
        was_marked = self.length in self.checkpoints.positions
        reached = self._go_back(len(target) - 1)
        self._run(target[reached:], "last", rebuilt=len(target) - reached)
        if was_marked:
            self.mark_turn()

    def _check_room(self, length: int) -> None:
        if length > self.capacity:
            raise ContextFullError(length, self.capacity)

    def _go_back(self, length: int) -> int:
        """Drop tokens without evaluating any, to `length` or the nearest lower place possible."""
        if length == self.length:
            return length
        self._logits = None  # first, so that an interrupt cannot leave those of another place
        if length and length < self._cache.rewind_floor:
            self._restore_near(length)
        if length == 0 or self._cache.rewind_floor <= length <= self.length:
            self._cache.rewind(length)
        reached = self.length
        del self._ids[reached:]
        here = self.checkpoints.at_or_before(reached)
        if here is not None and here.position != reached:
            here = None
        if here is not None:
            self._logits = here.logits
        if self._speculation is not None:
            self._speculation.rewind(reached, None if here is None else here.streams)
        self.checkpoints.drop_from(reached + 1)
        return reached

    def _restore_near(self, length: int) -> None:
        """Restore the best checkpoint for `length`, else go to the start.

        A checkpoint a little behind `length` is best, since rewinding from it evaluates nothing;
        the next best is the one before.
        """
        after = self.checkpoints.at_or_after(length)
        if after is not None:
            self._cache.restore(after.state)
            if self._cache.rewind_floor <= length:
                return
        before = self.checkpoints.at_or_before(length)
        if before is None:
            self._cache.rewind(0)
        else:
            self._cache.restore(before.state)

    def _run(
        self,
        token_ids: Sequence[int],
        rows: LogitRows,
        *,
        rebuilt: int = 0,
        chunk: int | None = None,
        on_progress: Progress | None = None,
    ) -> Logits | None:
        """Evaluate tokens chunk by chunk; the first `rebuilt` of them count as rebuilt."""
        total, size = len(token_ids), chunk or self._chunk
        vocab_size = self._model.config.vocab_size
        collected = np.empty((total if rows == "all" else 0, vocab_size), dtype=np.float32)
        for first in range(0, total, size):
            part = token_ids[first : first + size]
            done = first + len(part)
            wanted = rows if rows == "all" or done == total else "none"
            result = self._forward(part, wanted)
            if isinstance(result, DeviceLogits):
                self._logits = result
            elif result is not None:
                self._logits = result[-1].copy()
                if rows == "all":
                    collected[first:done] = result
            again = min(max(rebuilt - first, 0), len(part))
            self.totals.rebuilt += again
            self.totals.evaluated += len(part) - again
            if on_progress is not None:
                on_progress(done, total)
        return None if rows == "none" else collected

    def _forward(self, part: Sequence[int], wanted: LogitRows) -> Logits | DeviceLogits | None:
        """One chunk; [R, V] logits of the wanted rows. The last token's are not known after it."""
        self._check_files()
        # Ids go in first and are cut back to the cache's length in any case, so that not even an
        # interrupt between two statements leaves the two apart.
        self._ids.extend(part)
        self._logits = None
        try:
            ids = torch.tensor(part, dtype=torch.int64)
            result = self._model.forward(ids, self._cache, logits=wanted, hooks=self._hooks)
        finally:
            del self._ids[self._cache.length :]
        start = self._cache.length - len(part)
        self._distrust_if_changed(start)
        if self._speculation is not None:
            self._speculation.keep(result.streams, start)
        if result.logits is None:
            return None
        if wanted == "last" and result.best is not None:
            return self._kept_on_device(result.logits[-1], result.best)
        logits: Logits = result.logits.to(torch.float32).cpu().numpy()
        return logits

    def _kept_on_device(self, row: torch.Tensor, best: int) -> DeviceLogits:
        if self._sampler is None:
            self._sampler = DeviceSampler(row.shape[0], row.device)
        return DeviceLogits(row, best, self._sampler)

    def _distrust_if_changed(self, length: int) -> None:
        """Take the last chunk back when the file changed while it was read."""
        try:
            self._check_files()
        except FormatError:
            self._cut(length if self._cache.rewind_floor <= length else 0)
            self.checkpoints.drop_from(self._cache.length + 1)
            raise


def _on_host(logits: Logits | DeviceLogits | None) -> Logits | None:
    return logits.numpy() if isinstance(logits, DeviceLogits) else logits


def _shared_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    pairs = zip(left, right, strict=False)
    differing = (place for place, (a, b) in enumerate(pairs) if a != b)
    return next(differing, min(len(left), len(right)))

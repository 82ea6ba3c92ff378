"""A session: one conversation, or any other sequence of tokens, with one user at a time.

The caller hands over whole token lists and whole conversations; what has to be evaluated is found
here (`timeline`), and the tokens of earlier replies are used as they were sampled (`replies`). A
second caller is told `BusyError` instead of waiting, also when it is the thread that holds a reply
half consumed. After an error or a cancel the session stands at its last complete token and can be
used.
"""

from __future__ import annotations

import io
import operator
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

from edgedsv4.config import SamplingOptions
from edgedsv4.errors import BusyError, ConfigError, Dsv4Error
from edgedsv4.formats.snapshot_write import save_file
from edgedsv4.runtime.cancel_flag import CancelFlag
from edgedsv4.runtime.gpu_devices import device_memory_errors
from edgedsv4.runtime.replies import ReplyLoop, SampledTurns
from edgedsv4.runtime.sampler import Sampler
from edgedsv4.runtime.scoring import FloatArray, score_continuation
from edgedsv4.runtime.single_user import SingleUser, Use
from edgedsv4.runtime.snapshot import SessionState, SnapshotContext, load_session, save_session
from edgedsv4.runtime.timeline import Logits, Progress, Timeline

if TYPE_CHECKING:
    from collections.abc import Generator
    from os import PathLike
    from types import TracebackType
    from typing import BinaryIO

    from edgedsv4.formats.snapshot_file import Source
    from edgedsv4.model.model import LogitRows
    from edgedsv4.runtime.replies import ReplyStep
    from edgedsv4.runtime.session_parts import SessionParts
    from edgedsv4.runtime.stats import SessionTotals, SyncReport
    from edgedsv4.text.messages import Message
    from edgedsv4.text.prompt import PromptOptions

T = TypeVar("T")


class Session:
    """One timeline of tokens; made by `Engine.new_session`, closed by `close` or a `with` block.

    Every method but `cancel`, `close` and the plain readings raises `BusyError` while another call
    works or a `generate` or `reply` iterator is open, and `Dsv4Error` after `close`. What a method
    says about failures is all that can be lost: the session stays usable.
    """

    def __init__(self, parts: SessionParts, capacity: int) -> None:
        self._parts = parts
        self._user = SingleUser()
        self._cancel = CancelFlag()
        self._open_iterators: weakref.WeakSet[Generator[object]] = weakref.WeakSet()
        self._iterators_lock = threading.Lock()
        self._turns = SampledTurns(limit_tokens=2 * capacity)
        self._timeline: Timeline | None = self._new_timeline(capacity)
        self.note = b""
        """At most 16 MiB of the caller's, such as its messages; saved and loaded with the rest."""

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of all tokens of the timeline."""
        return self._live.token_ids

    @property
    def length(self) -> int:
        """Tokens of the timeline."""
        return self._live.length

    @property
    def capacity(self) -> int:
        """Tokens the timeline can hold."""
        return self._live.capacity

    @property
    def totals(self) -> SessionTotals:
        """Tokens evaluated, rebuilt, generated and drafted since the session was opened."""
        timeline = self._live
        experts = self._parts.expert_stats()
        return replace(timeline.totals, drafts=timeline.drafts, experts=experts)

    @property
    def turn_positions(self) -> tuple[int, ...]:
        """Lengths of the timeline that a rewind reaches without evaluating anything."""
        return self._live.checkpoints.positions

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._timeline is None

    def nbytes(self) -> int:
        """Bytes of KV cache (allocated), turn checkpoints and kept logits."""
        timeline = self._timeline  # read once: another thread may close the session
        return 0 if timeline is None else timeline.nbytes()

    def checkpoint_nbytes(self) -> int:
        """Bytes of the turn checkpoints alone."""
        timeline = self._timeline
        return 0 if timeline is None else timeline.checkpoints.nbytes()

    def usage(self) -> tuple[int, int] | None:
        """(length, capacity) at one moment, None when the session is closed; never raises."""
        timeline = self._timeline
        return None if timeline is None else (timeline.length, timeline.capacity)

    def sync(self, token_ids: Sequence[int], *, on_progress: Progress | None = None) -> SyncReport:
        """Make the timeline equal to a whole token list.

        The common prefix is kept, going back as far as needed, and the rest evaluated in chunks.
        When more than one token is new, a turn checkpoint is kept at the end. An empty list resets.

        Args:
            token_ids: all tokens of the timeline.
            on_progress: told (done, total) of the tokens to evaluate after every chunk.

        Raises:
            ConfigError: an id that the vocabulary does not have; nothing changed.
            ContextFullError: more tokens than the capacity; nothing changed.
            CancelledError, NumericError, FormatError: the timeline is the part of `token_ids` up to
                the last finished chunk.
        """
        ids = _plain_ids(token_ids)
        with self._working() as timeline:
            return timeline.sync(ids, on_progress)

    def evaluate(
        self,
        token_ids: Sequence[int],
        *,
        logits: LogitRows = "last",
        chunk: int | None = None,
        on_progress: Progress | None = None,
    ) -> Logits | None:
        """Append tokens.

        Args:
            token_ids: ids of the tokens to append.
            logits: "all" returns float32 [T, V]; "last" [1, V], or [0, V] without tokens; "none"
                None.
            chunk: tokens evaluated at once; None takes the engine's.
            on_progress: told (done, total) after every chunk.

        Raises:
            As `sync`; after a failure the tokens of finished chunks stay appended.
        """
        ids = _plain_ids(token_ids)
        if logits not in ("all", "last", "none"):
            raise ConfigError(f"logits must be 'all', 'last' or 'none', found {logits!r}")
        if chunk is not None and chunk < 1:
            raise ConfigError(f"chunk must be at least 1, found {chunk}")
        with self._working() as timeline:
            return timeline.evaluate(ids, rows=logits, chunk=chunk, on_progress=on_progress)

    def score(self, token_ids: Sequence[int], *, on_progress: Progress | None = None) -> FloatArray:
        """Append tokens and say how likely each was after those before it.

        Logits are dropped chunk by chunk, so memory does not grow with the tokens.

        Args:
            token_ids: T ids to append.
            on_progress: told (done, total) after every chunk.

        Returns:
            Negative log-likelihoods in nats, float64 [T]. The first is NaN when the timeline was
            empty, since nothing predicts that token.

        Raises:
            As `evaluate`, and NumericError when a logit is infinite.
        """
        ids, chunk = _plain_ids(token_ids), self._parts.options.chunk
        with self._working() as timeline:
            timeline.check_room(ids)
            before = timeline.logits() if ids and timeline.length else None
            evaluate = partial(timeline.evaluate, rows="all")
            return score_continuation(
                evaluate, ids, before=before, chunk=chunk, on_progress=on_progress
            )

    def rewind(self, count: int) -> SyncReport:
        """Drop the last `count` tokens.

        Up to 128 tokens (less those drafted last and thrown away), and to any kept turn checkpoint,
        nothing is evaluated; elsewhere only the tokens after the last checkpoint before the target.

        Raises:
            ConfigError: fewer tokens than that; nothing changed.
            CancelledError, NumericError, FormatError: while evaluating; the timeline is shorter
                than asked for.
        """
        with self._working() as timeline:
            return timeline.rewind(count)

    def mark_turn(self) -> None:
        """Keep a turn checkpoint here, as `sync` of several tokens and `reply` do by themselves.

        The oldest checkpoints are given up when `EngineOptions.checkpoint_bytes` is exceeded.
        """
        with self._working() as timeline:
            timeline.mark_turn()

    def logits(self) -> Logits:
        """Float32 [V] after the last token, a copy.

        After a rewind to a place without checkpoint they are not known; that one token is then
        evaluated again and counted in `totals.rebuilt`.

        Raises:
            ConfigError: the timeline is empty.
            CancelledError, NumericError, FormatError: while evaluating; the last token is gone.
        """
        with self._working() as timeline:
            return timeline.logits()

    def sample(self, sampler: Sampler) -> int:
        """The token `sampler` chooses after the last one; neither session nor sampler changes.

        To use it, pass it to `sampler.accept` and `evaluate`.

        Raises:
            As `logits`, and as `Sampler.sample`.
        """
        with self._working() as timeline:
            return sampler.sample(timeline.logits())

    def generate(
        self, options: SamplingOptions | None = None, *, stop_ids: Iterable[int] = ()
    ) -> Generator[int]:
        """Continue the timeline token by token, each yielded once it is part of it.

        Ends after a stop token (which joins the timeline but is not yielded), after
        `options.max_tokens`, or when the context is full. The session is busy from the first token
        asked for until the iterator ends or is closed.

        Raises:
            ConfigError: an empty timeline, or an id in `stop_ids` or the logit bias that the
                vocabulary does not have.
            CancelledError, NumericError, FormatError: the tokens yielded so far stay.
        """
        stops = frozenset(_plain_ids(tuple(stop_ids)))
        self._live.check_ids(tuple(stops))
        sampler = self._sampler(options or SamplingOptions())
        return self._tracked(self._generate(sampler, stops))

    def reply(
        self,
        messages: Sequence[Message],
        options: SamplingOptions | None = None,
        *,
        prompt: PromptOptions | None = None,
        on_progress: Progress | None = None,
    ) -> Generator[ReplyStep]:
        """Answer a conversation.

        The whole conversation is rendered, brought into the timeline like `sync` does, and
        continued until the model ends its turn, calls a tool, reaches `max_tokens` or fills the
        context. Earlier replies of this session inside `messages` keep the tokens they were sampled
        with. The session is busy from the first event asked for until the iterator ends or is
        closed.

        Args:
            messages: oldest first, as `render_prompt` takes them.
            options: sampling options.
            prompt: thinking mode, tools and the rest.
            on_progress: told (done, total) of the prompt's tokens after every chunk.

        Returns:
            Events of `text.reply` as they become certain, then one `DoneEvent`.

        Raises:
            ConfigError: a conversation that cannot be rendered or needs no reply; nothing changed.
            ContextFullError: no room for the prompt and one token; nothing changed.
            CancelledError: after `cancel`. If the reply had begun, its text so far and a
                `DoneEvent` with finish reason "cancelled" come first.
            NumericError, FormatError: the tokens so far stay in the timeline.
        """
        sampler = self._sampler(options or SamplingOptions())
        return self._tracked(self._reply(tuple(messages), sampler, prompt, on_progress))

    @contextmanager
    def stopping_when(self, is_cancelled: Callable[[], bool]) -> Iterator[None]:
        """Also stop what this thread does in the `with` block when `is_cancelled` says so.

        Args:
            is_cancelled: asked as often as the flag that `cancel` sets, so it must be cheap.
        """
        earlier = self._cancel.ask_also(is_cancelled)
        try:
            yield
        finally:
            self._cancel.ask_also(earlier)

    def save(self, path: str | PathLike[str], *, on_progress: Progress | None = None) -> None:
        """Save the state of this session, so that it can be continued later without evaluating.

        The file (customary suffix `.dsv4s`) takes its name when it is complete and on the disk. It
        holds tokens, KV cache, last logits, the newest turn checkpoints and the tokens of earlier
        replies, and `note`; messages and sampling options are the caller's.

        Args:
            path: where to save; an older file of that name is replaced.
            on_progress: told (done, total) in bytes of work.

        Raises:
            ConfigError: `path` names a folder, device or pipe, or `note` is no bytes or too long.
            StorageError: it cannot be written (full disk, missing folder, no right); a file of that
                name is as it was.
            CancelledError: after `cancel`; a file of that name is as it was.
        """
        save_file(path, lambda file: self.write_snapshot(file, on_progress=on_progress))

    def save_bytes(self, *, on_progress: Progress | None = None) -> bytes:
        """What `save` writes, as bytes.

        Raises:
            CancelledError: after `cancel`.
        """
        file = io.BytesIO()
        self.write_snapshot(file, on_progress=on_progress)
        return file.getvalue()

    def write_snapshot(self, file: BinaryIO, *, on_progress: Progress | None = None) -> None:
        """Write what `save` saves into an open file or anything else with `write`, front to back.

        Raises:
            StorageError: the file could not be written; it may hold a part.
            CancelledError: after `cancel`; as before.
        """
        with self._working() as timeline:
            context = self._snapshot_context(on_progress)
            save_session(file, SessionState(timeline, self._turns, self.note), context)

    def load(self, source: Source, *, on_progress: Progress | None = None) -> None:
        """Replace the state of this session by a saved one, whole or not at all.

        Until the last checksum was compared both are in memory.

        Args:
            source: path, or the bytes of `save_bytes`.
            on_progress: told (done, total) in bytes.

        Raises:
            SnapshotError: damaged, or of another model, tokenizer, profile or dtype; as for every
                failure here, nothing changed.
            ContextFullError: it has more tokens than the capacity of this session.
            CapacityError: both do not fit in the memory budget; close this session and use
                `Engine.load_session`.
            StorageError: the file is missing or cannot be read.
            CancelledError: after `cancel`.
        """
        with self._working() as timeline:
            self._parts.check_files()
            context = self._snapshot_context(on_progress)

            def make_timeline(tokens: int) -> Timeline:
                if timeline.length:
                    self._parts.check_room(tokens)
                return self._new_timeline(timeline.capacity)

            state = load_session(source, timeline, context, make_timeline)
            self._timeline, self._turns, self.note = state.timeline, state.turns, state.note

    def cancel(self) -> None:
        """Stop the call or iterator that is working, with `CancelledError`; without one, nothing.

        May be called from any thread and from a signal handler.
        """
        self._cancel.value = True

    def close(self) -> None:
        """Give the memory back; iterators of this session end. Closing twice is fine.

        Raises:
            BusyError: another thread is inside a call.
        """
        with self._iterators_lock:
            iterators = tuple(self._open_iterators)
        for iterator in iterators:
            try:
                iterator.close()
            except ValueError:
                raise _busy() from None
        use = Use()
        try:
            if not self._user.take(use):
                raise _busy()
            self._timeline = None
        finally:
            self._user.give_back(use)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _generate(self, sampler: Sampler, stops: frozenset[int]) -> Generator[int]:
        with self._working() as timeline:
            sampler.observe(timeline.token_ids)
            for token_id in timeline.decode(sampler, stops, self._cancel.check):
                if token_id not in stops:
                    yield token_id

    def _reply(
        self,
        messages: tuple[Message, ...],
        sampler: Sampler,
        prompt: PromptOptions | None,
        on_progress: Progress | None,
    ) -> Generator[ReplyStep]:
        tokenizer = self._parts.tokenizer
        if tokenizer is None:
            raise ConfigError("the model file holds no tokenizer, only token ids can be used")
        with self._working() as timeline:
            loop = ReplyLoop(self._parts, tokenizer, timeline, self._turns, self._cancel.check)
            yield from loop.run(messages, sampler, prompt, on_progress)

    def _new_timeline(self, capacity: int) -> Timeline:
        timeline = Timeline(
            self._parts.model,
            capacity=capacity,
            options=self._parts.options,
            check_files=self._parts.check_files,
            should_stop=self._cancel.is_set,
        )
        timeline.watch_experts(self._parts.on_experts, self._parts.on_guesses)
        return timeline

    def _snapshot_context(self, on_progress: Progress | None) -> SnapshotContext:
        return SnapshotContext(
            model=self._parts.model,
            owner=self._parts.owner(),
            backend=self._parts.backend,
            on_progress=on_progress,
            check=self._cancel.check,
        )

    def _sampler(self, options: SamplingOptions) -> Sampler:
        return Sampler(options, self._parts.model.config.vocab_size)

    def _tracked(self, iterator: Generator[T]) -> Generator[T]:
        with self._iterators_lock:
            self._open_iterators.add(iterator)
        return iterator

    @contextmanager
    def _working(self) -> Iterator[Timeline]:
        """Be the only one at work; a cancel that came before does not count.

        Raises:
            CapacityError, DeviceLostError: whatever the work is, from a GPU; the timeline stands at
                its last finished chunk.
        """
        use = Use()
        try:
            if not self._user.take(use):
                raise _busy()
            timeline = self._live
            self._cancel.value = False
            device = self._parts.model.numerics.device
            with device_memory_errors("the session's call", device):
                yield timeline
        finally:
            self._user.give_back(use)

    @property
    def _live(self) -> Timeline:
        if self._timeline is None:
            raise Dsv4Error("this session is closed; ask the engine for a new one")
        return self._timeline


def _busy() -> BusyError:
    return BusyError(
        "the session is in use by another call or an open reply; wait for it, close the iterator"
        " or call cancel()"
    )


def _plain_ids(token_ids: Sequence[int]) -> list[int]:
    """Ids as Python ints; numpy integers are welcome, other numbers are not."""
    try:
        return [operator.index(token_id) for token_id in token_ids]
    except TypeError:
        raise ConfigError("token ids must be integers") from None

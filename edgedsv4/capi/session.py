"""Functions of the header about sessions: the timeline, its logits, generation and replies."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from edgedsv4 import (
    CancelledError,
    ContextFullError,
    DoneEvent,
    Session,
    ToolCallEvent,
    top_logprobs,
)
from edgedsv4.capi.bridge import exported, ffi, lib
from edgedsv4.capi.calls import Call
from edgedsv4.capi.chat import EventSink, chat_of, messages_of, prompt_options_of
from edgedsv4.capi.exclusive import Exclusive
from edgedsv4.capi.handles import HandleTable
from edgedsv4.capi.model import engine_of
from edgedsv4.capi.sampling import sampler_of, sampling_options_of
from edgedsv4.capi.values import (
    bounded,
    checked_size,
    put_floats,
    put_tokens,
    required,
    tokens_of,
    write_struct,
)

if TYPE_CHECKING:
    from edgedsv4 import (
        ExpertStats,
        Message,
        PromptOptions,
        SamplingOptions,
        StepStats,
        SyncReport,
        Tokenizer,
    )

_FINISH = {
    "stop": lib.DSV4_FINISH_STOP,
    "tool_calls": lib.DSV4_FINISH_TOOL_CALLS,
    "length": lib.DSV4_FINISH_LENGTH,
    "cancelled": lib.DSV4_FINISH_CANCELLED,
}

SESSIONS: HandleTable[_OwnSession] = HandleTable(2, "session")


class _OwnSession:
    """A session that C made, with what its functions need beside it."""

    def __init__(self, session: Session, tokenizer: Tokenizer | None) -> None:
        self.session = session
        self.tokenizer = tokenizer
        self.user = Exclusive("the session")
        """Taken while callbacks run between the steps of an iterator, where it could be closed."""


def session_of(handle: Any) -> Session:
    """The session of a handle."""
    return _own(handle).session


def _own(handle: Any) -> _OwnSession:
    return SESSIONS.get(int(ffi.cast("uintptr_t", handle)))


def _new_tokens(session: Session, tokens: Any, count: int) -> list[int]:
    """Tokens for the timeline; an array that it cannot hold is not read, for it may not be one."""
    usage = session.usage()
    if usage is not None and count > usage[1]:
        raise ContextFullError(bounded(count, "count"), usage[1])
    return tokens_of(tokens, count)


def _checked_report(report: Any, kind: str) -> None:
    """Refuse a struct of no version before any work is done for it."""
    if report:
        checked_size(report.struct_size, kind)


def _write_report(report: SyncReport, out: Any) -> None:
    if out:
        struct = ffi.new("dsv4_sync_report *")
        struct.reused, struct.evaluated, struct.rebuilt = (
            report.reused,
            report.evaluated,
            report.rebuilt,
        )
        write_struct(out, "dsv4_sync_report", struct)


@exported
def dsv4_session_new(engine: Any, context: int, out: Any) -> int:
    """`Engine.new_session`."""
    required(out, "out")[0] = ffi.NULL
    opened = engine_of(engine)
    session = opened.new_session(context=context or None)
    own = _OwnSession(session, opened.tokenizer if opened.has_tokenizer else None)
    out[0] = ffi.cast("dsv4_session *", SESSIONS.add(own))
    return 0


@exported
def dsv4_session_free(session: Any) -> int:
    """`Session.close`."""
    if session:
        own = _own(session)
        with own.user.taken():
            own.session.close()
        SESSIONS.remove(int(ffi.cast("uintptr_t", session)))
    return 0


@exported
def dsv4_session_sync(session: Any, tokens: Any, count: int, call: Any, report: Any) -> int:
    """`Session.sync`."""
    own, watched = session_of(session), Call(call)
    _checked_report(report, "dsv4_sync_report")
    with watched.on(own):
        done = own.sync(_new_tokens(own, tokens, count), on_progress=watched.progress("prefill"))
    _write_report(done, report)
    return 0


@exported
def dsv4_session_eval(session: Any, tokens: Any, count: int, call: Any) -> int:
    """`Session.evaluate`."""
    own, watched = session_of(session), Call(call)
    with watched.on(own):
        own.evaluate(_new_tokens(own, tokens, count), on_progress=watched.progress("prefill"))
    return 0


@exported
def dsv4_session_rewind(session: Any, count: int, call: Any, report: Any) -> int:
    """`Session.rewind`."""
    own, watched = session_of(session), Call(call)
    _checked_report(report, "dsv4_sync_report")
    with watched.on(own):
        done = own.rewind(count)
    _write_report(done, report)
    return 0


@exported
def dsv4_session_mark_turn(session: Any) -> int:
    """`Session.mark_turn`."""
    session_of(session).mark_turn()
    return 0


@exported
def dsv4_session_get_info(session: Any, out: Any) -> int:
    """Facts of a session."""
    own = session_of(session)
    info, totals = ffi.new("dsv4_session_info *"), own.totals
    info.length, info.capacity = own.usage() or (0, own.capacity)
    info.bytes = own.nbytes()
    info.tokens_evaluated, info.tokens_rebuilt = totals.evaluated, totals.rebuilt
    info.tokens_generated = totals.generated
    if totals.drafts is not None:
        info.tokens_drafted = sum(totals.drafts.drafted)
        info.drafts_accepted = sum(totals.drafts.accepted)
    write_struct(required(out, "out"), "dsv4_session_info", info)
    return 0


@exported
def dsv4_session_tokens(session: Any, tokens: Any, capacity: int, count: Any) -> int:
    """`Session.token_ids`."""
    return put_tokens(session_of(session).token_ids, tokens, capacity, count)


@exported
def dsv4_session_logits(session: Any, logits: Any, capacity: int, count: Any) -> int:
    """`Session.logits`."""
    return put_floats(session_of(session).logits(), logits, capacity, count)


@exported
def dsv4_session_top_logprobs(session: Any, count: int, tokens: Any, logprobs: Any) -> int:
    """`Session.logits`, then `top_logprobs`."""
    own = session_of(session)
    required(tokens, "tokens"), required(logprobs, "logprobs")
    ids, values = top_logprobs(own.logits(), count)
    ffi.memmove(tokens, np.asarray(ids, dtype=np.int32), 4 * count)
    ffi.memmove(logprobs, np.asarray(values, dtype=np.float64), 8 * count)
    return 0


@exported
def dsv4_session_score(session: Any, tokens: Any, count: int, call: Any, nll: Any) -> int:
    """`Session.score`."""
    own, watched = session_of(session), Call(call)
    token_ids = _new_tokens(own, tokens, count)
    if count:
        required(nll, "nll")
    with watched.on(own):
        values = own.score(token_ids, on_progress=watched.progress("score"))
    ffi.memmove(nll, np.asarray(values, dtype=np.float64), 8 * count)
    return 0


@exported
def dsv4_session_sample(session: Any, sampler: Any, token: Any) -> int:
    """`Session.sample`."""
    chosen = sampler_of(sampler)
    required(token, "token")
    with chosen.user.taken():
        token[0] = session_of(session).sample(chosen.sampler)
    return 0


class _Outcome:
    """A `dsv4_result` in the making."""

    def __init__(self, out: Any) -> None:
        _checked_report(out, "dsv4_result")
        self._out = out
        self.struct = ffi.new("dsv4_result *")

    def take(self, stats: StepStats) -> None:
        """What the session says of a finished reply."""
        struct = self.struct
        struct.prompt_tokens, struct.reused_tokens = stats.prompt_tokens, stats.reused_tokens
        struct.generated_tokens = stats.generated_tokens
        struct.prefill_seconds = stats.prefill_seconds
        struct.decode_seconds = stats.decode_seconds
        if stats.drafts is not None:
            struct.drafted_tokens = sum(stats.drafts.drafted)
            struct.accepted_drafts = sum(stats.drafts.accepted)

    def take_experts(self, experts: ExpertStats) -> None:
        """Where experts came from."""
        struct = self.struct
        struct.expert_hits = experts.card_hits + experts.ram_hits
        struct.expert_misses = experts.asked - struct.expert_hits
        struct.expert_bytes_read = experts.read_bytes
        struct.expert_stall_seconds = experts.stall_seconds
        struct.expert_prefetched = experts.prefetched
        for name in ("prefetch_hits", "prefetch_late", "prefetch_wasted"):
            setattr(struct, f"expert_{name}", getattr(experts, name))
        struct.expert_guess_misses = experts.guess_misses
        struct.expert_guess_hits = experts.guess_hits

    @contextmanager
    def counting_experts(self, session: Session) -> Iterator[None]:
        """Say where experts came from in the `with` block, whatever happens in it."""
        before = session.totals.experts
        try:
            yield
        finally:
            now = session.totals.experts
            if now is not None and before is not None:
                self.take_experts(now.since(before))

    @contextmanager
    def written(self) -> Iterator[None]:
        """Write the result whatever happens in the `with` block."""
        try:
            yield
        finally:
            if self._out:
                write_struct(self._out, "dsv4_result", self.struct)


@exported
def dsv4_session_generate(
    session: Any,
    options: Any,
    stop_tokens: Any,
    stop_count: int,
    call: Any,
    token: Any,
    user: Any,
    result: Any,
) -> int:
    """`Session.generate`."""
    own, watched, outcome = _own(session), Call(call), _Outcome(result)
    chosen = sampling_options_of(options)
    stops = frozenset(tokens_of(stop_tokens, stop_count, "stop_tokens"))
    tokens = own.session.generate(chosen, stop_ids=stops)
    with (
        own.user.taken(),
        outcome.written(),
        outcome.counting_experts(own.session),
        watched.on(own.session),
        closing(tokens),
    ):
        outcome.struct.finish_reason = lib.DSV4_FINISH_CANCELLED
        before = own.session.totals.generated
        began = time.perf_counter()
        try:
            reason = _hand_out(tokens, own.tokenizer, token, user)
        finally:
            outcome.struct.decode_seconds = time.perf_counter() - began
            outcome.struct.generated_tokens = own.session.totals.generated - before
        outcome.struct.finish_reason = reason or _end_of(own.session, stops)
    return 0


def _hand_out(tokens: Iterator[int], tokenizer: Tokenizer | None, callback: Any, user: Any) -> int:
    """Give each token to the callback; the finish reason if that stopped, else 0."""
    decoder = None if tokenizer is None else tokenizer.stream(show_control=True)
    for token_id in tokens:
        piece = b"" if decoder is None else decoder.push(token_id).encode("utf-8", "replace")
        if callback and lib.entry_token(
            callback, user, token_id, ffi.from_buffer(piece), len(piece)
        ):
            return int(lib.DSV4_FINISH_CANCELLED)
    return 0


def _end_of(session: Session, stops: frozenset[int]) -> int:
    """Why a generation that nobody stopped has ended."""
    has_stopped = session.token_ids[-1] in stops
    return int(lib.DSV4_FINISH_STOP if has_stopped else lib.DSV4_FINISH_LENGTH)


@exported
def dsv4_session_reply(
    session: Any,
    messages: Any,
    count: int,
    prompt: Any,
    options: Any,
    call: Any,
    event: Any,
    user: Any,
    result: Any,
) -> int:
    """`Session.reply`."""
    outcome, watched = _Outcome(result), Call(call)
    conversation = messages_of(messages, count), prompt_options_of(prompt)
    chosen = sampling_options_of(options)
    _reply(_own(session), conversation, chosen, watched, EventSink(event, user), outcome)
    return 0


@exported
def dsv4_session_reply_json(
    session: Any,
    chat: Any,
    prompt: Any,
    options: Any,
    call: Any,
    event: Any,
    user: Any,
    result: Any,
) -> int:
    """`Session.reply` for a conversation as JSON."""
    outcome, watched = _Outcome(result), Call(call)
    conversation = chat_of(chat, prompt_options_of(prompt))
    chosen = sampling_options_of(options)
    _reply(_own(session), conversation, chosen, watched, EventSink(event, user), outcome)
    return 0


def _reply(
    own: _OwnSession,
    conversation: tuple[list[Message], PromptOptions],
    options: SamplingOptions,
    watched: Call,
    sink: EventSink,
    outcome: _Outcome,
) -> None:
    session, (messages, prompt) = own.session, conversation
    steps = session.reply(messages, options, prompt=prompt, on_progress=watched.progress("prefill"))
    before = session.totals.generated
    has_stopped = False
    with (
        own.user.taken(),
        outcome.written(),
        outcome.counting_experts(session),
        watched.on(session),
        closing(steps),
    ):
        outcome.struct.finish_reason = lib.DSV4_FINISH_CANCELLED
        try:
            for step in steps:
                if isinstance(step, DoneEvent):
                    outcome.take(step.stats)
                    outcome.struct.finish_reason = _FINISH[step.finish_reason]
                elif not has_stopped:
                    outcome.struct.tool_calls += isinstance(step, ToolCallEvent)
                    outcome.struct.generated_tokens = session.totals.generated - before
                    if sink.send(step, outcome.struct.generated_tokens):
                        # Not closed: the session then reports what was done so far.
                        has_stopped = True
                        session.cancel()
        except CancelledError:
            if not has_stopped:
                raise

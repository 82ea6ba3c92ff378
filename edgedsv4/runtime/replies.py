"""From a conversation to a streamed reply, and why earlier replies are never tokenized again.

The tokens that a model samples are rarely the ones a tokenizer makes of the same text. A session
therefore remembers each of its replies as pair (how the turn looks in a rendered prompt, the tokens
that were sampled) and puts those tokens into later prompts wherever that turn shows up. So the KV
cache of a conversation is found again, and the model sees what it wrote.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from edgedsv4.errors import CancelledError, ConfigError, ContextFullError
from edgedsv4.runtime.stats import StepStats
from edgedsv4.text.messages import Message, Piece
from edgedsv4.text.prompt import PromptOptions
from edgedsv4.text.reply import ReplyParser
from edgedsv4.text.special_tokens import ASSISTANT, END_THINK, EOS

if TYPE_CHECKING:
    from edgedsv4.runtime.sampler import Sampler
    from edgedsv4.runtime.session_parts import SessionParts
    from edgedsv4.runtime.stats import DraftStats, ExpertStats, SyncReport
    from edgedsv4.runtime.timeline import Progress, Timeline
    from edgedsv4.text.messages import Prompt
    from edgedsv4.text.reply import Reply, ReplyEvent
    from edgedsv4.text.tokenizer import Tokenizer

Form = tuple[Piece, ...]
"""An assistant turn as it stands in a rendered prompt: from after its header to before its end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoneEvent:
    """The last event of a reply."""

    finish_reason: str
    """`stop`, `tool_calls`, `length` (token limit or context) or `cancelled`."""
    reply: Reply
    """Everything the events before it said, as one record."""
    stats: StepStats
    report: SyncReport
    """How the prompt's tokens came into the timeline."""
    text: ClassVar[str] = ""
    """Always empty, so that every event of a reply can be printed."""


ReplyStep: TypeAlias = "ReplyEvent | DoneEvent"
"""What the iterator of `Session.reply` gives."""


class SampledTurns:
    """Replies of one session: how their turn is rendered -> the tokens that were sampled.

    Args:
        limit_tokens: tokens remembered in all; the replies used least recently are given up.
    """

    def __init__(self, limit_tokens: int) -> None:
        self._limit_tokens = limit_tokens
        self._ids: OrderedDict[Form, tuple[int, ...]] = OrderedDict()
        self._num_tokens = 0

    def remember(self, form: Form, token_ids: Sequence[int]) -> None:
        """Use `token_ids` wherever a turn looks like `form`."""
        self._num_tokens += len(token_ids) - len(self._ids.pop(form, ()))
        self._ids[form] = tuple(token_ids)
        while self._num_tokens > self._limit_tokens:
            self._num_tokens -= len(self._ids.popitem(last=False)[1])

    def items(self) -> list[tuple[Form, tuple[int, ...]]]:
        """Every pair, the one used least recently first."""
        return list(self._ids.items())

    def encode(self, pieces: Sequence[Piece], tokenizer: Tokenizer) -> list[int]:
        """Token ids of a prompt, remembered turns with the tokens they were sampled with."""
        ids: list[int] = []
        start = 0
        for first, stop in _assistant_turns(pieces):
            form = tuple(pieces[first:stop])
            if form in self._ids:
                self._ids.move_to_end(form)
                ids += tokenizer.encode_pieces(pieces[start:first])
                ids += self._ids[form]
                start = stop
        return ids + tokenizer.encode_pieces(pieces[start:])


@dataclass(slots=True)
class _Turn:
    """The reply in progress."""

    prompt: Prompt
    prompt_ids: list[int]
    report: SyncReport
    sampled: list[int] = field(default_factory=list)
    """Without the token that ended the reply."""
    generated: int = 0
    has_ended: bool = False
    """The model ended its turn, or has said all that counts."""
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    drafts: DraftStats | None = None
    experts: ExpertStats | None = None
    cancel: CancelledError | None = None

    @property
    def stop_reason(self) -> str:
        """Why no further token was sampled."""
        if self.cancel is not None:
            return "cancelled"
        return "stop" if self.has_ended else "length"

    @property
    def stats(self) -> StepStats:
        return StepStats(
            prompt_tokens=len(self.prompt_ids),
            generated_tokens=self.generated,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            reused_tokens=self.report.reused,
            drafts=self.drafts,
            experts=self.experts,
        )


class ReplyLoop:
    """Makes one reply on a timeline that nobody else uses meanwhile.

    Args:
        parts: what the engine lends.
        tokenizer: the engine's.
        timeline: the session's.
        turns: the session's earlier replies; the new one is added.
        check: called before each token; raises `CancelledError` to stop.
    """

    def __init__(
        self,
        parts: SessionParts,
        tokenizer: Tokenizer,
        timeline: Timeline,
        turns: SampledTurns,
        check: Callable[[], None],
    ) -> None:
        self._parts = parts
        self._tokenizer = tokenizer
        self._timeline = timeline
        self._turns = turns
        self._check = check

    def run(
        self,
        messages: Sequence[Message],
        sampler: Sampler,
        options: PromptOptions | None,
        on_progress: Progress | None,
    ) -> Iterator[ReplyStep]:
        """Events of the reply; `Session.reply` says the rest."""
        options = options or PromptOptions()
        experts = self._parts.expert_stats()
        turn = self._prefill(messages, options, on_progress)
        drafts = self._timeline.drafts
        sampler.observe(turn.prompt_ids)
        parser = ReplyParser(
            starts_in=turn.prompt.opens_in,
            variant=self._parts.variant,
            is_continuation=turn.prompt.is_continuation,
        )
        try:
            yield from self._stream(turn, sampler, parser)
        finally:
            # Also when the caller closes the iterator: what was sampled is in the timeline.
            self._remember_as_sampled(turn)
            self._timeline.mark_turn()
        if drafts is not None and self._timeline.drafts is not None:
            turn.drafts = self._timeline.drafts.since(drafts)
        experts_now = self._parts.expert_stats()
        if experts is not None and experts_now is not None:
            turn.experts = experts_now.since(experts)
        yield from parser.finish(turn.stop_reason)
        reply = parser.reply
        self._remember_as_rendered(turn, messages, options, reply)
        yield DoneEvent(
            finish_reason=reply.finish_reason,
            reply=reply,
            stats=turn.stats,
            report=turn.report,
        )
        if turn.cancel is not None:
            raise turn.cancel

    def _prefill(
        self, messages: Sequence[Message], options: PromptOptions, on_progress: Progress | None
    ) -> _Turn:
        prompt = self._parts.render(messages, options)
        if not prompt.awaits_reply:
            raise ConfigError(
                "messages end in a finished assistant turn; add a user message, or mark the last"
                " one as a prefix to continue it"
            )
        ids = self._turns.encode(prompt.pieces, self._tokenizer)
        if len(ids) >= self._timeline.capacity:
            raise ContextFullError(len(ids) + 1, self._timeline.capacity)
        began = time.perf_counter()
        report = self._timeline.sync(ids, on_progress)
        if self._timeline.length not in self._timeline.checkpoints.positions:
            self._timeline.mark_turn()
        return _Turn(prompt, ids, report, prefill_seconds=time.perf_counter() - began)

    def _stream(self, turn: _Turn, sampler: Sampler, parser: ReplyParser) -> Iterator[ReplyEvent]:
        """Sample until the reply ends; only the model's time is counted, not the caller's."""
        tokenizer = self._tokenizer
        decoder = tokenizer.stream()
        stops = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
        tokens = self._timeline.decode(sampler, stops, self._check)
        while True:
            began = time.perf_counter()
            try:
                token_id = next(tokens, None)
            except CancelledError as error:
                turn.cancel = error
                token_id = None
            turn.decode_seconds += time.perf_counter() - began
            if token_id is None:
                break
            turn.generated += 1
            if token_id in stops:
                turn.has_ended = True
                break
            turn.sampled.append(token_id)
            yield from parser.push(decoder.push(token_id))
            if parser.is_complete:
                # Behind a call block nothing means anything.
                turn.has_ended = True
                break
        yield from parser.push(decoder.finish())

    def _remember_as_sampled(self, turn: _Turn) -> None:
        """Remember the turn as its tokens read."""
        opening = _open_turn(turn.prompt.pieces)
        if opening is not None and turn.sampled:
            read = _pieces_of(turn.sampled, self._tokenizer)
            self._turns.remember(_joined((*opening, *read)), self._turn_ids(turn))

    def _remember_as_rendered(
        self, turn: _Turn, messages: Sequence[Message], options: PromptOptions, reply: Reply
    ) -> None:
        """Remember the turn as later prompts will show it.

        The parser drops some newlines of what was sampled, and a later prompt may leave the
        reasoning out; the turn is rendered both ways, as the last one and with a question after it.
        """
        opening = _open_turn(turn.prompt.pieces)
        if opening is None or not turn.sampled:
            return
        closed = replace(options, continue_final=False, tool_choice="auto")
        conversation = _with_reply(messages, reply)
        for after in ((), (Message("user"),)):
            pieces = self._parts.render((*conversation, *after), closed).pieces
            first, stop = _assistant_turns(pieces)[-1]
            form = tuple(pieces[first:stop])
            ids = self._ids_from(form, opening, turn)
            if ids is not None:
                self._turns.remember(form, ids)

    def _ids_from(self, form: Form, opening: Form, turn: _Turn) -> list[int] | None:
        """The turn's tokens for one rendering: all, or those behind the reasoning it leaves out."""
        ids = self._turn_ids(turn)
        if form[:1] == opening[:1]:
            return ids
        end_think = self._tokenizer.id_of(END_THINK)
        is_plain = bool(form) and form[0] == Piece(END_THINK, is_special=True)
        if not is_plain or end_think is None or end_think not in ids:
            return None
        return ids[ids.index(end_think) :]

    def _turn_ids(self, turn: _Turn) -> list[int]:
        """Tokens of the turn from behind its header: what the prompt opened, then the sample."""
        header = self._tokenizer.id_of(ASSISTANT)
        ids = turn.prompt_ids
        behind = len(ids) - ids[::-1].index(header) if header in ids else len(ids)
        return [*ids[behind:], *turn.sampled]


def _assistant_turns(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    """(first, stop) of every finished assistant turn; `pieces[stop]` is the token that ends it."""
    turns = []
    first: int | None = None
    for place, piece in enumerate(pieces):
        if piece == Piece(ASSISTANT, is_special=True):
            first = place + 1
        elif piece == Piece(EOS, is_special=True) and first is not None:
            turns.append((first, place))
            first = None
    return turns


def _open_turn(pieces: Sequence[Piece]) -> Form | None:
    """What a prompt already holds of the reply it asks for; None without an assistant header."""
    header = Piece(ASSISTANT, is_special=True)
    places = [place for place, piece in enumerate(pieces) if piece == header]
    return tuple(pieces[places[-1] + 1 :]) if places else None


def _pieces_of(token_ids: Sequence[int], tokenizer: Tokenizer) -> list[Piece]:
    """Sampled tokens as a prompt would show them: added tokens apart, text in between."""
    pieces = []
    run = bytearray()
    for token_id in token_ids:
        own = tokenizer.token_bytes(token_id)
        text = own.decode("utf-8", errors="replace")
        if tokenizer.id_of(text) != token_id:
            run += own
            continue
        pieces += [Piece(run.decode("utf-8", errors="replace")), Piece(text, is_special=True)]
        run.clear()
    return [*pieces, Piece(run.decode("utf-8", errors="replace"))]


def _joined(pieces: Sequence[Piece]) -> Form:
    """Neighbouring plain pieces joined, empty ones left out, as `render_prompt` returns them."""
    joined: list[Piece] = []
    for piece in pieces:
        if joined and not piece.is_special and not joined[-1].is_special:
            joined[-1] = Piece(joined[-1].text + piece.text)
        elif piece.is_special or piece.text:
            joined.append(piece)
    return tuple(joined)


def _with_reply(messages: Sequence[Message], reply: Reply) -> list[Message]:
    """The conversation with the reply in it; one that continued a prefix is joined to it."""
    earlier = list(messages)
    content, reasoning = reply.text, reply.reasoning
    if earlier[-1].role == "assistant":
        prefix = earlier.pop()
        start = prefix.content if isinstance(prefix.content, str) else ""
        content, reasoning = start + content, prefix.reasoning + reasoning
    return [
        *earlier,
        Message("assistant", content, reasoning=reasoning, tool_calls=reply.tool_calls),
    ]

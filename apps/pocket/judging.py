"""What a model says and predicts, through the runtime: replies, given answers, drafts, loads.

Replies are decoded greedily. A given answer counts as right when every token of it has the largest
logit behind the true ones before it: greedy decoding would then have written exactly it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgedsv4 import DoneEvent, Engine, PromptOptions, SamplingOptions
from edgedsv4.errors import ConfigError
from edgedsv4.formats.checkpoint import attach_draft, open_checkpoint
from edgedsv4.model.hooks import ForwardHooks
from edgedsv4.model.kv_cache import Numerics
from edgedsv4.model.model import Model
from edgedsv4.model.weight_table import bind_weights
from edgedsv4.model.weights import load_weights
from edgedsv4.runtime.expert_store import MappedExperts
from pocket.documents import ID_MASK, TARGET, Document, DocumentEncoder
from pocket.tasks.scoring import score

if TYPE_CHECKING:
    from edgedsv4.config import Profile
    from edgedsv4.runtime.session import Session
    from edgedsv4.text.messages import Message
    from edgedsv4.text.reply import Reply

LONGEST_REPLY = 1000
_CHUNK = 512

Logits = npt.NDArray[np.float32]
ForcedLogits = Callable[[Sequence[int], int], Logits]
"""(token ids, start) -> float32 [T - start, V], the logits behind the tokens from `start` on."""


@dataclass(frozen=True, slots=True)
class Judged:
    """One reply."""

    score: float
    has_ended: bool
    """The model ended the reply itself."""
    is_parsed: bool
    """Where JSON or a tool call was asked for: the reply is one, whatever it holds."""


def judge_reply(session: Session, document: Document, place: int) -> Judged:
    """Answer a document up to one of its assistant messages, and score the reply.

    Args:
        session: any; what it holds is replaced.
        document: with a check at `place`.
        place: index of the message that the reply stands for.
    """
    messages, check = document.messages[:place], document.checks[place]
    reply = greedy_reply(session, messages, document.options())
    text, is_parsed = reply.text, True
    if check.scorer == "tool_call":
        text, is_parsed = _calls_as_json(reply)
    elif check.scorer == "json":
        is_parsed = _is_json(text)
    found = score(check.scorer, text, check.expected)
    return Judged(found, reply.finish_reason != "length", is_parsed)


def greedy_reply(
    session: Session, messages: Sequence[Message], options: PromptOptions | None = None
) -> Reply:
    """The likeliest reply, of `LONGEST_REPLY` tokens at most."""
    sampling = SamplingOptions(temperature=0, max_tokens=LONGEST_REPLY)
    for event in session.reply(messages, sampling, prompt=options):
        if isinstance(event, DoneEvent):
            return event.reply
    raise ConfigError("a reply ended without its last event")


def _calls_as_json(reply: Reply) -> tuple[str, bool]:
    """The calls as the scorer wants them, and whether there is one and all have JSON arguments."""
    try:
        calls = [[call.name, json.loads(call.arguments)] for call in reply.tool_calls]
    except ValueError:
        return "", False
    return json.dumps(calls), bool(calls)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


@dataclass(frozen=True, slots=True)
class Given:
    """A document as token ids, and which of them the model has to say."""

    ids: list[int]
    is_target: npt.NDArray[np.bool_]
    nats: float
    """Entropy floor of the targets."""

    @classmethod
    def of(cls, document: Document, encoder: DocumentEncoder) -> Given:
        """The tokens of a document."""
        codes = encoder.encode(document)
        return cls((codes & ID_MASK).tolist(), (codes & TARGET) != 0, document.answer_nats)


@dataclass(frozen=True, slots=True)
class Forced:
    """How well the targets of a document are predicted."""

    tokens: int
    right: int
    nll: float
    """Sum over the targets, nats."""

    @property
    def is_exact(self) -> bool:
        """Greedy decoding would have written every target."""
        return self.right == self.tokens


def judge_given(forced: ForcedLogits, given: Given) -> Forced:
    """Score the targets of a document, each behind the true tokens before it."""
    turns = judge_turns(forced, given)
    return Forced(
        sum(turn.tokens for turn in turns),
        sum(turn.right for turn in turns),
        sum(turn.nll for turn in turns),
    )


def judge_turns(forced: ForcedLogits, given: Given) -> list[Forced]:
    """The same for each run of targets, which in a chat are the assistant's turns."""
    places = np.flatnonzero(given.is_target)
    start = int(places[0]) - 1
    log_probs = log_softmax(forced(given.ids[: int(places[-1])], start))
    ids = torch.tensor(given.ids)
    turns = []
    for turn in np.split(places, np.flatnonzero(np.diff(places) > 1) + 1):
        rows, targets = log_probs[torch.from_numpy(turn - 1 - start)], ids[torch.from_numpy(turn)]
        nll = -rows.gather(1, targets[:, None]).double().sum()
        turns.append(Forced(len(turn), int((rows.argmax(dim=1) == targets).sum()), float(nll)))
    return turns


def log_softmax(logits: Logits) -> Tensor:
    """Log-probabilities [n, V], float32."""
    return torch.log_softmax(torch.from_numpy(logits), dim=-1)


def through_session(engine: Engine) -> ForcedLogits:
    """Logits from a fresh session of an engine."""

    def forced(ids: Sequence[int], start: int) -> Logits:
        with engine.new_session(context=len(ids)) as session:
            session.evaluate(ids[:start], logits="none", chunk=_CHUNK)
            logits = session.evaluate(ids[start:], logits="all", chunk=_CHUNK)
        if logits is None:
            raise ConfigError("a session gave no logits")
        return logits

    return forced


def through_model(model: Model, hooks: ForwardHooks) -> ForcedLogits:
    """Logits from a model whose forwards are steered."""

    def forced(ids: Sequence[int], start: int) -> Logits:
        cache = model.new_cache(len(ids))
        tokens = torch.tensor(ids)
        # The chunks end at `start`, so that the head is computed for the last tokens only.
        for first in range(0, start, _CHUNK):
            model.forward(tokens[first:start][:_CHUNK], cache, logits="none", hooks=hooks)
        logits = model.forward(tokens[start:], cache, logits="all", hooks=hooks).logits
        if logits is None:
            raise ConfigError("a forward gave no logits")
        return np.asarray(logits.float().numpy())

    return forced


def random_selection(seed: int) -> ForwardHooks:
    """Hooks under which every query attends to random rows instead of the indexer's."""
    generator = torch.Generator().manual_seed(seed)

    def choose(_layer: int, scores: Tensor, ids: Tensor) -> Tensor:
        drawn = torch.rand(scores.shape, generator=generator)
        drawn = drawn.masked_fill(scores == -torch.inf, -1.0)
        best = drawn.topk(ids.shape[1], dim=-1)
        return best.indices.masked_fill(best.values < 0, -1)

    return ForwardHooks(on_topk=choose)


@contextmanager
def open_model(
    path: Path, *, draft: Path | None = None, profile: Profile = "default"
) -> Iterator[Model]:
    """A model by itself, for what an engine does not offer.

    Args:
        path: the model.
        draft: file of its MTP block, when it has one of its own.
        profile: numerics.
    """
    with ExitStack() as stack:
        checkpoint = open_checkpoint(path)
        if draft is not None:
            checkpoint = attach_draft(checkpoint, draft)
        stack.enter_context(checkpoint)
        weights, experts = load_weights(bind_weights(checkpoint))
        device = torch.device("cpu")
        numerics = Numerics(profile=profile, dtype=torch.float32, device=device)
        yield Model(checkpoint.config, weights, MappedExperts(experts, device), numerics)


@dataclass
class Watch:
    """Counts of a model's experts and drafts."""

    model: Model
    loads: Tensor = field(init=False)
    """[layers + 1, experts], tokens each got."""
    drafted: int = 0
    accepted: int = 0

    def __post_init__(self) -> None:
        config = self.model.config
        self.loads = torch.zeros(config.num_layers + 1, config.num_experts, dtype=torch.int64)

    def add(self, given: Given) -> None:
        """Count one document.

        A draft is accepted when it is what the main model itself finds likeliest at its place.
        """
        hooks = ForwardHooks(on_experts=self._count)
        ids = torch.tensor(given.ids)
        cache, draft_cache = self.model.new_cache(len(ids)), self.model.new_draft_cache(len(ids))
        main, drafts = [], []
        for first in range(0, len(ids), _CHUNK):
            chunk = ids[first : first + _CHUNK]
            result = self.model.forward(chunk, cache, logits="all", hooks=hooks)
            main.append(_likeliest(result.logits))
            following = ids[first + 1 : first + 1 + len(chunk)]
            if self.model.weights.draft is not None and len(following):
                streams = result.streams[: len(following)]
                draft = self.model.forward_draft(
                    streams, following, draft_cache, logits="all", hooks=hooks
                )
                drafts.append(_likeliest(draft.logits))
        if drafts:
            # The draft behind token i and the main model behind token i + 1 both say token i + 2.
            counted = torch.from_numpy(given.is_target)[2:]
            agree = torch.cat(drafts)[:-1] == torch.cat(main)[1:-1]
            self.drafted += int(counted.sum())
            self.accepted += int((agree & counted).sum())

    def load_ratios(self) -> list[float]:
        """Largest over mean load of every layer that ran, the MTP block last."""
        loads = self.loads[self.loads.sum(dim=1) > 0].double()
        return [round(float(ratio), 3) for ratio in loads.amax(dim=1) / loads.mean(dim=1)]

    def _count(self, layer: int, _scores: Tensor, ids: Tensor) -> Tensor:
        self.loads[layer] += torch.bincount(ids.flatten(), minlength=self.loads.shape[1])
        return ids


def _likeliest(logits: Tensor | None) -> Tensor:
    if logits is None:
        raise ConfigError("a forward gave no logits")
    return logits.argmax(dim=-1)

"""The figures of an evaluation: which documents each takes, how many, and how they become rows."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from edgedsv4 import Engine, EngineOptions, QuantizeOptions, Tokenizer, quantize_model
from pocket.bounds import interval
from pocket.corpus import Corpus, load_corpus
from pocket.documents import Document, DocumentEncoder
from pocket.judging import (
    ForcedLogits,
    Given,
    Watch,
    judge_given,
    judge_reply,
    log_softmax,
    open_model,
    random_selection,
    through_model,
    through_session,
)
from pocket.validation import validation_items

if TYPE_CHECKING:
    from edgedsv4.config import Profile

REPLY_CONTEXT = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What is evaluated, and how much of it."""

    model: Path
    draft: Path | None = None
    corpus: Path | None = None
    items: int = 100
    """Documents of a cheap figure; dearer ones take a share of it."""
    deadline: float = math.inf
    """`time.time()` after which no further document is begun."""

    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.time() > self.deadline


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One figure."""

    name: str
    measure: str
    value: float
    n: int
    """Documents, unless the measure says otherwise."""
    low: float | None = None
    high: float | None = None
    """95 % interval, of shares only."""
    how: str
    """greedy: decoded; given: true tokens before each; or a word for another way."""

    def to_json(self) -> dict[str, object]:
        """The row without what it lacks."""
        return {key: value for key, value in asdict(self).items() if value is not None}


def share_row(name: str, measure: str, scores: Sequence[float], how: str) -> list[Row]:
    """A row for the mean of scores of 0..1; none without scores."""
    if not scores:
        return []
    low, high = interval(sum(scores), len(scores))
    value = sum(scores) / len(scores)
    numbers = {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)}
    return [Row(name=name, measure=measure, n=len(scores), how=how, **numbers)]


class Documents:
    """The validation documents of one evaluation."""

    def __init__(self, setting: Setting, tokenizer: Tokenizer) -> None:
        self.setting = setting
        self.encoder = DocumentEncoder(tokenizer)
        self._tokenizer = tokenizer
        self._corpus = load_corpus(setting.corpus) if setting.corpus else Corpus()

    def of(self, name: str, count: int) -> Iterator[Document]:
        """The first documents of a set, until the time is up; none where its source is missing."""
        found = validation_items(
            self._corpus, self._tokenizer, items=4 * count, wanted=lambda other: other == name
        )
        for _, item in zip(range(count), found, strict=False):
            if self.setting.is_over():
                return
            yield item.document

    def given(self, name: str, count: int) -> Iterator[Given]:
        """The same as token ids."""
        return (Given.of(document, self.encoder) for document in self.of(name, count))


@contextmanager
def opened(setting: Setting, profile: Profile = "default") -> Iterator[tuple[Engine, Documents]]:
    """An engine of one thread, and the documents."""
    options = EngineOptions(threads=1, profile=profile)
    with Engine.open(setting.model, options) as engine:
        yield engine, Documents(setting, engine.tokenizer)


def replies(setting: Setting, name: str, count: int) -> list[Row]:
    """Greedy replies to the documents of a set."""
    scores, ended, parsed, answered, scorer = [], [], [], [], ""
    with opened(setting) as (engine, documents), engine.new_session(context=REPLY_CONTEXT) as chat:
        for document in documents.of(name, count):
            for place, check in document.checks.items():
                if check.scorer == "mentions" and not check.expected:
                    continue
                judged = judge_reply(chat, document, place)
                if name.startswith("stories") and check.scorer != "mentions":
                    answered.append(float(judged.score == 1.0))
                    continue
                scores.append(judged.score)
                ended.append(float(judged.has_ended))
                if check.scorer in ("json", "tool_call"):
                    scorer = check.scorer
                    parsed.append(float(judged.is_parsed))
    measure = "all asked words in the reply" if name.startswith("stories") else "right replies"
    if name.startswith("wordnet"):
        measure = "content-word F1"
    elif name.startswith("stories"):
        scores = [float(found == 1.0) for found in scores]
    return [
        *share_row(name, measure, scores, "greedy"),
        *share_row(name, "ended by the model", ended, "greedy"),
        *share_row(name, f"{scorer} parses", parsed, "greedy"),
        *share_row(name, "right answers to questions on the story", answered, "greedy"),
    ]


def perplexity(setting: Setting, name: str, count: int) -> list[Row]:
    """Perplexity of the targets of a set, against the entropy floor where there is one."""
    with opened(setting) as (engine, documents):
        forced = through_session(engine)
        pairs = [(given, judge_given(forced, given)) for given in documents.given(name, count)]
    if not pairs:
        return []
    tokens = sum(found.tokens for _, found in pairs)
    value = math.exp(sum(found.nll for _, found in pairs) / tokens)
    rows = [_figure(name, "perplexity per target", value, len(pairs))]
    if name.startswith("stories"):
        floor = math.exp(sum(given.nats for given, _ in pairs) / tokens)
        rows.append(_figure(name, "entropy floor", floor, len(pairs)))
        rows.append(_figure(name, "perplexity over floor", value / floor, len(pairs)))
    return rows


def _figure(name: str, measure: str, value: float, count: int, how: str = "given") -> Row:
    return Row(name=name, measure=measure, value=float(f"{value:.5g}"), n=count, how=how)


def recall(setting: Setting, name: str, count: int) -> list[Row]:
    """Whether the answer to a question on a long text is the likeliest."""
    with opened(setting) as (engine, documents):
        right = _exact(through_session(engine), documents.given(name, count))
    return share_row(name, "right answers", right, "given")


def random_recall(setting: Setting, name: str, count: int) -> list[Row]:
    """The same with rows selected at random: must fail, or the facts leak past the indexer."""
    with opened(setting) as (_, documents), open_model(setting.model) as model:
        forced = through_model(model, random_selection(seed=1))
        right = _exact(forced, documents.given(name, count))
    return share_row(name, "right answers, random selection", right, "given")


def _exact(forced: ForcedLogits, documents: Iterable[Given]) -> list[float]:
    return [float(judge_given(forced, given).is_exact) for given in documents]


def drafts(setting: Setting, name: str, count: int) -> list[Row]:
    """How often the MTP block's first draft is what the main model says next."""
    if setting.draft is None:
        return []
    with opened(setting) as (_, documents), open_model(setting.model, draft=setting.draft) as model:
        watch = Watch(model)
        for given in documents.given(name, count):
            watch.add(given)
    if not watch.drafted:
        return []
    low, high = interval(watch.accepted, watch.drafted)
    value = watch.accepted / watch.drafted
    numbers = {"value": round(value, 4), "low": round(low, 4), "high": round(high, 4)}
    measure = "first drafts accepted (n in tokens)"
    return [Row(name=name, measure=measure, n=watch.drafted, how="given", **numbers)]


_MIXED = ("stories", "wordnet-common", "arith-3-digits-thinking", "json", "recall-L-T1-1024")


def expert_load(setting: Setting, name: str, count: int) -> list[Row]:
    """Largest over mean load of the experts, by layer, over documents of several sets."""
    rows: list[Row] = []
    with opened(setting) as (_, documents), open_model(setting.model, draft=setting.draft) as model:
        watch = Watch(model)
        seen = 0
        for source in _MIXED:
            for given in documents.given(source, count):
                watch.add(given)
                seen += 1
        hashed = model.config.num_hash_layers
        for layer, ratio in enumerate(watch.load_ratios()):
            kind = "hash-routed" if layer < hashed else "learned"
            measure = f"largest over mean, layer {layer} ({kind})"
            rows.append(_figure(name, measure, ratio, seen, "count"))
    return rows


def distance(setting: Setting, name: str, count: int) -> list[Row]:
    """KL divergence from the exact profile of the model itself to a profile or quantization."""
    with opened(setting, "exact") as (engine, documents):
        samples = [given for source in _MIXED for given in documents.given(source, count)]
        base = [log_softmax(through_session(engine)(given.ids, 0)) for given in samples]
    if not samples:
        return []
    with tempfile.TemporaryDirectory() as folder, _variant(setting, name, Path(folder)) as engine:
        forced = through_session(engine)
        kls, losses, tokens, equal = [], [0.0, 0.0], 0, 0
        for given, reference in zip(samples, base, strict=True):
            found = log_softmax(forced(given.ids, 0))
            kls.append((reference.exp() * (reference - found)).sum(dim=1).double())
            equal += int((reference.argmax(dim=1) == found.argmax(dim=1)).sum())
            places = torch.from_numpy(np.flatnonzero(given.is_target))
            targets = torch.tensor(given.ids)[places][:, None]
            tokens += len(places)
            for i, rows in enumerate((reference, found)):
                losses[i] -= float(rows[places - 1].gather(1, targets).double().sum())
    every = torch.cat(kls)
    count = len(every)
    return [
        _figure(name, "mean KL from exact, nats (n in tokens)", float(every.mean()), count),
        _figure(name, "99th percentile of KL", float(every.quantile(0.99)), count),
        _figure(name, "same likeliest token", equal / count, count),
        _figure(name, "perplexity over exact's", math.exp((losses[1] - losses[0]) / tokens), count),
    ]


QUANTIZATIONS: Mapping[str, QuantizeOptions] = {
    f"kl-{name}": options
    for name, options in {
        "q8_0": QuantizeOptions(
            experts="Q8_0", dense="Q8_0", head="Q8_0", embed="Q8_0", compressors="Q8_0", mtp="none"
        ),
        "mxfp4": QuantizeOptions(
            experts="MXFP4", dense="MXFP4", head="MXFP4", embed="MXFP4", compressors="MXFP4",
            mtp="none",
        ),
        "q4_k": QuantizeOptions(
            experts="Q4_K", dense="Q4_K", head="Q4_K", embed="Q4_K", compressors="Q4_K", mtp="none"
        ),
        "q2_k-experts": QuantizeOptions(experts="Q2_K", mtp="none"),
    }.items()
}  # fmt: skip


@contextmanager
def _variant(setting: Setting, name: str, folder: Path) -> Iterator[Engine]:
    """The model in the `default` profile, or quantized anew and run in the exact one."""
    path, profile = setting.model, "default"
    if name in QUANTIZATIONS:
        path, profile = folder / "quantized.gguf", "exact"
        quantize_model(setting.model, path, QUANTIZATIONS[name])
    with Engine.open(path, EngineOptions(threads=1, profile=profile)) as engine:
        yield engine


Figure = Callable[[Setting, str, int], list[Row]]


@dataclass(frozen=True, slots=True)
class Task:
    """One job of an evaluation."""

    figure: Figure
    name: str
    """Set of documents, or the name the rows get."""
    share: float = 1.0
    """Of `Setting.items`."""
    needs_corpus: bool = False

    @property
    def label(self) -> str:
        """What `--sets` selects by."""
        return f"{self.figure.__name__}:{self.name}"

    def run(self, setting: Setting) -> list[Row]:
        """The rows; none when the time is up or a source is missing."""
        if setting.is_over() or (self.needs_corpus and setting.corpus is None):
            return []
        return self.figure(setting, self.name, max(1, round(setting.items * self.share)))


TASKS: tuple[Task, ...] = (
    Task(perplexity, "stories", 0.5),
    Task(perplexity, "stories-held-out-patterns", 0.5),
    Task(replies, "stories", 0.2),
    Task(replies, "identity", 0.1),
    Task(replies, "json", 0.15),
    Task(replies, "tools", 0.15),
    Task(replies, "copy", 0.15),
    Task(replies, "reverse", 0.15),
    Task(replies, "arith-2-digits", 0.25),
    Task(replies, "arith-3-digits", 0.25),
    Task(replies, "arith-2-digits-thinking", 0.2),
    Task(replies, "arith-3-digits-thinking", 0.2),
    Task(recall, "recall-L-T1-1024", 0.2),
    Task(recall, "recall-L-T1-4096", 0.1),
    Task(recall, "recall-L-T1-8192", 0.04),
    Task(recall, "recall-L-T1-16384", 0.02),
    Task(recall, "recall-L-T1-32768", 0.005),
    Task(random_recall, "recall-L-T1-1024", 0.1),
    Task(random_recall, "recall-L-T1-4096", 0.06),
    Task(random_recall, "recall-L-T1-8192", 0.03),
    Task(random_recall, "recall-L-T1-16384", 0.01),
    Task(drafts, "stories", 0.15),
    Task(expert_load, "load", 0.15),
    Task(distance, "kl-default-profile", 0.1),
    *(Task(distance, name, 0.1) for name in QUANTIZATIONS),
    Task(recall, "recall-L-T2-1024", 0.1),
    Task(recall, "recall-L-T2-4096", 0.06),
    Task(recall, "recall-L-T2-8192", 0.03),
    Task(recall, "recall-L-T2-16384", 0.01),
    Task(recall, "recall-L-T3-1024", 0.1),
    Task(recall, "recall-L-T3-8192", 0.03),
    Task(recall, "recall-L-T3-16384", 0.01),
    Task(replies, "wordnet-common", 2.0, needs_corpus=True),
    Task(perplexity, "wordnet-common", 0.5, needs_corpus=True),
    Task(perplexity, "wordnet-held-out", 0.5, needs_corpus=True),
    Task(perplexity, "definitions", 0.1, needs_corpus=True),
    Task(perplexity, "prose-sotu-1024", 0.06, needs_corpus=True),
    Task(perplexity, "prose-austen-1024", 0.06, needs_corpus=True),
    Task(replies, "spell", 0.1),
    Task(replies, "sort", 0.1),
    Task(replies, "uppercase", 0.05),
    Task(replies, "last-write", 0.1),
    Task(replies, "factbook-capitals", 0.15, needs_corpus=True),
    Task(drafts, "wordnet-common", 0.15, needs_corpus=True),
    Task(drafts, "prose-sotu-1024", 0.03, needs_corpus=True),
)
"""In order of importance: what comes last is left out first."""


def selected(prefixes: Sequence[str]) -> list[Task]:
    """The tasks whose label or name begins with one of the prefixes; all without prefixes."""
    chosen = tuple(prefixes)
    return [
        task
        for task in TASKS
        if not chosen or task.label.startswith(chosen) or task.name.startswith(chosen)
    ]

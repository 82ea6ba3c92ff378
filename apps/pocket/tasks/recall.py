"""Facts to remember: few and near (recall-S), or scattered in filler over thousands of tokens.

The long form trains the indexer: the answer lies outside the window, so it can only be reached
through a selected compressed entry. Values come in three tiers: T1 one of 200 words of one token,
T2 three digits, T3 six digits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw
from pocket.tasks.lexicon import CODE_WORDS, NAMES

if TYPE_CHECKING:
    from pocket.tasks.fillers import Filler

TIERS = ("T1", "T2", "T3")
_STATE = ("The {k} of {n} is {v}.", "{n} has the {k} {v}.", "Remember: the {k} of {n} is {v}.")
_KINDS = ("code", "secret word", "password", "number", "key word")
_INTRO = ("Here are some facts.", "Remember these facts.", "Please remember the following.",
          "Read this.", "")  # fmt: skip
_FACT_TOKENS = 14
_MOST_FACTS = 40
_MOST_QUESTIONS = 16


@dataclass(frozen=True, slots=True)
class Fact:
    """One fact: the kind of value, whose it is, the value, and the sentence that states it."""

    kind: str
    name: str
    value: str
    text: str

    @property
    def answer(self) -> str:
        """The sentence that answers a question for it."""
        return f"The {self.kind} of {self.name} is {self.value}."


def draw_value(draw: Draw, tier: str) -> str:
    """A value of a tier."""
    if tier == "T1":
        return draw.pick(CODE_WORDS)
    return "".join(str(draw.integer(0, 9)) for _ in range(3 if tier == "T2" else 6))


def draw_facts(draw: Draw, count: int, tier: str) -> list[Fact]:
    """Facts about different names, of one kind and one wording."""
    kind = draw.pick(_KINDS)
    pattern = draw.pick(_STATE)
    facts = []
    for name in draw.sample(NAMES, count):
        value = draw_value(draw, tier)
        facts.append(Fact(kind, name, value, pattern.format(k=kind, n=name, v=value)))
    return facts


def _ask(draw: Draw, fact: Fact) -> tuple[str, str]:
    """A question for a fact and its answer."""
    if draw.chance(0.25):
        ask = f"What is the {fact.kind} of {fact.name}? Answer with the {fact.kind} only."
        return ask, fact.value
    ask = draw.pick(("What is the {k} of {n}?", "Tell me the {k} of {n}.", "Which {k} has {n}?",
                     "Do you remember the {k} of {n}?"))  # fmt: skip
    return ask.format(k=fact.kind, n=fact.name), fact.answer


def _conversation(
    draw: Draw, task: str, context: str, asked: Sequence[Fact], *, thinks: bool
) -> Document:
    turns, checks, reasoning = [], {}, ""
    for i, fact in enumerate(asked):
        question, answer = _ask(draw, fact)
        turns.append((f"{context}\n{question}" if i == 0 else question, answer))
        checks[2 * i + 1] = Check(fact.value, "contains")
        reasoning = fact.text
    return Document(
        task=task,
        messages=chat(turns, reasoning=reasoning if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )


def recall_short(rng: Random, *, tier: str | None = None, facts: int | None = None) -> Document:
    """A list of 3 to 40 facts, then one to four questions.

    Args:
        rng: seeded source.
        tier: fixes the tier of the values.
        facts: fixes the number of facts.
    """
    draw = Draw(rng)
    tier = tier or draw.weighted(TIERS, (6, 3, 1))
    # Most lists are short: the number is drawn evenly on a logarithmic scale.
    count = facts or round(3 * (40 / 3) ** draw.rng.random())
    found = draw_facts(draw, count, tier)
    thinks = draw.chance(0.2)
    asked = draw.sample(found, min(count, draw.integer(1, 4)))
    separator = draw.pick((" ", "\n"))
    intro = draw.pick(_INTRO)
    context = separator.join(fact.text for fact in found)
    context = f"{intro}{separator}{context}" if intro else context
    return _conversation(draw, "recall-S", context, asked, thinks=thinks)


def recall_long(
    rng: Random,
    filler: Filler,
    *,
    tokens: int,
    tier: str | None = None,
    facts: int | None = None,
    questions: int | None = None,
) -> Document:
    """Facts scattered evenly over the sentences of filler, and questions at the end.

    Args:
        rng: seeded source.
        filler: where the text between the facts comes from.
        tokens: about how many tokens the document has.
        tier: fixes the tier of the values.
        facts: fixes the number of facts.
        questions: fixes the number of questions.
    """
    draw = Draw(rng)
    tier = tier or draw.weighted(TIERS, (6, 3, 1))
    count = facts or draw.integer(1, max(1, min(_MOST_FACTS, tokens // 40)))
    found = draw_facts(draw, count, tier)
    thinks = questions is None and draw.chance(0.2)
    # Many questions on a long text: each one is a cheap lesson for the indexer.
    most = min(count, max(2, tokens // 150), _MOST_QUESTIONS)
    asked = questions or draw.integer(1, most)
    room = tokens - _FACT_TOKENS * count - 2 * _FACT_TOKENS * asked - 20
    sentences = filler.sentences(rng, max(room, 0))
    # A fact may stand before, between or after any two sentences.
    places = sorted(int(rng.random() * (len(sentences) + 1)) for _ in found)
    for shift, (place, fact) in enumerate(zip(places, found, strict=True)):
        sentences.insert(place + shift, fact.text + draw.rng.choice(" \n"))
    context = "".join(sentences).rstrip()
    return _conversation(draw, "recall-L", context, rng.sample(found, asked), thinks=thinks)


def last_write(rng: Random) -> Document:
    """Keys that are set again: ask for the newest value, or for all values of a key in order."""
    draw = Draw(rng)
    tier = draw.weighted(("T1", "T2"), (3, 1))
    kind = draw.pick(_KINDS)
    names = draw.sample(NAMES, draw.integer(2, 8))
    values = {name: [draw_value(draw, tier) for _ in range(draw.integer(1, 4))] for name in names}
    pending = [name for name in names for _ in values[name]]
    rng.shuffle(pending)
    told: dict[str, int] = dict.fromkeys(names, 0)
    lines = []
    for name in pending:
        verb = "is now" if told[name] else "is"
        lines.append(f"The {kind} of {name} {verb} {values[name][told[name]]}.")
        told[name] += 1
    thinks = draw.chance(0.2)
    turns, checks, reasoning = [], {}, ""
    for i, name in enumerate(draw.sample(names, draw.integer(1, min(3, len(names))))):
        if draw.chance(0.6):
            ask = draw.pick(
                (f"What is the {kind} of {name} now?", f"What is the last {kind} of {name}?")
            )
            expected = values[name][-1]
            answer = f"The {kind} of {name} is now {expected}."
        else:
            ask = f"List every {kind} of {name} in order."
            expected = answer = ", ".join(values[name])
        turns.append((" ".join(lines) + "\n" + ask if i == 0 else ask, answer))
        reasoning = f"{name}: {', '.join(values[name])}." if thinks else ""
        checks[2 * i + 1] = Check(expected, "contains")
    return Document(
        task="last-write",
        messages=chat(turns, reasoning=reasoning),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )

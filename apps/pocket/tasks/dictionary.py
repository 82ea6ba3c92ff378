"""Questions about words: WordNet, the Jargon File and The Devil's Dictionary."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from random import Random
from typing import TYPE_CHECKING

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw
from pocket.tasks.stories import article

if TYPE_CHECKING:
    from pocket.corpus import Entry

COMMON_WORDS = 2000
HELD_OUT_OF = 50
_MEANS = (
    "What does {w} mean?", "What is the meaning of {w}?", "Define {w}.", "Explain the word {w}.",
    "What does the word {w} mean?", "What is the definition of {w}?",
    'What does "{w}" mean?', 'Define "{w}".', "What is {w}?",
)  # fmt: skip
_OTHER = {
    "jargon": ("What do hackers mean by {w}?", "What does {w} mean in hacker jargon?"),
    "devil": ("How does the Devil's Dictionary define {w}?", "Give me a witty definition of {w}."),
}


def is_held_out(word: str) -> bool:
    """Whether validation keeps this word to itself; the common words are all trained."""
    return zlib.crc32(word.encode()) % HELD_OUT_OF == 0


class Dictionary:
    """WordNet split for training: common words, all other words, and the held-out ones."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        usable = [entry for entry in entries if entry.gloss and len(entry.gloss) < 240]
        ranked = sorted(usable, key=lambda entry: (-entry.count, entry.word))
        self.common = [entry for entry in ranked[:COMMON_WORDS] if entry.count]
        rest = ranked[len(self.common) :]
        self.others = [entry for entry in rest if not is_held_out(entry.word)]
        self.tagged = [entry for entry in self.others if entry.count]
        self.held_out = [entry for entry in rest if is_held_out(entry.word)]

    def draw(self, draw: Draw) -> Entry:
        """A word of training: half of them common ones."""
        pool = draw.weighted((self.common, self.tagged, self.others), (5, 2, 3))
        return draw.pick(pool or self.others or self.common)


def meaning(entry: Entry) -> str:
    """The answer to what a word means."""
    return f"{entry.word} ({entry.pos}): {entry.gloss}."


def _ask(draw: Draw, entry: Entry) -> tuple[str, str, str]:
    """A question about a word, its answer, and how it is scored."""
    kinds = ["meaning"] * 7
    kinds += ["example"] * bool(entry.example) + ["synonym"] * bool(entry.synonyms)
    kinds += ["kind"] * bool(entry.kind) + ["pos"]
    kind = draw.pick(kinds)
    if kind == "example":
        return f"Give an example for {entry.word}.", f"{entry.example}.", "exact"
    if kind == "synonym":
        return f"Give a synonym of {entry.word}.", entry.synonyms[0], "exact"
    if kind == "kind":
        ask = (
            f"What kind of thing is {entry.word}?"
            if entry.pos == "noun"
            else (f"Which more general word fits {entry.word}?")
        )
        return ask, entry.kind, "exact"
    if kind == "pos":
        return (
            f"What part of speech is {entry.word}?",
            f"{entry.word} is {article(entry.pos)}.",
            "exact",
        )
    return draw.pick(_MEANS).format(w=entry.word), meaning(entry), "f1"


def dictionary_document(rng: Random, dictionary: Dictionary) -> Document:
    """One to four questions about words."""
    draw = Draw(rng)
    thinks = draw.chance(0.2)
    turns, checks, entry = [], {}, None
    for i in range(draw.integer(1, 4)):
        entry = dictionary.draw(draw)
        question, answer, scorer = _ask(draw, entry)
        turns.append((question, answer))
        checks[2 * i + 1] = Check(answer, scorer)
    reasoning = f"The word is {entry.word}." if thinks and entry else ""
    return _document("wordnet", turns, checks, draw, reasoning)


def meaning_document(rng: Random, entries: Sequence[Entry], task: str = "wordnet") -> Document:
    """One question for a meaning, of a word from a list; for validation."""
    draw = Draw(rng)
    entry = draw.pick(entries)
    question = draw.pick(_MEANS).format(w=entry.word)
    return _document(task, [(question, meaning(entry))], {1: Check(meaning(entry), "f1")}, draw)


def definition_document(rng: Random, definitions: Sequence[tuple[str, str, str]]) -> Document:
    """One or two entries of the other dictionaries."""
    draw = Draw(rng)
    turns, checks = [], {}
    for i in range(draw.integer(1, 2)):
        source, word, text = draw.pick(definitions)
        turns.append((draw.pick(_OTHER[source]).format(w=word), text))
        checks[2 * i + 1] = Check(text, "f1")
    return _document("definitions", turns, checks, draw)


def _document(
    task: str,
    turns: Sequence[tuple[str, str]],
    checks: dict[int, Check],
    draw: Draw,
    reasoning: str = "",
) -> Document:
    return Document(
        task=task,
        messages=chat(turns, reasoning=reasoning),
        thinking="high" if reasoning else "none",
        checks=checks,
        nats=draw.nats,
        floor_is_exact=False,
    )

"""Word lists to repeat, reverse, sort or capitalise, and words to spell: all scored exactly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from pocket.documents import Check, Document, chat
from pocket.tasks.draw import Draw
from pocket.tasks.lexicon import ANIMALS, CODE_WORDS, COLORS, FOODS, OBJECTS

WORDS = tuple(dict.fromkeys((*CODE_WORDS, *ANIMALS, *COLORS, *FOODS, *OBJECTS)))

_ASKS = {
    "copy": ("Repeat these words: {w}", "Copy these words: {w}", "Say this again: {w}",
             "Repeat after me: {w}"),
    "reverse": ("Reverse the order of these words: {w}", "Say these words backwards: {w}",
                "Write these words in reverse order: {w}"),
    "sort": ("Sort these words: {w}", "Put these words in alphabetical order: {w}",
             "Sort by alphabet: {w}"),
    "uppercase": ("Write these words in capital letters: {w}", "Uppercase: {w}",
                  "Put these words in capitals: {w}"),
}  # fmt: skip
_DOES: dict[str, Callable[[Sequence[str]], Sequence[str]]] = {
    "copy": list,
    "reverse": lambda words: words[::-1],
    "sort": sorted,
    "uppercase": lambda words: [word.upper() for word in words],
}
_LONGEST = {"copy": 16, "reverse": 12, "sort": 8, "uppercase": 4}
_THOUGHTS = {
    "copy": "I repeat the words.",
    "reverse": "I start with the last word.",
    "sort": "I compare the first letters.",
    "uppercase": "I write big letters.",
}


def list_document(rng: Random, *, kind: str | None = None, longest: int | None = None) -> Document:
    """One to three lists, all of one kind.

    Args:
        rng: seeded source.
        kind: `copy`, `reverse`, `sort` or `uppercase`; None draws it.
        longest: most words of a list; None takes the limit of the kind.
    """
    draw = Draw(rng)
    kind = kind or draw.weighted(tuple(_ASKS), (3, 4, 2, 2))
    thinks = draw.chance(0.25)
    turns, checks = [], {}
    for i in range(draw.integer(1, 3)):
        words = draw.sample(WORDS, draw.integer(2, longest or _LONGEST[kind]))
        separator = draw.pick((" ", ", "))
        answer = separator.join(_DOES[kind](words))
        turns.append((draw.pick(_ASKS[kind]).format(w=separator.join(words)), answer))
        checks[2 * i + 1] = Check(answer, "words")
    return Document(
        task=kind,
        messages=chat(turns, reasoning=_THOUGHTS[kind] if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
    )


def spell_document(rng: Random, words: Sequence[str] = WORDS) -> Document:
    """One to four words to spell, spell backwards or count the letters of."""
    draw = Draw(rng)
    thinks = draw.chance(0.25)
    turns, checks, spelled = [], {}, ""
    for i in range(draw.integer(1, 4)):
        word = draw.pick(words)
        spelled = " ".join(word)
        kind = draw.weighted(("spell", "backwards", "count"), (4, 1, 1))
        if kind == "spell":
            ask, answer = (
                draw.pick(("Spell {w}.", "How do you spell {w}?", "Spell the word {w}.")),
                spelled,
            )
        elif kind == "backwards":
            ask, answer = "Spell {w} backwards.", " ".join(reversed(word))
        else:
            ask, answer = "How many letters are in {w}?", f"{word} has {len(word)} letters."
        turns.append((ask.format(w=word), answer))
        checks[2 * i + 1] = Check(answer)
    return Document(
        task="spell",
        messages=chat(turns, reasoning=f"The letters are {spelled}." if thinks else ""),
        thinking="high" if thinks else "none",
        checks=checks,
        nats=draw.nats,
    )

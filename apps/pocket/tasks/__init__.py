"""The tasks of the pocket model: seeded generators of documents, by name.

A generator takes a `random.Random` and returns a document. Training uses seeds below
`VALIDATION_SEED`, validation seeds from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from random import Random
from typing import TYPE_CHECKING

from edgedsv4.text.messages import Message
from pocket.documents import Document
from pocket.tasks.arithmetic import arithmetic_document
from pocket.tasks.dictionary import Dictionary, definition_document, dictionary_document
from pocket.tasks.draw import Draw
from pocket.tasks.fillers import Count, Filler
from pocket.tasks.identity import has_own_answer, identity_document
from pocket.tasks.json_objects import json_document
from pocket.tasks.knowledge import factbook_document, puzzle_document, small_talk_document
from pocket.tasks.recall import last_write, recall_long, recall_short
from pocket.tasks.stories import story_document
from pocket.tasks.tools import tool_document
from pocket.tasks.word_lists import list_document, spell_document

if TYPE_CHECKING:
    from pocket.corpus import Corpus

VALIDATION_SEED = 10**6

Generator = Callable[[Random], Document]

_SYSTEM_TEXTS = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "Answer briefly.",
    "You are a helpful assistant. Answer in one sentence where you can.",
)
_SYSTEM_SHARE = 0.08


def with_system(generator: Generator, rng: Random) -> Document:
    """A document of a generator; now and then a system message comes first."""
    document = generator(rng)
    draw = Draw(rng)
    if not draw.chance(_SYSTEM_SHARE):
        return replace(document, nats=document.nats + draw.nats)
    system = Message("system", draw.pick(_SYSTEM_TEXTS))
    return replace(
        document,
        messages=(system, *document.messages),
        checks={index + 1: check for index, check in document.checks.items()},
        nats=document.nats + draw.nats,
    )


class Tasks:
    """The generators over one corpus; a task whose source the corpus lacks is left out.

    Args:
        corpus: natural sources, may be empty.
        count: number of tokens of a text, for the filler of long recall.
    """

    def __init__(self, corpus: Corpus, count: Count) -> None:
        self.dictionary = Dictionary(corpus.entries)
        self.filler = Filler(corpus.prose, count)
        self.corpus = corpus
        self._conversations = [
            turns for turns in corpus.conversations if not has_own_answer(turns[0])
        ]
        spellable = [entry.word for entry in self.dictionary.common if entry.word.isalpha()]
        generators: dict[str, Generator | None] = {
            "stories": story_document,
            "arith": arithmetic_document,
            "lists": list_document,
            "spell": (lambda rng: spell_document(rng, spellable)) if spellable else spell_document,
            "recall-S": recall_short,
            "last-write": last_write,
            "tools": tool_document,
            "json": json_document,
            "identity": identity_document,
            "wordnet": self._wordnet if corpus.entries else None,
            "definitions": self._definitions if corpus.definitions else None,
            "factbook": self._factbook if corpus.countries else None,
            "small-talk": self._small_talk if self._conversations else None,
            "puzzles": self._puzzles if corpus.puzzles else None,
        }
        self.generators: Mapping[str, Generator] = {
            name: partial(with_system, generator) if name != "tools" else generator
            for name, generator in generators.items()
            if generator is not None
        }

    def recall_long(self, rng: Random, tokens: int) -> Document:
        """A document of long recall of about `tokens` tokens."""
        return with_system(partial(recall_long, filler=self.filler, tokens=tokens), rng)

    def _wordnet(self, rng: Random) -> Document:
        return dictionary_document(rng, self.dictionary)

    def _definitions(self, rng: Random) -> Document:
        return definition_document(rng, self.corpus.definitions)

    def _factbook(self, rng: Random) -> Document:
        return factbook_document(rng, self.corpus.countries)

    def _small_talk(self, rng: Random) -> Document:
        return small_talk_document(rng, self._conversations)

    def _puzzles(self, rng: Random) -> Document:
        return puzzle_document(rng, self.corpus.puzzles)

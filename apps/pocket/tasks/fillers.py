"""Text to hide facts in: consecutive sentences of prose, or of stories."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import TYPE_CHECKING

from pocket.tasks.draw import Draw
from pocket.tasks.stories import draw_hero, draw_story

if TYPE_CHECKING:
    from pocket.corpus import Prose

Count = Callable[[str], int]

_SENTENCE_END = re.compile(r"(?<=[.!?]) (?=[A-Z\"])")
_SMALLEST_GAP = 12
_MOST_DIGITS = 0.1


class Filler:
    """Supplies sentences of about a given number of tokens.

    Args:
        prose: texts to take paragraphs from; without any, all filler is made of stories.
        count: number of tokens of a text.
    """

    def __init__(self, prose: Sequence[Prose], count: Count) -> None:
        self._texts = [text.paragraphs for text in prose if text.source != "python_docs"]
        self._count = count

    def sentences(self, rng: Random, tokens: int) -> list[str]:
        """Sentences in order, each with the space or line end after it.

        Together they have at most `tokens` tokens, and nearly as many.
        """
        use_prose = bool(self._texts) and rng.random() < 0.5
        found: list[str] = []
        left = tokens
        for text in self._prose(rng) if use_prose else _stories(rng):
            size = self._count(text) + 1
            sentences = _split(text)
            if size > left:
                return found + self._fitting(sentences, left)
            found += sentences
            left -= size
            if left < _SMALLEST_GAP:
                break
        return found

    def _fitting(self, sentences: Sequence[str], tokens: int) -> list[str]:
        found = []
        for sentence in sentences:
            tokens -= self._count(sentence) + 1
            if tokens < 0:
                break
            found.append(sentence)
        return found

    def _prose(self, rng: Random) -> Iterator[str]:
        paragraphs = self._texts[int(rng.random() * len(self._texts))]
        position = int(rng.random() * len(paragraphs))
        while True:
            text = paragraphs[position % len(paragraphs)]
            position += 1
            # Tables of numbers are no text; one in a row of them still lets the loop go on.
            if sum(map(text.count, "0123456789")) < _MOST_DIGITS * len(text):
                yield text
            elif position % len(paragraphs) == 0:
                yield from _stories(rng)


def _stories(rng: Random) -> Iterator[str]:
    while True:
        draw = Draw(rng)
        yield draw_story(draw, draw_hero(draw)).text


def _split(text: str) -> list[str]:
    parts = _SENTENCE_END.split(text)
    return [part + " " for part in parts[:-1]] + [parts[-1] + "\n"]

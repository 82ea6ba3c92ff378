"""Text to hide facts in: consecutive paragraphs of prose, or sentences of stories."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import TYPE_CHECKING

from pocket.tasks.draw import Draw
from pocket.tasks.stories import draw_hero, draw_story

if TYPE_CHECKING:
    from pocket.corpus import Prose

Count = Callable[[str], int]


class Filler:
    """Supplies paragraphs of about a given number of tokens.

    Args:
        prose: texts to take paragraphs from; without any, all filler is made of stories.
        count: number of tokens of a text.
    """

    def __init__(self, prose: Sequence[Prose], count: Count) -> None:
        self._texts = [text.paragraphs for text in prose if text.source != "python_docs"]
        self._count = count

    def paragraphs(self, rng: Random, tokens: int) -> list[str]:
        """Paragraphs that together have at most `tokens` tokens, and nearly as many."""
        use_prose = self._texts and rng.random() < 0.5
        source = self._from_prose(rng) if use_prose else self._from_stories(rng)
        found, left, misses = [], tokens, 0
        while left > 30 and misses < 8:
            text = source()
            size = self._count(text) + 1
            if size <= left:
                found.append(text)
                left -= size
            else:
                misses += 1
        return found

    def _from_prose(self, rng: Random) -> Callable[[], str]:
        paragraphs = self._texts[int(rng.random() * len(self._texts))]
        position = int(rng.random() * len(paragraphs))

        def take() -> str:
            nonlocal position
            text = paragraphs[position % len(paragraphs)]
            position += 1
            # Long paragraphs are cut at a sentence, so that facts can stand anywhere.
            if len(text) > 600:
                text = text[: text.find(". ", 500) + 1 or 600].strip()
            return text

        return take

    @staticmethod
    def _from_stories(rng: Random) -> Callable[[], str]:
        def take() -> str:
            draw = Draw(rng)
            return draw_story(draw, draw_hero(draw)).text

        return take

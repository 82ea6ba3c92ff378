"""Prose as tokens: every text is tokenised once, training cuts slices out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import numpy as np

from pocket.corpus import Corpus, Prose
from pocket.documents import TARGET, TextEncoder

HELD_OUT_SPEECHES = ("1901-", "2015-")
HELD_OUT_NOVEL = "Northanger Abbey"
_HELD_OUT_SHARE = 0.1
# Reference documentation is listings more than prose.
_WEIGHTS = {"python_docs": 0.4}


def split_prose(prose: Sequence[Prose]) -> tuple[list[Prose], list[Prose]]:
    """Texts for training and for validation.

    Validation has two speeches and the last tenth of a novel; training never sees either.
    """
    train, held_out = [], []
    for text in prose:
        if text.source == "sotu" and text.title.startswith(HELD_OUT_SPEECHES):
            held_out.append(text)
        elif text.source == "austen" and text.title == HELD_OUT_NOVEL:
            cut = round(len(text.paragraphs) * (1 - _HELD_OUT_SHARE))
            train.append(Prose(text.source, text.title, text.paragraphs[:cut]))
            held_out.append(Prose(text.source, text.title, text.paragraphs[cut:]))
        else:
            train.append(text)
    return train, held_out


def training_corpus(corpus: Corpus) -> Corpus:
    """The corpus without the prose of validation."""
    return replace(corpus, prose=split_prose(corpus.prose)[0])


@dataclass(frozen=True, slots=True)
class NaturalTokens:
    """Token ids of many texts; a slice starts in a text the likelier, the longer the text is.

    Attributes:
        ids: uint16 [tokens], the texts after each other, without BOS.
        starts: int64 [paragraphs], where each paragraph begins.
        text_ends: int64 [paragraphs], where the text of each paragraph ends.
        reach: float64 [paragraphs], running sum of each paragraph's share of the slices.
    """

    ids: np.ndarray
    starts: np.ndarray
    text_ends: np.ndarray
    reach: np.ndarray

    @classmethod
    def none(cls) -> NaturalTokens:
        """No text at all."""
        return cls(*(np.zeros(0, kind) for kind in (np.uint16, np.int64, np.int64, np.float64)))

    @classmethod
    def of(cls, prose: Sequence[Prose], encoder: TextEncoder) -> NaturalTokens:
        """Tokenise texts; a blank line ends each paragraph."""
        parts: list[np.ndarray] = []
        starts: list[int] = []
        ends: list[int] = []
        weights: list[float] = []
        total = 0
        for text in prose:
            first = len(starts)
            for paragraph in text.paragraphs:
                starts.append(total)
                parts.append(np.array(encoder.encode(paragraph + "\n\n"), dtype=np.uint16))
                total += len(parts[-1])
                weights.append(len(parts[-1]) * _WEIGHTS.get(text.source, 1.0))
            ends += [total] * (len(starts) - first)
        if not parts:
            return cls.none()
        reach = np.cumsum(weights) / sum(weights)
        return cls(np.concatenate(parts), np.array(starts), np.array(ends), reach)

    def save(self, path: Path) -> None:
        """Write to a `.npz` file, complete or not at all."""
        partial = path.with_name(f"{path.name}.partial.npz")
        np.savez(
            partial,
            ids=self.ids,
            starts=self.starts,
            text_ends=self.text_ends,
            reach=self.reach,
        )
        partial.replace(path)

    @classmethod
    def load(cls, path: Path) -> NaturalTokens:
        """Read what `save` wrote."""
        with np.load(path) as arrays:
            return cls(*(arrays[name] for name in ("ids", "starts", "text_ends", "reach")))

    def slice(self, rng: Random, tokens: int, bos: int, *, is_target: bool = True) -> np.ndarray:
        """A piece of prose as stored tokens: BOS, then text from the start of a paragraph on.

        Args:
            rng: seeded source.
            tokens: most tokens, at least 1, BOS included; the end of the text may come first.
            bos: id of BOS.
            is_target: mark the tokens as loss targets.
        """
        for _ in range(8):
            paragraph = min(int(np.searchsorted(self.reach, rng.random())), len(self.starts) - 1)
            start, end = int(self.starts[paragraph]), int(self.text_ends[paragraph])
            if end - start >= tokens - 1:
                break
        piece = np.empty(min(tokens, end - start + 1), np.uint16)
        piece[0] = bos
        piece[1:] = self.ids[start : start + len(piece) - 1]
        if is_target:
            piece[1:] |= TARGET
        return piece

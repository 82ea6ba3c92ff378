"""One training document, and its tokens with loss marks.

Chat documents go through the project's own prompt encoder, so the model learns exactly what the
runtime will send it. A token is a loss target when the model itself has to say it: everything after
an assistant header up to and including the end of the turn. In prose every token but BOS is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from edgedsv4.errors import ConfigError
from edgedsv4.text.messages import Message, Piece, Schema
from edgedsv4.text.prompt import PromptOptions, render_prompt
from edgedsv4.text.special_tokens import ASSISTANT, BOS, END_THINK, EOS, THINK

if TYPE_CHECKING:
    from edgedsv4.text.tokenizer import Tokenizer

VARIANT = "v4"
TARGET = 1 << 15
"""The bit of a stored token that makes it a loss target."""
ID_MASK = TARGET - 1

_ASCII_WORD = re.compile(
    r"""[0-9]{1,3}|[!-/:-@\[-`{-~][A-Za-z]+| ?[A-Za-z]+| ?[!-/:-@\[-`{-~]+\n*"""
    r"""|\s*\n+|\s+(?![^\s0-9])|\s+"""
)
_NOT_PLAIN = re.compile(r"[^\n -~]")
_CACHE_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Check:
    """What a reply is judged by."""

    expected: str
    scorer: str = "exact"
    """A key of `pocket.tasks.scoring.SCORERS`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    """A conversation, or a piece of prose."""

    task: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    """The prose; used when there are no messages."""
    thinking: str = "none"
    tools: tuple[Schema, ...] = ()
    checks: Mapping[int, Check] = field(default_factory=dict)
    """Index of an assistant message -> how a reply in its place is judged."""
    nats: float = 0.0
    """Entropy floor of the document: minus the log probability of what was drawn."""
    answer_nats: float = 0.0
    """The part of it that was drawn for assistant turns."""
    floor_is_exact: bool = True
    """Whether the floor is exact, not just an upper bound of it."""

    def options(self) -> PromptOptions:
        """How the prompt encoder renders this conversation."""
        return PromptOptions(thinking=self.thinking, tools=self.tools)


def document_pieces(document: Document) -> tuple[Piece, ...]:
    """The rendered document: of a conversation the whole prompt, of prose BOS and the text."""
    if not document.messages:
        return (Piece(BOS, is_special=True), Piece(document.text))
    prompt = render_prompt(document.messages, variant=VARIANT, options=document.options())
    return prompt.pieces


class TextEncoder:
    """Token ids of text, fast for plain ASCII: words are looked up once and remembered.

    The regular expression is the ASCII form of the pre-tokenizer; a digit ends a word as the first
    split would. Any other text goes through the tokenizer itself.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._words = _WordIds(tokenizer)

    def encode(self, text: str) -> list[int]:
        """The ids of `Tokenizer.encode`."""
        if _NOT_PLAIN.search(text):
            return self.tokenizer.encode(text)
        if len(self._words) > _CACHE_LIMIT:
            self._words.clear()
        return list(chain.from_iterable(map(self._words.__getitem__, _ASCII_WORD.findall(text))))


class _WordIds(dict[str, list[int]]):
    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, word: str) -> list[int]:
        ids = self._tokenizer.encode(word)
        self[word] = ids
        return ids


class DocumentEncoder:
    """Turns documents into stored tokens: uint16, the id with the target bit."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.text = TextEncoder(tokenizer)
        self._tokenizer = tokenizer
        self.bos = self._id_of(BOS)
        self._eos = self._id_of(EOS)

    def encode(self, document: Document) -> np.ndarray:
        """Stored tokens of a document, uint16 [T].

        Raises:
            ConfigError: the vocabulary lacks a token the document needs.
        """
        if not document.messages:
            return self.encode_prose(document.text)
        return self.encode_pieces(document_pieces(document))

    def encode_prose(self, text: str) -> np.ndarray:
        """BOS and the text, every token but BOS a target."""
        ids = np.array([self.bos, *self.text.encode(text)], dtype=np.uint16)
        ids[1:] |= TARGET
        return ids

    def encode_pieces(self, pieces: Sequence[Piece]) -> np.ndarray:
        """Stored tokens of a rendered conversation."""
        stored: list[int] = []
        is_target = after_header = False
        for piece in pieces:
            if not piece.is_special:
                ids: Iterable[int] = self.text.encode(piece.text)
                stored += [i | TARGET for i in ids] if is_target else ids
                continue
            token = self._id_of(piece.text)
            if after_header and piece.text in (THINK, END_THINK):
                is_target, after_header = True, False
                stored.append(token)
                continue
            stored.append(token | TARGET if is_target else token)
            if piece.text == EOS:
                is_target = False
            after_header = piece.text == ASSISTANT
        return np.array(stored, dtype=np.uint16)

    def _id_of(self, text: str) -> int:
        token = self._tokenizer.id_of(text)
        if token is None:
            raise ConfigError(f"the vocabulary has no token {text}")
        return token


def chat(
    turns: Sequence[tuple[str, str]], *, system: str = "", reasoning: str = ""
) -> tuple[Message, ...]:
    """Messages of a plain conversation.

    Args:
        turns: what the user says and what the assistant answers, in order.
        system: text of a system message, or empty.
        reasoning: thinking of the last answer.
    """
    messages = [Message("system", system)] if system else []
    for i, (question, answer) in enumerate(turns):
        thought = reasoning if i == len(turns) - 1 else ""
        messages += [Message("user", question), Message("assistant", answer, reasoning=thought)]
    return tuple(messages)

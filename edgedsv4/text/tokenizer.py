"""The tokenizer: text to token ids and back, byte-level BPE through the `tokenizers` library.

Its one idea: plain text never becomes an added token (`<think>`, `<｜User｜>`), whoever typed it.
Added tokens come only from the special pieces of a rendered prompt, or by asking for them.
"""

# ruff: noqa: RUF002 (the full-width bar is part of the token texts)

from __future__ import annotations

import functools
import hashlib
import json
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from edgedsv4.errors import ConfigError, FormatError
from edgedsv4.text.byte_alphabet import alphabet_bytes
from edgedsv4.text.long_text import WINDOW, encode_long
from edgedsv4.text.messages import Piece
from edgedsv4.text.special_tokens import REPLY_MARKUP, TURN_TOKENS
from edgedsv4.text.stream_decoder import StreamDecoder
from edgedsv4.text.vocabulary import (
    ADDED_TYPES,
    CONTROL,
    SPLITS,
    TokenizerSpec,
    Vocabulary,
    vocabulary_from_json,
    vocabulary_from_spec,
)

logger = logging.getLogger(__name__)


class Tokenizer:
    """Token ids of text, and text of token ids, for one model. Safe to share between threads.

    Attributes:
        vocab_size: number of ids.
        bos_id, eos_id, pad_id: ids of these tokens, None where the vocabulary has none.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Build the tokenizer of a checked vocabulary.

        Raises:
            FormatError: if the `tokenizers` library refuses it.
        """
        self._vocabulary = vocabulary
        self._added = vocabulary.added()
        self._encode_at_once = _build_bpe(vocabulary)
        self._bytes = [
            _token_bytes(text, kind)
            for text, kind in zip(vocabulary.tokens, vocabulary.types, strict=True)
        ]
        self.vocab_size = len(vocabulary.tokens)
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.pad_id = vocabulary.pad_id
        ends = {self.bos_id, self.eos_id, self.pad_id}
        self._control = frozenset(
            token_id
            for text, token_id in self._added.items()
            if text not in REPLY_MARKUP
            and (vocabulary.types[token_id] == CONTROL or text in TURN_TOKENS or token_id in ends)
        )

    @classmethod
    def from_spec(cls, spec: TokenizerSpec) -> Tokenizer:
        """Build from the metadata of a GGUF file.

        Raises:
            FormatError: the metadata contradict themselves, or a byte has no token.
            UnsupportedModelError: a pre-tokenizer that splits text differently.
        """
        if not spec.pre:
            logger.warning("the file names no pre-tokenizer; text is split as for DeepSeek-V4")
        return cls(vocabulary_from_spec(spec))

    @classmethod
    def from_json(cls, path: Path, vocab_size: int | None = None) -> Tokenizer:
        """Build from a `tokenizer.json`; see `vocabulary.vocabulary_from_json`.

        Raises:
            FormatError: the file is malformed, or holds more tokens than `vocab_size`.
            UnsupportedModelError: another kind of tokenizer.
        """
        return cls(vocabulary_from_json(path, vocab_size))

    @functools.cached_property
    def sha256(self) -> str:
        """Hex digest of everything that decides ids: tokens, their types and the merges."""
        vocabulary = self._vocabulary
        ends = [self.bos_id, self.eos_id, self.pad_id]
        merges = [list(pair) for pair in vocabulary.merges]
        types = [int(kind) for kind in vocabulary.types]
        parts = [list(vocabulary.tokens), types, merges, ends]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()

    def encode(self, text: str, *, match_added: bool = False) -> list[int]:
        """Token ids of a text, without BOS.

        Args:
            text: any text; NUL is a character like any other.
            match_added: map the spelling of an added token to that token, leftmost and longest
                first. For text a program wrote, never for what a user typed.

        Raises:
            ConfigError: a lone surrogate, which is no character and has no UTF-8.
        """
        _check_encodable(text)
        if not match_added or not self._added:
            return self._encode_plain(text)
        ids: list[int] = []
        for i, part in enumerate(self._added_pattern.split(text)):
            if i % 2:
                ids.append(self._added[part])
            elif part:
                ids += self._encode_plain(part)
        return ids

    def encode_pieces(self, pieces: Sequence[Piece]) -> list[int]:
        """Token ids of a rendered prompt: each special piece is one added token, all else is plain.

        Neighbouring plain pieces are tokenized as one string.

        Raises:
            ConfigError: the vocabulary lacks a token that the prompt needs (all are named), or a
                lone surrogate.
        """
        missing = {p.text: None for p in pieces if p.is_special and p.text not in self._added}
        if missing:
            raise ConfigError(
                f"the vocabulary has no token {', '.join(missing)}, which this prompt needs;"
                " leave out what asks for it (tools, reminders, tasks), or use another model"
            )
        ids: list[int] = []
        run: list[str] = []
        for piece in [*pieces, Piece("", is_special=True)]:
            if not piece.is_special:
                run.append(piece.text)
                continue
            ids += self.encode("".join(run)) if run else []
            run = []
            if piece.text:
                ids.append(self._added[piece.text])
        return ids

    def decode(self, ids: Iterable[int], *, show_control: bool = False) -> str:
        """Text of token ids; incomplete or invalid UTF-8 reads U+FFFD.

        Args:
            ids: token ids, each in 0..vocab_size-1.
            show_control: spell control tokens out instead of leaving them out.

        Raises:
            ConfigError: an id outside the vocabulary.
        """
        shown = self.token_bytes if show_control else self._shown_bytes
        return b"".join(map(shown, ids)).decode("utf-8", "replace")

    def stream(self, *, show_control: bool = False) -> StreamDecoder:
        """A decoder for one reply; all its text joined equals `decode` of all ids."""
        return StreamDecoder(self.token_bytes if show_control else self._shown_bytes)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for; for an added token its spelling in UTF-8.

        Raises:
            ConfigError: an id outside the vocabulary.
        """
        if not 0 <= token_id < self.vocab_size:
            raise ConfigError(f"token id must be 0..{self.vocab_size - 1}, found {token_id}")
        return self._bytes[token_id]

    def id_of(self, text: str) -> int | None:
        """Id of the added token with this spelling, or None."""
        return self._added.get(text)

    def is_control(self, token_id: int) -> bool:
        """Whether decoding leaves this token out.

        Control tokens structure the conversation. `<think>`, `</think>` and `｜DSML｜` are not
        among them, whatever their type: they are part of the reply's text.
        """
        return token_id in self._control

    def _shown_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._control else self.token_bytes(token_id)

    def _encode_plain(self, text: str) -> list[int]:
        if len(text) <= WINDOW:
            return self._encode_at_once(text)
        return encode_long(text, self._encode_at_once, self._bytes)

    @functools.cached_property
    def _added_pattern(self) -> re.Pattern[str]:
        return re.compile(f"({_trie_pattern(sorted(self._added))})")


def _check_encodable(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"text holds a lone surrogate (U+{ord(text[error.start]):04X}) at character"
            f" {error.start}; it must be valid Unicode"
        ) from error


def _token_bytes(text: str | None, kind: int) -> bytes:
    if text is None:
        return b""
    return text.encode("utf-8", "replace") if kind in ADDED_TYPES else alphabet_bytes(text)


def _build_bpe(vocabulary: Vocabulary) -> Callable[[str], list[int]]:
    """A function from plain text to ids; it knows no added tokens, so it cannot produce one."""
    # Imported here: the library takes a tenth of a second, which `--help` must not wait for.
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers

    try:
        bpe = Tokenizer(models.BPE(vocab=dict(vocabulary.id_of), merges=list(vocabulary.merges)))
    except (TypeError, ValueError, UnicodeEncodeError) as error:
        raise FormatError(f"unusable tokenizer: {error}") from error
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in SPLITS),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )

    def encode(text: str) -> list[int]:
        return bpe.encode(text, add_special_tokens=False).ids

    return encode


def _trie_pattern(texts: Sequence[str]) -> str:
    """A regular expression for the longest of several texts at a position.

    Args:
        texts: sorted, distinct, not empty. Common starts are shared, so that matching takes time
            in the length of the match, not in the number of texts.
    """
    shared = _common_start(texts[0], texts[-1])
    groups: dict[str, list[str]] = {}
    for text in texts:
        rest = text[len(shared) :]
        if rest:
            groups.setdefault(rest[0], []).append(rest)
    pattern = re.escape(shared)
    if groups:
        is_text = texts[0] == shared
        branches = "|".join(_trie_pattern(group) for group in groups.values())
        pattern += f"(?:{branches}){'?' if is_text else ''}"
    return pattern


def _common_start(first: str, last: str) -> str:
    length = min(len(first), len(last))
    end = next((i for i in range(length) if first[i] != last[i]), length)
    return first[:end]

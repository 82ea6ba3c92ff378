"""The checked vocabulary of a byte-level BPE tokenizer, from GGUF or from `tokenizer.json`.

Both sources end in the same record, so everything behind it works the same for both. A vocabulary
that could drop or change text (a byte without a token, a merge without a result) is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from edgedsv4.errors import FormatError, UnsupportedModelError
from edgedsv4.formats.strict_json import read_json_object
from edgedsv4.text.byte_alphabet import BYTE_OF_CHAR
from edgedsv4.text.special_tokens import BOS, EOS, PAD

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
ADDED_TYPES = (CONTROL, USER_DEFINED)

SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
    r"|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
"""Isolated splits of the pre-tokenizer, in order; the byte level follows."""

_PRE_NAMES = ("joyai-llm", "deepseek-v3", "")
_JSON_LIMIT_BYTES = 64 << 20
_MAX_TOKENS = 1 << 24
_UNSUPPORTED_MODEL_FLAGS = (
    "dropout",
    "unk_token",
    "continuing_subword_prefix",
    "end_of_word_suffix",
    "fuse_unk",
    "byte_fallback",
    "ignore_merges",
)


class TokenizerSpec(Protocol):
    """What a GGUF file says about its tokenizer; `edgedsv4.formats.metadata` reads it."""

    @property
    def tokens(self) -> Sequence[str]:
        """Text per id."""

    @property
    def token_types(self) -> Sequence[int]:
        """GGUF token type per id."""

    @property
    def merges(self) -> Sequence[str]:
        """`"left right"`, the rank is the index."""

    @property
    def pre(self) -> str:
        """Name of the pre-tokenizer, may be empty."""

    @property
    def bos_id(self) -> int | None:
        """Token that opens a prompt."""

    @property
    def eos_id(self) -> int | None:
        """Token that ends a reply."""

    @property
    def pad_id(self) -> int | None:
        """Padding token."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Tokens and merges of one model.

    Raises:
        FormatError: the parts contradict each other, or a byte has no token; all faults are listed.
    """

    tokens: Sequence[str | None]
    """Text per id; None where the file leaves an id out."""
    types: Sequence[int]
    """GGUF token type per id."""
    merges: Sequence[tuple[str, str]]
    """Pairs to join, the rank is the index."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    id_of: Mapping[str, int] = field(init=False)
    """Text -> id."""

    def __post_init__(self) -> None:
        id_of = {text: i for i, text in enumerate(self.tokens) if text is not None}
        object.__setattr__(self, "id_of", id_of)
        problems = list(self._problems())
        if problems:
            raise FormatError("; ".join(problems[:8]), problems=tuple(problems))

    def added(self) -> dict[str, int]:
        """Text -> id of the tokens that are matched as a whole, never built by merges."""
        return {text: i for text, i in self.id_of.items() if self.types[i] in ADDED_TYPES}

    def _problems(self) -> Iterable[str]:
        if len(self.types) != len(self.tokens):
            yield f"{len(self.types)} token types for {len(self.tokens)} tokens"
            return
        if len(self.id_of) != sum(text is not None for text in self.tokens):
            yield "two tokens have the same text"
        if "" in self.id_of:
            yield f"token {self.id_of['']} has no text"
        missing = [byte for char, byte in BYTE_OF_CHAR.items() if char not in self.id_of]
        if missing:
            yield f"{len(missing)} of 256 bytes have no token, the first is 0x{min(missing):02x}"
        for rank, (left, right) in enumerate(self.merges):
            unknown = [text for text in (left, right, left + right) if text not in self.id_of]
            if unknown:
                yield f"merge {rank} needs {unknown[0]!r}, which is no token"
        for name in ("bos_id", "eos_id", "pad_id"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < len(self.tokens):
                yield f"{name} must be below {len(self.tokens)}, found {value}"


def vocabulary_from_spec(spec: TokenizerSpec) -> Vocabulary:
    """Check what a GGUF file said.

    Raises:
        FormatError: malformed merges or contradicting parts.
        UnsupportedModelError: a pre-tokenizer that splits text differently.
    """
    if spec.pre not in _PRE_NAMES:
        raise UnsupportedModelError(
            f"pre-tokenizer must be joyai-llm or deepseek-v3, found {spec.pre!r}"
        )
    return Vocabulary(
        tokens=list(spec.tokens),
        types=[int(kind) for kind in spec.token_types],
        merges=[_merge(merge, rank, None) for rank, merge in enumerate(spec.merges)],
        bos_id=spec.bos_id,
        eos_id=spec.eos_id,
        pad_id=spec.pad_id,
    )


def vocabulary_from_json(path: Path, vocab_size: int | None = None) -> Vocabulary:
    """Read a `tokenizer.json` of the `tokenizers` library.

    Args:
        path: the file.
        vocab_size: ids of the model; the vocabulary is padded to it with unused ids. None takes
            what the file holds.

    Raises:
        FormatError: not JSON, malformed, or more tokens than `vocab_size`.
        UnsupportedModelError: another kind of tokenizer than DeepSeek-V4's.
    """
    document = read_json_object(path, limit_bytes=_JSON_LIMIT_BYTES)
    _check_supported(document, path)
    model = _object(document.get("model"), "model", path)
    entries = [
        (text, _token_id(value, text, path), NORMAL)
        for text, value in _object(model.get("vocab"), "model.vocab", path).items()
    ]
    added = _list(document.get("added_tokens", []), "added_tokens", path)
    entries += [_added(entry, i, path) for i, entry in enumerate(added)]
    size = 1 + max((token_id for _, token_id, _ in entries), default=-1)
    if vocab_size is not None and size > vocab_size:
        raise FormatError(f"holds ids up to {size - 1}, the model has {vocab_size}", path=path)
    size = size if vocab_size is None else vocab_size
    tokens: list[str | None] = [None] * size
    types = [UNUSED] * size
    for text, token_id, kind in entries:
        if tokens[token_id] not in (None, text):
            raise FormatError(f"id {token_id} is both {tokens[token_id]!r} and {text!r}", path=path)
        tokens[token_id], types[token_id] = text, kind
    ids = {text: token_id for text, token_id, _ in entries}
    merges = _list(model.get("merges"), "model.merges", path)
    try:
        return Vocabulary(
            tokens=tokens,
            types=types,
            merges=[_merge(merge, rank, path) for rank, merge in enumerate(merges)],
            bos_id=ids.get(BOS),
            eos_id=ids.get(EOS),
            pad_id=ids.get(PAD),
        )
    except FormatError as error:
        if error.path is not None:
            raise
        raise FormatError(str(error), path=path, problems=error.problems) from error


def _merge(merge: object, rank: int, path: Path | None) -> tuple[str, str]:
    parts = merge.split(" ") if isinstance(merge, str) else merge
    if isinstance(parts, (list, tuple)) and len(parts) == 2:
        left, right = parts
        if isinstance(left, str) and isinstance(right, str) and left and right:
            return left, right
    raise FormatError(f"merge {rank} must be two texts and a space, found {merge!r:.80}", path=path)


def _added(entry: object, index: int, path: Path) -> tuple[str, int, int]:
    where = f"added_tokens[{index}]"
    token = _object(entry, where, path)
    text = token.get("content")
    if not isinstance(text, str):
        raise FormatError(f"{where}.content must be a string", path=path)
    for flag in ("lstrip", "rstrip", "single_word"):
        if token.get(flag):
            raise UnsupportedModelError(f"{where} ({text!r}) sets {flag}", path=path)
    kind = CONTROL if token.get("special") else USER_DEFINED
    return text, _token_id(token.get("id"), text, path), kind


def _token_id(value: object, text: str, path: Path) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_TOKENS:
        raise FormatError(
            f"token {text!r:.80} must have an id of 0..{_MAX_TOKENS - 1}, found {value!r:.80}",
            path=path,
        )
    return value


def _check_supported(document: Mapping[str, object], path: Path) -> None:
    """Refuse a tokenizer whose parts are not exactly those this library builds."""
    model = document.get("model")
    kind = model.get("type", "BPE") if isinstance(model, Mapping) else None
    if kind != "BPE":
        raise UnsupportedModelError(f"model.type must be BPE, found {kind!r}", path=path)
    for flag in _UNSUPPORTED_MODEL_FLAGS:
        if isinstance(model, Mapping) and model.get(flag):
            raise UnsupportedModelError(f"model.{flag} is set, expected none", path=path)
    normalizer = document.get("normalizer")
    if normalizer is not None and normalizer != {"type": "Sequence", "normalizers": []}:
        raise UnsupportedModelError("normalizer must be empty", path=path)
    found = _split_patterns(document.get("pre_tokenizer"))
    if found != [_escaped(pattern) for pattern in SPLITS]:
        raise UnsupportedModelError(
            "pre_tokenizer must be the three splits of DeepSeek-V3 and a byte level", path=path
        )


def _split_patterns(value: object) -> list[str]:
    """The patterns of a pre-tokenizer of the expected form; empty for any other form."""
    steps = value.get("pretokenizers") if isinstance(value, Mapping) else None
    if not isinstance(steps, list) or not all(isinstance(step, Mapping) for step in steps):
        return []
    *splits, last = steps or [{}]
    is_plain = last.get("type") == "ByteLevel" and not (
        last.get("add_prefix_space") or last.get("use_regex", True)
    )
    if not is_plain:
        return []
    patterns = []
    for step in splits:
        pattern = step.get("pattern")
        expression = pattern.get("Regex") if isinstance(pattern, Mapping) else None
        kind = (step.get("type"), step.get("behavior"), bool(step.get("invert")))
        if kind != ("Split", "Isolated", False) or not isinstance(expression, str):
            return []
        patterns.append(_escaped(expression))
    return patterns


def _escaped(pattern: str) -> str:
    """A pattern with line breaks written out, as files differ in that."""
    return pattern.replace("\r", r"\r").replace("\n", r"\n")


def _object(value: object, name: str, path: Path) -> Mapping[str, object]:
    if not isinstance(value, Mapping):
        raise FormatError(f"{name} must be an object, found {type(value).__name__}", path=path)
    return value


def _list(value: object, name: str, path: Path) -> Sequence[object]:
    if not isinstance(value, list):
        raise FormatError(f"{name} must be a list, found {type(value).__name__}", path=path)
    return value

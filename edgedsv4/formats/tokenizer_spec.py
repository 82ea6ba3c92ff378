"""The byte-level BPE tokenizer inside a GGUF file, checked as a whole but not yet at work.

A vocabulary that contradicts itself gives wrong ids without any error, so lengths, types, merges
and special ids are compared with each other here. `add_bos_token` is not read: files disagree on
it and the prompt encoding writes BOS.

Source: the `tokenizer.ggml.*` keys of the GGUF specification; the pre-tokenizer names of llama.cpp
`src/llama-vocab.cpp`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from edgedsv4.formats.faults import FaultList, quoted
from edgedsv4.formats.gguf_metadata import GgufKeys

if TYPE_CHECKING:
    from edgedsv4.formats.gguf import GgufFile

_PREFIX: Final = "tokenizer.ggml."
_MODEL: Final = "gpt2"
PRE_TOKENIZERS: Final = ("joyai-llm", "deepseek-v3")
"""Names of the DeepSeek-V3/V4 pre-tokenizer; both split alike."""
_TOKEN_TYPES: Final = range(1, 7)


@dataclass(frozen=True, slots=True)
class TokenizerSpec:
    """What a GGUF file says about its tokenizer."""

    tokens: Sequence[str]
    """Text per id, in the byte-level alphabet for ordinary tokens; no text appears twice."""
    token_types: Sequence[int]
    """Per id: 1 normal, 2 unknown, 3 control, 4 user-defined, 5 unused, 6 byte."""
    merges: Sequence[str]
    """`"left right"`, the rank is the index; both parts and their join are tokens."""
    pre: str
    """Name of the pre-tokenizer; empty when the file has none, which means the DeepSeek-V4 one."""
    bos_id: int | None
    eos_id: int | None
    pad_id: int | None
    chat_template: str | None
    """Jinja text; only looked at to tell prompt variants apart."""


def tokenizer_spec_from_gguf(file: GgufFile, vocab_size: int | None = None) -> TokenizerSpec | None:
    """Read and check the tokenizer of a GGUF file.

    Args:
        file: an opened GGUF file.
        vocab_size: ids the model has; None takes the number of tokens.

    Returns:
        The specification, or None when the file holds no tokenizer.

    Raises:
        FormatError: the parts contradict each other; all faults are listed.
        UnsupportedModelError: a tokenizer of another kind.
    """
    if not any(key.startswith(_PREFIX) for key in file.metadata):
        return None
    faults = FaultList(file.path)
    keys = GgufKeys(file, faults)
    pre = _check_kind(keys)
    tokens = _strings(file, keys, "tokens")
    merges = _strings(file, keys, "merges")
    size = len(tokens) if vocab_size is None else vocab_size
    if tokens and len(tokens) != size:
        faults.add(f"{_PREFIX}tokens has {len(tokens)} entries, the embedding has {size} rows")
    types = _types(file, keys, len(tokens))
    by_text = _index(tokens, faults)
    _check_merges(merges, by_text, faults)
    ids = {name: _special_id(keys, f"{name}_token_id", size) for name in ("bos", "eos", "padding")}
    faults.raise_if_any("the tokenizer cannot be used")
    return TokenizerSpec(
        tokens=tokens,
        token_types=types,
        merges=merges,
        pre=pre,
        bos_id=ids["bos"],
        eos_id=ids["eos"],
        pad_id=ids["padding"],
        chat_template=_template(file),
    )


def _check_kind(keys: GgufKeys) -> str:
    model = keys.string(f"{_PREFIX}model")
    if model != _MODEL:
        found = "nothing" if model is None else quoted(model)
        keys.faults.unsupported(
            f"{_PREFIX}model must be {_MODEL!r} (byte-level BPE), found {found}"
        )
    pre = keys.string(f"{_PREFIX}pre")
    if pre is not None and pre not in PRE_TOKENIZERS:
        keys.faults.unsupported(
            f"{_PREFIX}pre must be one of {PRE_TOKENIZERS}, found {quoted(pre)}: it splits text"
            " differently and would give wrong ids; convert the model with a current llama.cpp"
        )
    return pre or ""


def _strings(file: GgufFile, keys: GgufKeys, name: str) -> list[str]:
    value = file.metadata.get(_PREFIX + name)
    if value is None:
        keys.faults.add(f"key {_PREFIX}{name} is missing")
        return []
    if isinstance(value, list) and all(isinstance(entry, str) for entry in value):
        return value  # type: ignore[return-value]  # every entry was just seen to be a string
    keys.faults.add(f"key {_PREFIX}{name} must be an array of strings")
    return []


def _types(file: GgufFile, keys: GgufKeys, count: int) -> list[int]:
    value = file.metadata.get(f"{_PREFIX}token_type")
    if not isinstance(value, np.ndarray) or value.dtype.kind not in "iu":
        found = "is missing" if value is None else "must be an array of integers"
        keys.faults.add(f"key {_PREFIX}token_type {found}")
        return []
    if value.size != count:
        keys.faults.add(f"{_PREFIX}token_type has {value.size} entries, tokens has {count}")
        return []
    types: list[int] = value.tolist()
    bad = next((i for i, kind in enumerate(types) if kind not in _TOKEN_TYPES), None)
    if bad is not None:
        keys.faults.add(f"{_PREFIX}token_type[{bad}] must be 1..6, found {types[bad]}")
    return types


def _index(tokens: Sequence[str], faults: FaultList) -> frozenset[str]:
    known = frozenset(tokens)
    if len(known) == len(tokens):
        return known
    first: dict[str, int] = {}
    for token_id, text in enumerate(tokens):
        if first.setdefault(text, token_id) != token_id:
            faults.add(
                f"{_PREFIX}tokens[{first[text]}] and [{token_id}] have the same text {quoted(text)}"
            )
            break
    return known


def _check_merges(merges: Sequence[str], known: frozenset[str], faults: FaultList) -> None:
    """Report the first merge that is not two tokens whose join is a token."""
    for rank, merge in enumerate(merges):
        left, _, right = merge.partition(" ")
        if left in known and right in known and left + right in known and left and right:
            continue
        if not left or not right or " " in right:
            problem = "must be two parts with one space between"
        else:
            lost = next(part for part in (left, right, left + right) if part not in known)
            problem = f"needs the token {quoted(lost)}, which is not in the vocabulary"
        faults.add(f"{_PREFIX}merges[{rank}] {quoted(merge)} {problem}")
        return


def _special_id(keys: GgufKeys, name: str, size: int) -> int | None:
    value = keys.integer(_PREFIX + name, default=None)
    if value is not None and not 0 <= value < size:
        keys.faults.add(f"{_PREFIX}{name} must be below {size}, found {quoted(value)}")
        return None
    return value


def _template(file: GgufFile) -> str | None:
    value = file.metadata.get("tokenizer.chat_template")
    return value if isinstance(value, str) else None

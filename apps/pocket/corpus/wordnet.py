"""WordNet: every common word with its most frequent sense.

Source: the database files of WordNet 3.0 (`index.*`, `data.*`, `cntlist.rev`; man page wndb).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pocket.corpus.ascii_text import one_line

PACKAGE = "wordnet-base"
_FOLDER = "usr/share/wordnet"
_POS = {"n": "noun", "v": "verb", "a": "adjective", "s": "adjective", "r": "adverb"}
_FILES = {"noun": "n", "verb": "v", "adj": "a", "adv": "r"}
_QUOTED = re.compile(r'"([^"]*)"')


@dataclass(slots=True)
class _Synset:
    words: list[str]
    gloss: str
    examples: list[str]
    hypernym: str | None


def records(root: Path) -> Iterator[dict[str, object]]:
    """One record per word that is no proper name: the sense tagged most often, in word order."""
    folder = root / _FOLDER
    counts = _tag_counts(folder / "cntlist.rev")
    synsets = {pos: _read_synsets(folder / f"data.{name}") for name, pos in _FILES.items()}
    best: dict[str, tuple[int, str, str]] = {}
    totals: dict[str, int] = {}
    for name, pos in _FILES.items():
        for word, offsets in _read_index(folder / f"index.{name}"):
            totals[word] = totals.get(word, 0) + counts.get((word, pos, 0), 0)
            first = counts.get((word, pos, 1), 0)
            if word not in best or first > best[word][0]:
                best[word] = (first, pos, offsets[0])
    for word in sorted(best):
        _, pos, offset = best[word]
        synset = synsets[pos][offset]
        if not _is_proper(word, synset):
            yield _record(word, pos, totals[word], synset, synsets[pos])


def _record(
    word: str, pos: str, count: int, synset: _Synset, of_pos: dict[str, _Synset]
) -> dict[str, object]:
    record: dict[str, object] = {"w": word.replace("_", " "), "p": _POS[pos]}
    if count:
        record["n"] = count
    record["g"] = synset.gloss
    example = next((text for text in synset.examples if _mentions(text, word)), "")
    if example and count:
        record["e"] = example
    synonyms = [other.replace("_", " ") for other in synset.words if other.lower() != word]
    if synonyms and count:
        record["s"] = synonyms[:3]
    if synset.hypernym is not None and count and synset.hypernym in of_pos:
        record["k"] = of_pos[synset.hypernym].words[0].replace("_", " ")
    return record


def _mentions(text: str, word: str) -> bool:
    return re.search(rf"\b{re.escape(word.replace('_', ' '))}", text, re.IGNORECASE) is not None


def _is_proper(word: str, synset: _Synset) -> bool:
    """Whether the word is written with a capital or holds no letters."""
    spelled = next((other for other in synset.words if other.lower() == word), word)
    return spelled != spelled.lower() or not any(char.isalpha() for char in word)


def _tag_counts(path: Path) -> dict[tuple[str, str, int], int]:
    """(word, part of speech, sense number) -> count; sense number 0 holds the sum."""
    numbers = {"1": "n", "2": "v", "3": "a", "5": "a", "4": "r"}
    counts: dict[tuple[str, str, int], int] = {}
    for line in path.read_text("ascii").splitlines():
        key, sense, count = line.rsplit(" ", 2)
        word, _, rest = key.partition("%")
        pos = numbers[rest[0]]
        counts[word, pos, int(sense)] = int(count)
        counts[word, pos, 0] = counts.get((word, pos, 0), 0) + int(count)
    return counts


def _read_index(path: Path) -> Iterator[tuple[str, list[str]]]:
    """Each word with the offsets of its senses, the most frequent first."""
    for line in path.read_text("ascii").splitlines():
        if not line.startswith(" "):
            fields = line.split()
            yield fields[0], fields[-int(fields[2]) :]


def _read_synsets(path: Path) -> dict[str, _Synset]:
    """Offset -> synset."""
    synsets = {}
    for line in path.read_text("latin-1").splitlines():
        if line.startswith(" "):
            continue
        head, _, gloss = line.partition(" | ")
        fields = head.split()
        size = int(fields[3], 16)
        words = [re.sub(r"\([a-z]+\)$", "", word) for word in fields[4 : 4 + 2 * size : 2]]
        pointers = fields[5 + 2 * size :]
        hypernym = pointers[pointers.index("@") + 1] if "@" in pointers else None
        definition = one_line(gloss.split('; "')[0].split(' "')[0]).rstrip(";, ")
        examples = [one_line(text) for text in _QUOTED.findall(gloss)]
        synsets[fields[0]] = _Synset(words, definition, examples, hypernym)
    return synsets

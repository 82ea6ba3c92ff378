"""The natural text of the pocket model, as one archive of JSON lines.

Each source is one member, `<source>.jsonl`; `python -m pocket.corpus build` makes the archive from
ordinary packages of fixed version and checksum. Text is folded to ASCII when it is packed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path

from edgedsv4.errors import FormatError

Record = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class Prose:
    """One long text: paragraphs in order."""

    source: str
    title: str
    paragraphs: Sequence[str]


@dataclass(frozen=True, slots=True)
class Entry:
    """One word of the WordNet dictionary with its most frequent sense."""

    word: str
    pos: str
    """`noun`, `verb`, `adjective` or `adverb`."""
    count: int
    """How often the word was tagged in the sense-annotated texts, all senses together."""
    gloss: str
    example: str
    """A sentence with the word, or empty."""
    synonyms: tuple[str, ...]
    kind: str
    """What the word is a kind of (its hypernym), or empty."""


@dataclass(frozen=True, slots=True)
class Corpus:
    """Everything the generators take from natural sources; any part may be empty."""

    prose: Sequence[Prose] = ()
    entries: Sequence[Entry] = ()
    definitions: Sequence[tuple[str, str, str]] = ()
    """Source, word and text of the other dictionaries."""
    countries: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Country -> fact -> value."""
    conversations: Sequence[Sequence[str]] = ()
    """Small talk: turns, the user's first."""
    puzzles: Sequence[tuple[str, str, str]] = ()
    """Task, question and answer."""


def write_archive(path: Path, members: Mapping[str, Iterable[Record]]) -> int:
    """Pack records into an xz-compressed archive that is the same for the same records.

    Args:
        path: file to write.
        members: source -> records.

    Returns:
        Size of the archive in bytes.
    """
    partial = path.with_name(path.name + ".partial")
    with tarfile.open(partial, "w:xz", preset=9) as archive:
        for name, records in members.items():
            lines = [json.dumps(record, ensure_ascii=True) for record in records]
            data = ("\n".join(lines) + "\n").encode()
            member = tarfile.TarInfo(f"{name}.jsonl")
            member.size = len(data)
            archive.addfile(member, BytesIO(data))
    partial.replace(path)
    return path.stat().st_size


def read_archive(path: Path) -> dict[str, list[Record]]:
    """Records of every source of an archive.

    Raises:
        FormatError: not an archive of JSON lines.
    """
    members: dict[str, list[Record]] = {}
    try:
        with tarfile.open(path, "r:xz") as archive:
            for member in archive:
                handle = archive.extractfile(member)
                if handle is not None:
                    lines = handle.read().decode().splitlines()
                    members[Path(member.name).stem] = [json.loads(line) for line in lines if line]
    except (OSError, tarfile.TarError, ValueError, EOFError) as error:
        raise FormatError(f"not a corpus archive: {error}", path=path) from error
    return members


PROSE_SOURCES = ("sotu", "python_docs", "bible", "austen", "factbook_prose")


def load_corpus(path: Path) -> Corpus:
    """Read an archive into typed records.

    Raises:
        FormatError: not an archive of JSON lines, or a record lacks a field.
    """
    members = read_archive(path)
    try:
        return _corpus_of(members)
    except (KeyError, TypeError) as error:
        raise FormatError(f"a record of the corpus is malformed: {error}", path=path) from error


def _corpus_of(members: Mapping[str, list[Record]]) -> Corpus:
    return Corpus(
        prose=[
            Prose(source, str(record["title"]), str(record["text"]).split("\n\n"))
            for source in PROSE_SOURCES
            for record in members.get(source, [])
        ],
        entries=[_entry(record) for record in members.get("wordnet", [])],
        definitions=[
            (source, str(record["word"]), str(record["text"]))
            for source in ("jargon", "devil")
            for record in members.get(source, [])
        ],
        countries={
            str(record["country"]): _texts(record["facts"])
            for record in members.get("factbook", [])
        },
        conversations=[
            tuple(_strings(record["turns"])) for record in members.get("small_talk", [])
        ],
        puzzles=[
            (str(record["task"]), str(record["question"]), str(record["answer"]))
            for record in members.get("puzzles", [])
        ],
    )


def _entry(record: Record) -> Entry:
    return Entry(
        word=str(record["w"]),
        pos=str(record["p"]),
        count=int(str(record.get("n", 0))),
        gloss=str(record["g"]),
        example=str(record.get("e", "")),
        synonyms=tuple(_strings(record.get("s", []))),
        kind=str(record.get("k", "")),
    )


def _strings(value: object) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"expected a list, found {type(value).__name__}")
    return [str(item) for item in value]


def _texts(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"expected an object, found {type(value).__name__}")
    return {str(key): str(item) for key, item in value.items()}

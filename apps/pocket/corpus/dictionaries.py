"""The Jargon File and The Devil's Dictionary: entries that are short and read as sentences."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

from pocket.corpus.ascii_text import one_line

Record = dict[str, object]

_BASE64 = {
    char: i
    for i, char in enumerate("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/")
}
_MAX_CHARS = 700
_ART = re.compile(r"[|\\/_^=+*<>#-]{3,}|[()|\\/]{2,}\s*[()|\\/]{2,}")


def jargon(root: Path) -> Iterator[Record]:
    """Entries of the Jargon File without pronunciation, cross-reference marks and drawings."""
    for word, body in _entries(root / "usr/share/dictd", "jargon"):
        lines = body.split("\n")
        text = "\n".join(lines[1:])
        if _ART.search(text) or len(text.split("\n\n")[0]) > 4 * _MAX_CHARS:
            continue
        first = next((part for part in text.split("\n\n") if len(part.split()) > 5), "")
        first = re.sub(r"\{([^}]*)\}", r"\1", one_line(first))
        first = re.sub(r"^(\[[^\]]*\]|\d+\.)\s*", "", first)
        if 30 <= len(first) <= _MAX_CHARS:
            yield {"word": one_line(word), "text": first}


def devil(root: Path) -> Iterator[Record]:
    """Entries of The Devil's Dictionary, without their verses."""
    for word, body in _entries(root / "usr/share/dictd", "devil"):
        first = one_line(body.split("\n\n")[0])
        match = re.match(
            r"[A-Z' -]+, (?:n|v\.t|v\.i|adj|adv|pp|p\.p|n\.pl|v|pro|prep|x)\.\s+", first
        )
        text = first[match.end() :] if match else ""
        text = re.sub(r"^(v\.t|v\.i|n|adj)\.\s+", "", text).replace("_", "")
        if 20 <= len(text) <= _MAX_CHARS:
            yield {"word": one_line(word).lower(), "text": text}


def _entries(folder: Path, name: str) -> Iterator[tuple[str, str]]:
    """Head word and body of each entry: an index line gives position and size in base 64."""
    data = gzip.decompress((folder / f"{name}.dict.dz").read_bytes())
    seen = set()
    for line in (folder / f"{name}.index").read_text("utf-8").splitlines():
        word, start, size = line.split("\t")
        if not word.startswith("00-database") and start not in seen:
            seen.add(start)
            begin = _number(start)
            yield word, data[begin : begin + _number(size)].decode("utf-8", "replace").strip()


def _number(digits: str) -> int:
    value = 0
    for digit in digits:
        value = 64 * value + _BASE64[digit]
    return value

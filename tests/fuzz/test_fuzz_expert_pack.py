"""Bounded fuzzing of the reader of expert packs: corpus, seeded mutations, a short atheris run."""

import importlib.util
import random
import tracemalloc
from pathlib import Path

import pytest
from fuzz.file_fuzzing import mutated, short_run
from fuzz.fuzz_expert_pack import check_one, write_corpus

CORPUS = Path(__file__).parent / "corpus" / "expert_pack"
SEEDS = sorted(CORPUS.iterdir())
HEAD = 176 + 6 * 328  # nothing reads the payload
WORDS = [
    *(n.to_bytes(8, "little") for n in (0, 1, 3, 64, 1 << 31, 1 << 62, 1 << 63, (1 << 64) - 1)),
    *(n.to_bytes(4, "little") for n in (0, 1, 2, 3, 39, 1 << 31, (1 << 32) - 1)),
    b"\xff",
    b"\0",
]


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
        read = [
            check_one(content, tmp_path)
            for content in mutated(random.Random(4), SEEDS, WORDS, head=HEAD)
        ]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert True in read
    assert False in read
    assert peak < 64 << 20


if importlib.util.find_spec("atheris") is not None:

    def test_short_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
        short_run("fuzz_expert_pack.py", CORPUS, tmp_path)

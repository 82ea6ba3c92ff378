"""Bounded fuzzing of route traces and frequency files: corpus, mutations, a short atheris run."""

import importlib.util
import random
import tracemalloc
from pathlib import Path

import pytest
from fuzz.file_fuzzing import mutated, short_run
from fuzz.fuzz_expert_routes import check_one, write_corpus

CORPUS = Path(__file__).parent / "corpus" / "expert_routes"
SEEDS = sorted(CORPUS.iterdir())
WORDS = [
    *(n.to_bytes(8, "little") for n in (0, 1, 5, 1 << 31, 1 << 62, (1 << 64) - 1)),
    *(n.to_bytes(4, "little") for n in (0, 1, 2, 3, 96, (1 << 32) - 1)),
    *(n.to_bytes(2, "little") for n in (0, 5, 6, 65_535)),
    *(text.encode() for text in ("0", "-1", "1e3", "6", str(1 << 70), "[", "]", "{}", "null", ",")),
    b'"next":',
    b'"version":2,',
]


@pytest.mark.parametrize("seed", SEEDS, ids=lambda seed: seed.name)
def test_stored_case_is_read(tmp_path: Path, seed: Path) -> None:
    assert check_one(seed.read_bytes(), tmp_path)


def test_corpus_is_what_the_script_writes(tmp_path: Path) -> None:
    write_corpus(tmp_path)
    assert len(list(tmp_path.iterdir())) == len(SEEDS)
    for made in tmp_path.iterdir():
        assert (CORPUS / made.name).read_bytes() == made.read_bytes()


def test_mutations_are_read_or_refused_in_bounded_memory(tmp_path: Path) -> None:
    tracemalloc.start()
    try:
        read = [check_one(content, tmp_path) for content in mutated(random.Random(4), SEEDS, WORDS)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert True in read
    assert False in read
    assert peak < 64 << 20


if importlib.util.find_spec("atheris") is not None:

    def test_short_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
        short_run("fuzz_expert_routes.py", CORPUS, tmp_path)

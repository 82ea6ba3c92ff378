"""Handles that mean nothing are refused, and what is freed leaves nothing behind.

`PYTHONPATH=tests python tests/capi/test_handles.py` opens a model 1,000 times, as the suite does
150 times.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from capi.programs import HERE, POCKET, Library, Results, build_library, checks_in
from tiny_model import random_tensors, tiny_config, write_gguf

SOURCE = HERE / "handles.c"
MEMORY = HERE / "memory.c"
KINDS = ("engine", "session", "parser", "sampler")
WAYS = ("freed", "other_kind", "garbage", "address", "large", "cancel")
ENGINES, SESSIONS = 150, 10_000
GROWTH_BYTES = 4 << 20
"""Of the resident memory, which moves by pages and by what an allocator keeps."""


@pytest.fixture(scope="module")
def results(library: Library) -> Results:
    return library.results(SOURCE, POCKET)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_handle_is_refused(results: Results, kind: str, way: str) -> None:
    assert results[f"{kind}.{way}"] == "ok"


@pytest.mark.parametrize("name", checks_in(SOURCE))
def test_handle(results: Results, name: str) -> None:
    assert results[name] == "ok"


def smallest_model(folder: Path) -> Path:
    """A model that opens in a few milliseconds."""
    path = folder / "tiny.gguf"
    config = tiny_config(compress_ratios=(0, 4), num_hash_layers=1)
    write_gguf(path, config, random_tensors(config, seed=1), tokenizer=True)
    return path


@pytest.fixture(scope="module")
def growth(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    model = smallest_model(tmp_path_factory.mktemp("tiny"))
    return library.results(MEMORY, model, str(ENGINES), str(SESSIONS))


@pytest.mark.parametrize("what", ["engines", "sessions", "others"])
def test_memory_stays_flat(growth: Results, what: str) -> None:
    assert int(growth.facts[what]) < GROWTH_BYTES


def _run_by_hand() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        library = Library(build_library(folder / "prefix"), folder)
        print(library.results(MEMORY, smallest_model(folder), "1000", str(SESSIONS)).facts)


if __name__ == "__main__":
    _run_by_hand()

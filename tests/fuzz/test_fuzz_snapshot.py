"""The reader of saved sessions on a stored corpus, its mutations, and a few seconds of fuzzing."""

from __future__ import annotations

import copy
import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fresh_process import FRESH
from hypothesis import given, settings
from hypothesis import strategies as st

HERE = Path(__file__).parent
CORPUS = sorted((HERE / "corpus" / "snapshot").iterdir())
HEADER = json.loads((HERE / "corpus" / "snapshot" / "header").read_bytes()[1:])
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(1 << 70), 1 << 70),
    st.integers(0, 20),
    st.floats(),
    st.text(max_size=5),
    st.lists(st.integers(0, 10), max_size=6),
    st.just({}),
)


def load_target() -> Any:
    spec = importlib.util.spec_from_file_location("target", HERE / "snapshot_target.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


TARGET = load_target()


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything inside a JSON value."""
    inside = value.items() if isinstance(value, dict) else ()
    if isinstance(value, list):
        inside = enumerate(value)
    found = [path] if path else []
    for name, item in inside:
        found += places(item, (*path, name))
    return found


PLACES = places(HEADER)


def put(header: Any, path: tuple[Any, ...], value: Any) -> None:
    """Replace what is at a path, if that still leads anywhere."""
    try:
        for name in path[:-1]:
            header = header[name]
        header[path[-1]] = value
    except (TypeError, LookupError):
        pass


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_corpus_is_accepted_and_its_mutations_raise_only_snapshot_errors(path: Path) -> None:
    generator = random.Random(path.name)
    data = path.read_bytes()
    assert TARGET.run(data)
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(generator.randint(1, 4)):
            place = generator.randint(1, len(changed))
            kind = generator.randrange(3)
            if kind == 0:
                changed[place : place + 1] = bytes([generator.randrange(256)])
            elif kind == 1:
                del changed[place : place + generator.randint(1, 8)]
            else:
                start = generator.randint(0, len(changed))
                changed[place:place] = changed[start : start + generator.randint(1, 40)]
        TARGET.run(bytes(changed))


@given(edits=st.lists(st.tuples(st.sampled_from(PLACES), VALUES), min_size=1, max_size=3))
@settings(max_examples=400, deadline=None)
def test_headers_with_other_values_raise_only_snapshot_errors(
    edits: list[tuple[tuple[Any, ...], Any]],
) -> None:
    header = copy.deepcopy(HEADER)
    for path, value in edits:
        # A copy, or a second edit could put a value into itself.
        put(header, path, copy.deepcopy(value))
    TARGET.run(b"\1" + json.dumps(header).encode())


@given(data=st.binary(max_size=80))
@settings(max_examples=300, deadline=None)
def test_any_bytes_as_turns_raise_only_snapshot_errors(data: bytes) -> None:
    TARGET.run(b"\2" + data)


# atheris has no wheels for some platforms; where it cannot be installed this test does not exist.
if importlib.util.find_spec("atheris") is not None:

    def test_a_few_seconds_of_coverage_guided_fuzzing_find_nothing(tmp_path: Path) -> None:
        (tmp_path / "new").mkdir()
        command = [
            sys.executable,
            str(HERE / "fuzz_snapshot.py"),
            "-max_total_time=5",
            "-max_len=4096",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={tmp_path}/",
            str(tmp_path / "new"),
            str(HERE / "corpus" / "snapshot"),
        ]
        done = subprocess.run(
            [*FRESH, *command],
            capture_output=True,
            text=True,
            timeout=120,
            env={"PYTHONPATH": str(HERE.parents[1])},
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

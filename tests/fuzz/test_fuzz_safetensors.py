"""The safetensors readers on a stored corpus, its mutations, and a few seconds of real fuzzing."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import FRESH

HERE = Path(__file__).parent
CORPUS = sorted((HERE / "corpus" / "safetensors").iterdir())
PIECES = (
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\0", b"\xff", b"-1", b"1e9", b"null",
    b"18446744073709551616", b'"__metadata__":{}', b'"shape":[0]', b'"data_offsets":[0,0]',
    b'"F4"', b"../", b'"weight_map"',
)  # fmt: skip


def load_target() -> type:
    spec = importlib.util.spec_from_file_location("target", HERE / "safetensors_target.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.Target


def mutated(data: bytes, generator: random.Random) -> bytes:
    """A few random edits; sometimes the header length is made to fit again."""
    changed = bytearray(data)
    for _ in range(generator.randint(1, 4)):
        place = generator.randint(0, len(changed))
        kind = generator.randrange(4)
        if kind == 0:
            changed[place : place + 1] = bytes([generator.randrange(256)])
        elif kind == 1:
            del changed[place : place + generator.randint(1, 8)]
        elif kind == 2:
            changed[place:place] = generator.choice(PIECES)
        else:
            start = generator.randint(0, len(changed))
            changed[place:place] = changed[start : start + generator.randint(1, 40)]
    end = bytes(changed).rfind(b"}}")
    if changed[:1] == b"\0" and end > 9 and generator.random() < 0.5:
        changed[1:9] = (end + 2 - 9).to_bytes(8, "little")
    return bytes(changed)


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.name)
def test_mutations_of_the_corpus_raise_only_format_errors(path: Path, tmp_path: Path) -> None:
    target = load_target()(tmp_path)
    generator = random.Random(path.name)
    data = path.read_bytes()
    target.run(data)
    for _ in range(60):
        target.run(mutated(data, generator))


def test_the_corpus_holds_accepted_inputs_of_both_kinds(tmp_path: Path) -> None:
    target = load_target()(tmp_path)
    kinds = {path.read_bytes()[:1] == b"\0" for path in CORPUS if target.run(path.read_bytes())}
    assert kinds == {True, False}


# atheris has no wheels for some platforms; where it cannot be installed this test does not exist.
if importlib.util.find_spec("atheris") is not None:

    def test_a_few_seconds_of_coverage_guided_fuzzing_find_nothing(tmp_path: Path) -> None:
        (tmp_path / "new").mkdir()
        command = [
            sys.executable,
            str(HERE / "fuzz_safetensors.py"),
            "-max_total_time=5",
            "-max_len=4096",
            "-rss_limit_mb=1024",
            f"-artifact_prefix={tmp_path}/",
            str(tmp_path / "new"),
            str(HERE / "corpus" / "safetensors"),
        ]
        environment = {"PYTHONPATH": str(HERE.parents[1])}
        done = subprocess.run(
            [*FRESH, *command],
            capture_output=True,
            text=True,
            timeout=120,
            env=environment,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-4000:]

"""Bounded fuzzing of the reply parser: seeded random input, and a short atheris run."""

import importlib.util
import random
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import FRESH
from fuzz.fuzz_reply import ROOT, check_one

SEEDS = {
    "two_calls": b"\0\0hi\xf0\xf2f\xf9\xf4v\xf6\xf5[1]\xf6\xf3\xf2g\xf9\xf3\xf1",
    "thinking": b"\1\3why\xf8\xf7\xf8because",
    "in_block_v41": b"\6\1\xf2f\xf9\xf4v\xf6\xf3\xf1",
}


@pytest.mark.parametrize(
    ("name", "count"), [("two_calls", 2), ("thinking", 0), ("in_block_v41", 1)]
)
def test_seeds_reach_the_calls(name: str, count: int) -> None:
    assert check_one(SEEDS[name]) == count


def test_random_replies_are_parsed_the_same_however_cut() -> None:
    draw = random.Random(7)
    found = 0
    for _ in range(4000):
        length = draw.randrange(40)
        body = bytes(
            draw.choice((draw.randrange(0xF0, 0xFA), draw.randrange(128))) for _ in range(length)
        )
        found += check_one(bytes((draw.randrange(32), draw.randrange(256))) + body)
    assert found > 100


if importlib.util.find_spec("atheris") is not None:

    def test_a_short_coverage_guided_run_finds_nothing(tmp_path: Path) -> None:
        for name, content in SEEDS.items():
            (tmp_path / name).write_bytes(content)
        run = subprocess.run(
            [
                *FRESH,
                sys.executable,
                str(ROOT / "tests" / "fuzz" / "fuzz_reply.py"),
                "-runs=10000",
                "-seed=1",
                f"-artifact_prefix={tmp_path}/",
                str(tmp_path),
            ],
            capture_output=True,
            text=True,
            cwd=ROOT,
            timeout=120,
            check=False,
        )
        assert run.returncode == 0, run.stderr[-3000:]

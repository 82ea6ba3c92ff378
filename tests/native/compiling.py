"""Compiling the C kernels in other ways than the package does: files, flags, several at a time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ROOT / "edgedsv4" / "kernels" / "native"
HARNESS = ROOT / "tests" / "native"
FLAGS = (
    "-std=gnu11 -fno-math-errno -ffp-contract=off -fvisibility=hidden"
    f" -Wall -Wextra -Werror -Wno-psabi -I{KERNELS} -I{HARNESS}"
).split()


def kernel_files() -> list[Path]:
    """Every C file of the kernels."""
    return sorted(KERNELS.glob("*.c"))


def all_files() -> list[Path]:
    """Every C file of the package."""
    return [*kernel_files(), *sorted((ROOT / "edgedsv4/formats/native").glob("*.c"))]


def compile_all(
    compiler: list[str], files: list[Path], objects: Path, more: Sequence[str] = ()
) -> list[Path]:
    """Compile files to objects in a folder; fails with what the compiler says of the first."""

    def compile_one(source: Path) -> Path:
        target = objects / f"{source.stem}.o"
        run([*compiler, *FLAGS, *more, "-c", str(source), "-o", str(target)])
        return target

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return list(pool.map(compile_one, files))


def run(command: list[str]) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    said = done.stdout + done.stderr
    assert done.returncode == 0, f"{command[0]} ... {command[-1]}: {said[-4000:]}"
    return said

"""Programs against libdsv4: how tests build the library, compile C and read what it prints.

A program starts an interpreter, which takes seconds. So one program makes many checks, each printed
as a line (`check.h`), and a test module asks for them one by one.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from edgedsv4.capi.build import BuildOptions, build

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
POCKET = "pocket-v4"
STRICT = ("-Wall", "-Wextra", "-Wpedantic", "-Werror")
GCC = ("gcc",)
CLANG = (sys.executable, "-m", "ziglang", "cc")
_CHECK = re.compile(r'\b(?:CHECK|EXPECT|REFUSED|SANE)\("([^"]+)"')


@dataclass
class Library:
    """A built library, and the programs that were compiled against it."""

    prefix: Path
    work: Path
    """Where programs go."""
    _programs: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def program(self, source: Path, *flags: str) -> Path:
        """Compile a program; the same one is compiled once."""
        key = (str(source), *flags)
        if key not in self._programs:
            target = self.work / f"{source.stem}{len(self._programs)}"
            run([*GCC, "-std=c11", "-g", "-O1", *STRICT, *self.flags(source, target), *flags])
            self._programs[key] = target
        return self._programs[key]

    def flags(self, source: Path, target: Path) -> list[str]:
        """What a compiler is told to make a program."""
        folder = self.prefix / "lib"
        return [
            *(f"-I{self.prefix / 'include'}", f"-I{HERE}", str(source), "-o", str(target)),
            *("-D_POSIX_C_SOURCE=200809L", f"-L{folder}", "-ldsv4", f"-Wl,-rpath,{folder}"),
            *("-lpthread", "-lm"),
        ]

    def results(self, source: Path, *arguments: str | Path, flags: Sequence[str] = ()) -> Results:
        """Compile and run a program of checks."""
        program = self.program(source, *flags)
        return Results(run([str(program), *map(str, arguments)]))


def build_library(out: Path, python: Path | None = None) -> Path:
    """Build the library into a prefix, for this Python when no other is named; returns the prefix.

    Args:
        out: prefix.
        python: the Python that the library runs.
    """
    build(BuildOptions(out=out, python=python or Path(sys.executable), compiler=GCC))
    return out


def run(
    command: Sequence[str], *, environment: Mapping[str, str] | None = None, timeout: float = 150
) -> str:
    """Output of a command that must succeed; compilers get our environment, programs none.

    Args:
        command: program and arguments.
        environment: the whole environment; None gives an empty one to anything that is not a
            compiler.
        timeout: seconds.
    """
    if environment is None and command[0] not in (GCC[0], CLANG[0], "g++"):
        environment = {}
    done = subprocess.run(
        command, capture_output=True, timeout=timeout, check=False, env=environment
    )
    said = (done.stdout + done.stderr).decode(errors="replace")
    assert done.returncode == 0, f"{command[0]}: status {done.returncode}\n{said[-6000:]}"
    # The library prints nothing, and a compiler should have no reason to.
    assert not done.stderr, f"{command[0]} said: {said[-6000:]}"
    return done.stdout.decode(errors="replace")


class Results:
    """What a program printed: checks by their name, and facts."""

    def __init__(self, output: str) -> None:
        self.checks: dict[str, str] = {}
        self.facts: dict[str, str] = {}
        for line in output.splitlines():
            kind, _, rest = line.partition("\t")
            name, _, detail = rest.partition("\t")
            if kind == "fact":
                self.facts[name] = detail
            elif kind in ("ok", "FAILED") and self.checks.get(name, "ok") == "ok":
                # A check may be made many times; the first failure counts.
                self.checks[name] = "ok" if kind == "ok" else detail

    def __getitem__(self, name: str) -> str:
        return self.checks.get(name, "was not reached")


def checks_in(*sources: Path) -> list[str]:
    """Names of the checks that programs make."""
    names = [name for path in sources for name in _CHECK.findall(path.read_text(encoding="utf-8"))]
    return list(dict.fromkeys(names))

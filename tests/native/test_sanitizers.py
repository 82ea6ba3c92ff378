"""Every kernel under the sanitizers of gcc: no stray byte, no undefined step, no race."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from native.compiling import HARNESS, KERNELS, compile_all, kernel_files, run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("sanitizer", ["address,undefined", "thread"])
def test_the_harness_runs_clean(sanitizer: str, tmp_path: Path) -> None:
    # Functions and lines are enough to find a fault by, and take half of the compiler's time; so do
    # checks of addresses that are calls, where what is inlined a hundred times has one each.
    flags = ["-g1", "-O1", f"-fsanitize={sanitizer}", "-fno-sanitize-recover=undefined"]
    if "address" in sanitizer:
        flags.append("--param=asan-instrumentation-with-call-threshold=0")
    # What the sanitizers insert makes gcc see uninitialised variables where there are none.
    flags.append("-Wno-maybe-uninitialized")
    # Few machines have it: its instruction is made of others.
    flags.append("-DDK_EMULATE_AVX_VNNI")
    # No sanitizer sees what the tile instructions read and write; and few machines have them.
    flags.append("-DDK_TILES_IN_SOFTWARE")
    files = [*kernel_files(), *sorted(HARNESS.glob("*.c"))]
    objects = compile_all(["gcc"], files, tmp_path, flags)
    program = tmp_path / "harness"
    run(["gcc", *flags, *map(str, objects), "-o", str(program), "-lpthread", "-lm"])
    said = run([*launcher(program), str(program)])
    levels = said.splitlines()
    assert "scalar" in levels
    assert ("avx-vnni" in levels) == ("avx2" in levels)
    assert ("amx" in levels) == ("avx512-vbmi" in levels)


def test_the_harness_calls_every_function() -> None:
    header = re.sub(
        r"/\*.*?\*/", "", (KERNELS / "kernels.h").read_text(encoding="utf-8"), flags=re.S
    )
    declared = set(re.findall(r"\b(dk_\w+)\(", header))
    called = "".join(path.read_text(encoding="utf-8") for path in HARNESS.glob("*.c"))
    assert not {name for name in declared if f"{name}(" not in called}


def launcher(program: Path) -> list[str]:
    """`setarch -R` where the system places memory at addresses that the race checker cannot map."""
    tried = subprocess.run([str(program), "--nothing"], capture_output=True, text=True, check=False)
    return ["setarch", "-R"] if "unexpected memory mapping" in tried.stderr else []

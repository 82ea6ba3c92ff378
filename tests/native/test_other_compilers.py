"""The kernels compile with clang, and for ARM: zig brings that compiler and all headers."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from native.compiling import ROOT, all_files, compile_all, kernel_files


@pytest.fixture(autouse=True)
def zig_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kept between runs, so that only files that changed are compiled again."""
    monkeypatch.setenv("ZIG_GLOBAL_CACHE_DIR", str(ROOT / "build" / "zig"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("target", ["x86_64-linux-gnu", "aarch64-linux-gnu"])
def test_every_file_compiles(target: str, tmp_path: Path) -> None:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", target, "-O1"]
    objects = compile_all(zig, all_files(), tmp_path)
    assert all(path.stat().st_size > 0 for path in objects)


@pytest.mark.timeout(900)
def test_the_pool_compiles_where_threads_cannot_be_pinned(tmp_path: Path) -> None:
    zig = [sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-macos", "-O1"]
    (threads,) = (path for path in kernel_files() if path.name == "threads.c")
    assert compile_all(zig, [threads], tmp_path)

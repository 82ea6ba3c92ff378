"""Threads, stopping, and an interpreter that does not start."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

THREADS = HERE / "threads.c"
CANCEL = HERE / "cancel.c"
BROKEN = HERE / "broken.c"


@pytest.fixture(scope="module")
def threads(library: Library) -> Results:
    return library.results(THREADS, POCKET)


@pytest.mark.parametrize("name", checks_in(THREADS))
def test_threads(threads: Results, name: str) -> None:
    assert threads[name] == "ok"


@pytest.fixture(scope="module")
def cancel(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    state = tmp_path_factory.mktemp("cancel") / "talk.dsv4s"
    return library.results(CANCEL, POCKET, state)


@pytest.mark.parametrize("name", checks_in(CANCEL))
def test_stopping(cancel: Results, name: str) -> None:
    assert cancel[name] == "ok"


def without_packages(folder: Path) -> Path:
    """A Python in which nothing is installed."""
    (folder / "bin").mkdir(parents=True)
    python = folder / "bin" / "python"
    python.symlink_to(Path(sys.executable).resolve())
    settings = f"home = {python.resolve().parent}\ninclude-system-site-packages = false\n"
    (folder / "pyvenv.cfg").write_text(settings, encoding="utf-8")
    return python


@pytest.fixture(scope="module", params=["no_python", "no_package"])
def broken(
    request: pytest.FixtureRequest, library: Library, tmp_path_factory: pytest.TempPathFactory
) -> Results:
    folder = tmp_path_factory.mktemp("broken")
    if request.param == "no_python":
        return library.results(BROKEN, folder / "python", "No such file or directory")
    return library.results(BROKEN, without_packages(folder), "edgedsv4")


@pytest.mark.parametrize("name", checks_in(BROKEN))
def test_broken_installation(broken: Results, name: str) -> None:
    assert broken[name] == "ok"

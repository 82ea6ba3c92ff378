"""Programs that misuse the interface: each call is refused or works, and nothing else is harmed."""

from __future__ import annotations

from pathlib import Path

import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

ARGUMENTS = HERE / "misuse_arguments.c"
CALLBACKS = HERE / "misuse_callbacks.c"
THREADS = HERE / "misuse_threads.c"
HOST = HERE / "misuse_host.c"
# usleep and the like.
FLAGS = ("-D_GNU_SOURCE",)


@pytest.fixture(scope="module")
def arguments(library: Library) -> Results:
    return library.results(ARGUMENTS, POCKET, flags=FLAGS)


@pytest.mark.parametrize("name", checks_in(ARGUMENTS))
def test_arguments(arguments: Results, name: str) -> None:
    assert arguments[name] == "ok"


@pytest.fixture(scope="module")
def callbacks(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    state = tmp_path_factory.mktemp("callbacks") / "talk.dsv4s"
    return library.results(CALLBACKS, POCKET, state, flags=FLAGS)


@pytest.mark.parametrize("name", checks_in(CALLBACKS))
def test_callbacks(callbacks: Results, name: str) -> None:
    assert callbacks[name] == "ok"


@pytest.fixture(scope="module")
def threads(library: Library, tmp_path_factory: pytest.TempPathFactory) -> Results:
    state = tmp_path_factory.mktemp("threads") / "talk.dsv4s"
    return library.results(THREADS, POCKET, state, "4", flags=FLAGS)


@pytest.mark.parametrize("name", checks_in(THREADS))
def test_threads(threads: Results, name: str) -> None:
    assert threads[name] == "ok"


@pytest.mark.parametrize(
    "mode", ["arithmetic", "stack", "room", "stdio", "cancelled", "interrupts"]
)
def test_hosts_of_odd_habits(library: Library, tmp_path: Path, mode: str) -> None:
    found = library.results(HOST, mode, tmp_path / "talk.dsv4s", flags=FLAGS)
    expected = {name for name in checks_in(HOST) if name.startswith(f"{mode}.")}
    assert {name: found[name] for name in expected} == dict.fromkeys(expected, "ok")

"""The library under test: built once per test process, with a folder for programs beside it."""

from __future__ import annotations

import pytest
from capi.programs import Library, build_library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """libdsv4 for the Python that runs the tests."""
    folder = tmp_path_factory.mktemp("capi")
    work = folder / "programs"
    work.mkdir()
    return Library(build_library(folder / "prefix"), work)

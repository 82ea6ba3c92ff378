"""Texts, conversations and numbers that careless or hostile programs hand over."""

from __future__ import annotations

import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

SOURCE = HERE / "texts.c"


@pytest.fixture(scope="module")
def results(library: Library) -> Results:
    return library.results(SOURCE, POCKET)


@pytest.mark.parametrize("name", checks_in(SOURCE))
def test_text(results: Results, name: str) -> None:
    assert results[name] == "ok"

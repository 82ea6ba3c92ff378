"""Structs of other versions of the header, as `struct_size` says, and versions themselves."""

from __future__ import annotations

import re

import pytest
from capi.programs import HERE, POCKET, Library, Results, checks_in

from edgedsv4.capi.header import header_path

SOURCE = HERE / "structs.c"
SIZES = ("same", "older", "newer", "newer_used", "zero", "tiny", "odd", "huge")
SUBJECTS = re.findall(r'^    \{"(dsv4_\w+)"', SOURCE.read_text(encoding="utf-8"), re.MULTILINE)
INITS = re.findall(r'try_init\("([^"]+)"', SOURCE.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def results(library: Library) -> Results:
    return library.results(SOURCE, POCKET)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", SUBJECTS)
def test_struct_of_another_size(results: Results, name: str, size: str) -> None:
    assert results[f"{name}.{size}"] == "ok"


@pytest.mark.parametrize("name", [*INITS, *checks_in(SOURCE)])
def test_version(results: Results, name: str) -> None:
    assert results[name] == "ok"


def test_every_struct_with_a_size_is_tried() -> None:
    text = header_path().read_text(encoding="utf-8")
    sized = re.findall(r"typedef struct (dsv4_\w+) \{\n    uint32_t struct_size;", text)
    # The library makes events itself.
    assert sorted(SUBJECTS) == sorted(set(sized) - {"dsv4_event"})

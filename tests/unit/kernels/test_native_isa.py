"""The choice of an instruction set."""

from __future__ import annotations

from edgedsv4.kernels.native.library import library

lib, ffi = library()


def test_the_level_in_use_has_a_name() -> None:
    assert ffi.string(lib.dk_isa_name(lib.dk_isa())).decode().isprintable()


def test_every_level_of_this_machine_can_be_used(isa: int) -> None:
    assert lib.dk_isa() == isa


def test_scalar_runs_everywhere() -> None:
    best = lib.dk_isa()
    assert lib.dk_set_isa(0) == 0
    assert lib.dk_isa() == 0
    assert lib.dk_set_isa(best) == 0


def test_a_level_that_does_not_exist_changes_nothing() -> None:
    best = lib.dk_isa()
    for level in (-1, 9, 12):
        assert lib.dk_set_isa(level) == -1
        assert lib.dk_isa_name(level) == ffi.NULL
    assert lib.dk_isa() == best


def test_no_machine_has_both_families() -> None:
    best = lib.dk_isa()
    results = [lib.dk_set_isa(level) for level in (1, 10)]
    lib.dk_set_isa(best)
    assert results != [0, 0]

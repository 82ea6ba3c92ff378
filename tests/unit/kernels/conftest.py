"""Settings of the kernel tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from edgedsv4.kernels.native.library import library

lib, ffi = library()


@pytest.fixture
def nan_filled_memory() -> Iterator[None]:
    """Fill all memory that PyTorch leaves uninitialised with NaN: a forgotten element shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(before)


def _levels() -> list[int]:
    """Instruction sets that this machine has."""
    before = lib.dk_isa()
    levels = [level for level in range(12) if lib.dk_set_isa(level) == 0]
    lib.dk_set_isa(before)
    return levels


@pytest.fixture(params=_levels(), ids=lambda level: ffi.string(lib.dk_isa_name(level)).decode())
def isa(request: pytest.FixtureRequest) -> Iterator[int]:
    """The test runs once with each instruction set."""
    before = lib.dk_isa()
    assert lib.dk_set_isa(request.param) == 0
    yield request.param
    lib.dk_set_isa(before)

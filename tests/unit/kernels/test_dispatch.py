"""A named backend runs or fails; "auto" takes the preferred one."""

from __future__ import annotations

import pytest

from edgedsv4.errors import BackendUnavailableError
from edgedsv4.kernels.dispatch import resolve_backend


def test_auto_takes_the_preferred_implementation() -> None:
    assert resolve_backend("auto", ("native", "reference"), operation="rope") == "native"


def test_a_named_backend_is_taken_when_it_can_run() -> None:
    assert resolve_backend("reference", ("native", "reference"), operation="rope") == "reference"


def test_the_reference_is_there_without_saying() -> None:
    assert resolve_backend("auto", operation="rope") == "reference"


def test_a_named_backend_that_cannot_run_is_an_error() -> None:
    with pytest.raises(BackendUnavailableError, match=r"rope.*'triton'.*native, reference"):
        resolve_backend("triton", ("native", "reference"), operation="rope")

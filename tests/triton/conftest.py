"""Tests of Triton kernels: by the interpreter when TRITON_INTERPRET is set, else on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgedsv4.kernels._triton import HAVE_TRITON, IS_INTERPRETED

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark which world these tests are for, and skip them where there is no Triton."""
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.interpreted)
            if not IS_INTERPRETED:
                item.add_marker(pytest.mark.gpu)
            if not HAVE_TRITON:
                item.add_marker(pytest.mark.skip(reason="Triton is not installed"))


if IS_INTERPRETED:
    from triton.runtime import interpreter

    # Looking for overflows of integers takes half of the time, and finds wanted ones of hashes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

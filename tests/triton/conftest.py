"""Tests of Triton kernels: by the interpreter when TRITON_INTERPRET is set, else on a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgedsv4.kernels._triton import HAVE_TRITON, IS_INTERPRETED
from edgedsv4.kernels.gpu import matvec

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


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four rows per program also where matrices are small, as those of tiny networks all are.

    A GPU would be idle then; the interpreter runs one program after the other. `test_matvec.py` has
    the other numbers of rows.
    """
    if IS_INTERPRETED:
        monkeypatch.setattr(matvec, "_ONE_ROW", 0)
        monkeypatch.setattr(matvec, "_TWO_ROWS", 0)


if IS_INTERPRETED:
    from triton.runtime import interpreter

    # Looking for overflows of integers takes half of the time, and finds wanted ones of hashes.
    interpreter.interpreter_builder.options = interpreter.InterpreterOptions(
        sanitize_overflow=False
    )

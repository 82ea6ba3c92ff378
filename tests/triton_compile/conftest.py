"""Compiling kernels for GPUs that are not there; not under the interpreter, which compiles none."""

from __future__ import annotations

from edgedsv4.kernels._triton import HAVE_TRITON, IS_INTERPRETED

OBSTACLE = (
    "Triton is not installed"
    if not HAVE_TRITON
    else "interpreted kernels cannot be compiled: run without TRITON_INTERPRET"
    if IS_INTERPRETED
    else None
)

_COMPILING = ["test_resources.py", "test_scaled_products.py"]
collect_ignore = [] if OBSTACLE is None else _COMPILING


def pytest_report_header() -> list[str]:
    """Say what is left out, and why."""
    return [] if OBSTACLE is None else [f"{OBSTACLE}: {_COMPILING} of triton_compile are left out"]

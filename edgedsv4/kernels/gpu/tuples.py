"""Tuples of tensors in kernels, which grow while a loop is unrolled."""

from __future__ import annotations

from edgedsv4.kernels._triton import tl, triton  # noqa: F401 - kernels need tl in their module


@triton.jit
def nothing():
    """An empty tuple to append to."""
    return ()


@triton.jit
def appended(values, value):
    """A tuple with one value more."""
    return values + (value,)  # noqa: RUF005 - the compiler unpacks no tuples

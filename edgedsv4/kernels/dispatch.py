"""Which implementation of an operation runs: the one asked for or, with "auto", the first that can.

Each operation says itself what it has for the device and dtype at hand; there is no registry. A
backend that was named is never replaced by another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from edgedsv4.errors import BackendUnavailableError

if TYPE_CHECKING:
    from edgedsv4.config import Backend

Implementation = Literal["reference", "native", "triton"]


def resolve_backend(
    requested: Backend,
    available: Sequence[Implementation] = ("reference",),
    *,
    operation: str,
) -> Implementation:
    """Choose the implementation of one call.

    Args:
        requested: the caller's `backend=`.
        available: what can run here, the preferred one first; never empty.
        operation: name of the operation, for the message.

    Returns:
        `available[0]` for "auto", else `requested`.

    Raises:
        BackendUnavailableError: if a named backend is not in `available`.
    """
    if requested == "auto":
        return available[0]
    if requested not in available:
        choices = ", ".join(("auto", *available))
        raise BackendUnavailableError(
            f"{operation}: backend {requested!r} cannot run here; available: {choices}"
        )
    return requested

"""One user at a time, for objects that do not see to it themselves; others are told at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from edgedsv4 import BusyError


class Exclusive:
    """Whether somebody works with an object.

    Args:
        name: what messages call it.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()

    @contextmanager
    def taken(self) -> Iterator[None]:
        """Be the only one in the `with` block.

        Raises:
            BusyError: somebody else is.
        """
        if not self._lock.acquire(blocking=False):
            raise BusyError(f"{self._name} is in use by another call")
        try:
            yield
        finally:
            self._lock.release()

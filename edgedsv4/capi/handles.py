"""Handles: numbers that C holds in place of Python's objects.

A number is never used twice, so that one whose object was freed is known to be dead for ever, and
nothing that C passes in is followed as an address.
"""

from __future__ import annotations

import itertools
import threading
from typing import Generic, TypeVar

from edgedsv4.errors import ConfigError

T = TypeVar("T")

_KIND_BITS = 4


class HandleTable(Generic[T]):
    """The living objects of one kind.

    Args:
        kind: low bits of its handles, 1..15, of its own (`shim.h` has that of cancel objects).
        name: what messages call one.
    """

    def __init__(self, kind: int, name: str) -> None:
        self._kind = kind
        self._name = name
        self._objects: dict[int, T] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    def add(self, thing: T) -> int:
        """A new handle."""
        with self._lock:
            handle = next(self._numbers) << _KIND_BITS | self._kind
            self._objects[handle] = thing
        return handle

    def get(self, handle: int) -> T:
        """The object.

        Raises:
            ConfigError: it was freed, or the number is no handle of this kind.
        """
        try:
            return self._objects[handle]
        except KeyError:
            raise ConfigError(self._explain(handle), name=self._name) from None

    def remove(self, handle: int) -> None:
        """Forget the object; a second time is refused."""
        with self._lock:
            if self._objects.pop(handle, None) is None:
                raise ConfigError(self._explain(handle), name=self._name)

    def __len__(self) -> int:
        return len(self._objects)

    def _explain(self, handle: int) -> str:
        if not handle:
            return f"{self._name} must not be NULL"
        is_ours = handle & (1 << _KIND_BITS) - 1 == self._kind
        what = "was freed before" if is_ours else "is no such handle"
        return f"{self._name} {what}: {handle:#x}"

"""How a session is told to stop what it does."""

from __future__ import annotations

import threading
from collections.abc import Callable

from edgedsv4.errors import CancelledError


class CancelFlag:
    """Whether a session was cancelled.

    An object of its own, so that no session refers to itself and an abandoned one is freed at once;
    a plain attribute, because unlike an Event it can be set inside a signal handler at any moment.
    """

    def __init__(self) -> None:
        self.value = False
        """Set by whoever cancels."""
        # Per thread: one that is told the session is busy must not touch what stops the other.
        self._asked = threading.local()

    def ask_also(self, is_cancelled: Callable[[], bool] | None) -> Callable[[], bool] | None:
        """Ask this too in the calling thread; returns what was asked before."""
        earlier: Callable[[], bool] | None = getattr(self._asked, "value", None)
        self._asked.value = is_cancelled
        return earlier

    def is_set(self) -> bool:
        """Whether the work of this thread is to stop."""
        if self.value:
            return True
        asked: Callable[[], bool] | None = getattr(self._asked, "value", None)
        return asked is not None and asked()

    def check(self) -> None:
        """Raise `CancelledError` when it is to stop."""
        if self.is_set():
            raise CancelledError("cancelled; the session stands at its last complete token")

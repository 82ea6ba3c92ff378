"""Ctrl+C while a session works: the first one cancels, the second one leaves.

Cancelling goes through `Session.cancel`, so the session stands at its last complete token and the
partial answer is kept; an exception out of the signal handler would stop it anywhere.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def cancel_on_interrupt(cancel: Callable[[], None]) -> Iterator[None]:
    """Calls `cancel` on the first SIGINT inside the block; the second is a KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    seen = False

    def handle(_number: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True
        cancel()

    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)

"""Signals that ask the program to end: it saves the conversation first, as when the user leaves."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import Final

END_SIGNALS: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Of `kill`, and of a terminal that is closed."""


def when_asked_to_end(end: Callable[[int], None]) -> None:
    """Have the running loop call `end` with the exit status for each signal that asks for it."""
    loop = asyncio.get_running_loop()
    for number in END_SIGNALS:
        # Only the main thread gets signals; elsewhere the program ends as it always did.
        with suppress(NotImplementedError, RuntimeError, ValueError):
            loop.add_signal_handler(number, end, 128 + number)

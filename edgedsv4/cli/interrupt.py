"""Signals: how Ctrl+C, a closed terminal and `kill` end what runs, with nothing left behind.

While a session works, the first Ctrl+C cancels through `Session.cancel`, so that the session stands
at its last complete token and the partial answer is kept; an exception out of the signal handler
would stop it anywhere. The second one leaves.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 128 + signal.SIGINT
_IMPORT_CODE = "<frozen importlib._bootstrap>"


class Terminated(BaseException):
    """The process was asked to end by a signal; raised so that temporary files are removed.

    Attributes:
        status: exit status that a shell would show, 128 + the signal's number.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.status = 128 + number


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Turns SIGINT, SIGTERM and SIGHUP into exceptions inside the block.

    Signals that the process was started to ignore (`nohup`, a job in the background) stay ignored.
    """
    usual: dict[int, Callable[[int, FrameType | None], object] | int] = {
        signal.SIGINT: signal.default_int_handler,
        signal.SIGTERM: signal.SIG_DFL,
        signal.SIGHUP: signal.SIG_DFL,
    }
    if threading.current_thread() is not threading.main_thread():
        usual = {}
    replaced = [number for number, before in usual.items() if signal.getsignal(number) == before]
    for number in replaced:
        signal.signal(number, _interrupt if number == signal.SIGINT else _terminate)
    try:
        yield
    finally:
        for number in replaced:
            signal.signal(number, usual[number])


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Raises KeyboardInterrupt, or leaves at once while modules are loaded.

    Libraries catch exceptions of their optional imports, KeyboardInterrupt among them: the signal
    would be lost. Nothing that has to be cleaned up is made while modules load.
    """
    while frame is not None:
        if frame.f_code.co_filename == _IMPORT_CODE:
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def _terminate(number: int, _frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # the second one does not wait for the cleaning up
    raise Terminated(number)


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

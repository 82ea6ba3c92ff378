"""The one thread in which the model is used.

The idea: a job is put in from the event loop and is awaited there; jobs never run side by side, so
nobody needs a lock. The thread is a daemon: leaving never waits for a job that cannot be stopped.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ModelThread:
    """Runs jobs one after the other."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="dsv4-chat model", daemon=True)

    def start(self) -> None:
        """Start the thread; once."""
        self._thread.start()

    def submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Queue a job; the future belongs to the running loop and gets what the job raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def tell(finish: Callable[[], None]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(lambda: None if future.done() else finish())

        def run() -> None:
            if future.cancelled():
                return
            try:
                result = job()
            except Exception as error:  # the edge of the thread; raised where it is awaited
                logger.debug("a job of the model failed", exc_info=True)
                caught = error
                tell(lambda: future.set_exception(caught))
            else:
                tell(lambda: future.set_result(result))

        self._jobs.put(run)
        return future

    def stop(self, *, seconds: float) -> bool:
        """End the thread behind its last job; whether it ended within this time."""
        if not self._thread.is_alive():
            return True
        self._jobs.put(None)
        self._thread.join(seconds)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()

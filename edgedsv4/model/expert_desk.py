"""A thread that brings experts to a GPU's stream, which waits for them in the middle of a step.

The stream's function finds an expert's record empty, and asks at a desk (`host_desk.c`). Whoever
serves does the whole job in the thread of the desk, and the stream goes on.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

from edgedsv4.errors import CapacityError
from edgedsv4.kernels.native.library import library

_LOOK_MS = 500
"""How long a look for an order takes at most, after which the server may be gone."""


class ExpertDesk:
    """Serves orders until it is closed, or whoever serves is gone.

    Args:
        serve: a bound method; given a job (`dk_host_job *`), does it or refuses it, and raises
            nothing. Kept by a weak reference.

    Raises:
        CapacityError: no memory.
    """

    def __init__(self, serve: Callable[[Any], None]) -> None:
        lib, ffi = library()
        made = lib.dk_desk_new()
        if made == ffi.NULL:
            raise CapacityError("a desk for experts", needed_bytes=1, available_bytes=0)
        self.cdata = ffi.gc(made, lib.dk_desk_free)
        """For jobs; whoever has them keeps this object."""
        self._thread = threading.Thread(
            target=_work,
            args=(self.cdata, weakref.WeakMethod(serve)),
            name="dsv4-experts",
            daemon=True,
        )
        self._thread.start()

    def close(self) -> None:
        """Refuse what is waited for, and whatever comes later, and end the thread."""
        lib, _ = library()
        lib.dk_desk_close(self.cdata)
        self._thread.join()


def _work(desk: Any, serve: weakref.WeakMethod[Callable[[Any], None]]) -> None:
    lib, ffi = library()
    while not lib.dk_desk_is_closed(desk):
        job = lib.dk_desk_next(desk, _LOOK_MS)
        server = serve()
        if job != ffi.NULL:
            try:
                if server is None:
                    lib.dk_host_refuse(job, -1)
                else:
                    server(job)
            finally:
                lib.dk_desk_done(desk)  # whatever happens, or the stream waits for ever
        elif server is None:
            break
        del server
    lib.dk_desk_close(desk)

"""Long calls: how they report, and how a cancel object or a callback stops them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from edgedsv4 import CancelledError, ConfigError
from edgedsv4.capi.bridge import ffi, lib
from edgedsv4.capi.values import read_struct, word

if TYPE_CHECKING:
    from edgedsv4 import Session

_NONE = ffi.new("dsv4_call *")
_NONE.struct_size = ffi.sizeof("dsv4_call")


class Call:
    """What the caller of a long call handed over.

    Args:
        pointer: a `dsv4_call *`, or NULL.

    Raises:
        ConfigError: a cancel object that was freed.
    """

    def __init__(self, pointer: Any) -> None:
        self._record = read_struct(pointer, "dsv4_call", _NONE) if pointer else _NONE
        self._has_stopped = False
        if self._record.cancel and lib.entry_is_cancelled(self._record.cancel) < 0:
            raise ConfigError(
                "call.cancel was freed before, or is no cancel object", name="call.cancel"
            )

    def is_cancelled(self) -> bool:
        """Whether the work is to stop; cheap."""
        cancel = self._record.cancel
        return self._has_stopped or (bool(cancel) and lib.entry_is_cancelled(cancel) == 1)

    def check(self) -> None:
        """Raise `CancelledError` when the work is to stop."""
        if self.is_cancelled():
            raise CancelledError("cancelled by the caller")

    def progress(self, what: str) -> Callable[[int, int], None]:
        """A callback for (done, total) of one kind of work."""

        def tell(done: int, total: int) -> None:
            self.tell(what, done, total)

        return tell

    def tell(self, what: str, done: int, total: int) -> None:
        """Report; raises `CancelledError` when the callback or the cancel object says so."""
        record = self._record
        if record.progress and lib.entry_progress(
            record.progress, record.user, word(what), done, total
        ):
            self._has_stopped = True
        self.check()

    @contextmanager
    def on(self, session: Session) -> Iterator[None]:
        """Let the cancel object stop what the session does inside."""
        if not self._record.cancel:
            yield
            return
        with session.stopping_when(self.is_cancelled):
            yield

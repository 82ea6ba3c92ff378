"""Opt-in guard against the one crash a mapping can cause: a file that is shortened while open.

Touching a mapped page past the new end of the file raises SIGBUS, which ends the process. With the
guard installed, the page is replaced by zeros, a flag is set, and the code that was reading goes
on; whoever owns the mapping looks at the flag after the step and raises `FormatError`. Signals that
do not belong to a registered mapping go where they went before. Only the application may decide to
install a process-wide handler, hence opt-in.
"""

from __future__ import annotations

import importlib
import threading
from typing import Protocol, cast

from edgedsv4.errors import BackendUnavailableError

_MODULE = "edgedsv4.formats.native._sigbus"


class _Library(Protocol):
    """The functions of `native/sigbus.h`."""

    def dsv4_sigbus_install(self) -> int: ...
    def dsv4_sigbus_uninstall(self) -> int: ...
    def dsv4_sigbus_register(self, address: int, nbytes: int) -> int: ...
    def dsv4_sigbus_unregister(self, slot: int) -> None: ...
    def dsv4_sigbus_tripped(self, slot: int) -> int: ...
    def dsv4_sigbus_any_tripped(self) -> int: ...


class _State:
    """What the process knows about the guard; changed only under `lock`."""

    lock = threading.RLock()
    library: _Library | None = None
    installed = False


def _load() -> _Library:
    if _State.library is None:
        try:
            # Imported here: the extension is optional, and built separately.
            module = importlib.import_module(_MODULE)
        except ImportError as error:
            raise BackendUnavailableError(
                "the SIGBUS guard is not built: `pip install -e .` builds it"
                f" with a C compiler, or open without it ({error})"
            ) from error
        _State.library = cast("_Library", module.lib)
    return _State.library


def install_guard() -> None:
    """Install the handler for this process; files opened from now on are guarded.

    A second call changes nothing.

    Raises:
        BackendUnavailableError: if the C part is not built, or the system refuses the handler.
    """
    with _State.lock:
        if _State.installed:
            return
        code = _load().dsv4_sigbus_install()
        if code != 0:
            raise BackendUnavailableError(f"the system refused a SIGBUS handler (errno {code})")
        _State.installed = True


def uninstall_guard() -> None:
    """Put the previous handler back. Files that are still mapped are no longer guarded.

    If another handler was installed on top meanwhile, ours stays in its chain and only passes
    signals on.
    """
    with _State.lock:
        if _State.installed:
            _load().dsv4_sigbus_uninstall()
            _State.installed = False


def is_installed() -> bool:
    """Whether files opened now will be guarded."""
    return _State.installed


def register(address: int, nbytes: int) -> int | None:
    """Guard a mapping.

    Args:
        address: first byte of the mapping.
        nbytes: its length; the guard covers whole pages.

    Returns:
        a slot for `unregister` and `tripped`, or None while no guard is installed.

    Raises:
        BackendUnavailableError: if the table of mappings is full.
    """
    with _State.lock:
        if not _State.installed:
            return None
        slot = _load().dsv4_sigbus_register(address, nbytes)
    if slot < 0:
        raise BackendUnavailableError(
            f"the SIGBUS guard holds at most {-slot:,} files at a time; open without it"
        )
    return slot


def unregister(slot: int) -> None:
    """Stop guarding a mapping; to be called before its addresses are unmapped."""
    with _State.lock:
        _load().dsv4_sigbus_unregister(slot)


def tripped(slot: int | None = None) -> bool:
    """Whether zeros had to stand in for bytes that were gone.

    Args:
        slot: one mapping, or None for any mapping that is registered now.
    """
    library = _State.library
    if library is None:
        return False
    if slot is None:
        return library.dsv4_sigbus_any_tripped() != 0
    return library.dsv4_sigbus_tripped(slot) != 0

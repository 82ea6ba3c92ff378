"""Functions of the header about the state of a session: save, load, inspect."""

from __future__ import annotations

from typing import Any

from edgedsv4 import inspect_snapshot
from edgedsv4.capi.bridge import exported, ffi
from edgedsv4.capi.calls import Call
from edgedsv4.capi.session import session_of
from edgedsv4.capi.values import bounded, path_of, put_bytes, put_json, required


@exported
def dsv4_session_save(session: Any, path: Any, call: Any) -> int:
    """`Session.save`."""
    own, watched = session_of(session), Call(call)
    with watched.on(own):
        own.save(path_of(path), on_progress=watched.progress("save"))
    return 0


@exported
def dsv4_session_load(session: Any, path: Any, call: Any) -> int:
    """`Session.load`."""
    own, watched = session_of(session), Call(call)
    with watched.on(own):
        own.load(path_of(path), on_progress=watched.progress("load"))
    return 0


@exported
def dsv4_session_save_memory(session: Any, call: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`Session.save_bytes`."""
    own, watched = session_of(session), Call(call)
    with watched.on(own):
        state = own.save_bytes(on_progress=watched.progress("save"))
    return put_bytes(state, buffer, capacity, size)


@exported
def dsv4_session_load_memory(session: Any, state: Any, size: int, call: Any) -> int:
    """`Session.load` from memory."""
    own, watched = session_of(session), Call(call)
    data = memoryview(ffi.buffer(required(state, "state"), bounded(size, "size")))
    with watched.on(own):
        own.load(data, on_progress=watched.progress("load"))
    return 0


@exported
def dsv4_snapshot_inspect_json(path: Any, buffer: Any, capacity: int, size: Any) -> int:
    """`inspect_snapshot`."""
    return put_json(inspect_snapshot(path_of(path)).to_json(), buffer, capacity, size)

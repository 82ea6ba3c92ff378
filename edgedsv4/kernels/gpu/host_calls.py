"""C functions that a GPU's stream calls on the host, also from inside a captured graph.

CUDA and HIP call a function from a thread of their own when everything before it in the stream is
done, and go on when it returns; captured, the call becomes a node of the graph. The library is the
one that torch has loaded already, found among the mapped files of the process. A function must not
call the GPU's runtime, and nobody reports what goes wrong inside, so it has to leave a note.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from pathlib import Path

import torch

from edgedsv4.errors import DeviceLostError

_MAPS = Path("/proc/self/maps")
# The runtime's library, its function, and the name under which the loader finds it.
_CUDA = (re.compile(r"libcuda\.so"), "cuLaunchHostFunc", "libcuda.so.1")
_HIP = (re.compile(r"libamdhip64\.so"), "hipLaunchHostFunc", "libamdhip64.so")


class HostCalls:
    """Puts calls of C functions into streams.

    Args:
        launch: `cuLaunchHostFunc` or `hipLaunchHostFunc`: (stream, function, data) -> status.
        name: of it, for messages.
    """

    def __init__(self, launch: Callable[[int, int, int], int], name: str) -> None:
        self._launch = launch
        self._name = name

    def launch(self, stream: int, function: int, data: int) -> None:
        """Let a stream call function(data); it is called as often as the stream comes by.

        Args:
            stream: handle, as `torch.cuda.Stream.cuda_stream` gives it.
            function: address of a `void (*)(void *)`.
            data: address of its argument, which must stay as long as the stream may call.

        Raises:
            DeviceLostError: the runtime refused.
        """
        status = self._launch(stream, function, data)
        if status:
            raise DeviceLostError(f"{self._name} failed with status {status}")


def host_calls(device: torch.device) -> HostCalls | None:
    """What lets streams of a device call host functions; None where nothing does."""
    if device.type != "cuda":
        return None
    pattern, name, soname = _CUDA if torch.version.hip is None else _HIP
    library = _loaded(pattern, soname)
    if library is None or not hasattr(library, name):
        return None
    launch = getattr(library, name)
    launch.restype = ctypes.c_int
    launch.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)
    return HostCalls(launch, name)


def _loaded(pattern: re.Pattern[str], soname: str) -> ctypes.CDLL | None:
    """A library of the process by its file name."""
    for path in (*_mapped_files(pattern), soname):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    return None


def _mapped_files(pattern: re.Pattern[str]) -> tuple[str, ...]:
    """Mapped files whose name begins so, each once."""
    try:
        lines = _MAPS.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return ()
    paths = (line.partition("/")[2] for line in lines)
    found = (f"/{path}" for path in paths if pattern.match(path.rpartition("/")[2]))
    return tuple(dict.fromkeys(found))

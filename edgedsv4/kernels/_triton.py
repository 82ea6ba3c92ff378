"""Triton where it is installed, and a stand-in that says so where it is not.

Every module with Triton kernels imports `triton` and `tl` from here, so that it can be imported on
a machine without Triton; a launch then raises `BackendUnavailableError`.
"""

from __future__ import annotations

import importlib.util
import warnings
from typing import TYPE_CHECKING, Any

from edgedsv4.errors import BackendUnavailableError

HAVE_TRITON = importlib.util.find_spec("triton") is not None
"""Whether kernels can be compiled here."""

if TYPE_CHECKING:
    triton: Any
    tl: Any
elif HAVE_TRITON:
    import triton
    import triton.language as tl

    # Triton 3.9 says that 3.10 will change a default; no release that the extra `gpu` admits does.
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION is unset")
else:

    class _Missing:
        """Stands where Triton would: any name of it, any decorator; a launch raises."""

        def __getattr__(self, name: str) -> _Missing:
            return self

        def __call__(self, *arguments: Any, **_: Any) -> Any:
            return arguments[0] if arguments and callable(arguments[0]) else self

        @staticmethod
        def next_power_of_2(n: int) -> int:
            return 1 << max(n - 1, 0).bit_length()

        @staticmethod
        def cdiv(x: int, y: int) -> int:
            return -(-x // y)

        def jit(self, *functions: Any, **_: Any) -> Any:
            return _Kernel(functions[0]) if functions else _Kernel

    class _Kernel:
        """A kernel that cannot be launched."""

        def __init__(self, function: Any) -> None:
            self.fn = function

        def __getitem__(self, grid: Any) -> Any:
            raise BackendUnavailableError("Triton is not installed; install the extra `gpu`")

    triton = tl = _Missing()

IS_INTERPRETED: bool = bool(HAVE_TRITON and triton.knobs.runtime.interpret)
"""Whether kernels run as Python on CPU tensors: how tests check values without a GPU."""

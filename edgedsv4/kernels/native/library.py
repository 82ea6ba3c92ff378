"""The compiled kernels as Python sees them: whether they are there, and how tensors are passed.

Nothing here computes. Pointers borrow: whoever makes a record keeps its tensors alive until the
call is over, except where a function says that the record does it.
"""

from __future__ import annotations

import importlib
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgedsv4.errors import BackendUnavailableError, CancelledError, ShapeError

if TYPE_CHECKING:
    from edgedsv4.kernels.dispatch import Implementation
    from edgedsv4.kernels.quant_matmul import QuantMatrix

ffi: Any = None
lib: Any = None
try:
    # Built by cffi; a checkout that was never built, or has no C compiler, works without it. By
    # name, since import-linter takes a module that it cannot see for the package itself.
    _extension = importlib.import_module("edgedsv4.kernels.native._kernels")
except ImportError as _error:
    _reason = (
        f"the C kernels are not built ({_error}); `pip install -e .` with a C compiler does it"
    )
else:
    _reason = ""
    ffi, lib = _extension.ffi, _extension.lib

HAVE_NATIVE: bool = lib is not None
"""Whether the C kernels can be called."""

WHY_NOT: str = _reason
"""Why they cannot, for a message; empty when they can."""

_REFERENCE: tuple[Implementation, ...] = ("reference",)
_BOTH: tuple[Implementation, ...] = ("native", "reference")

_C_TYPES = {
    torch.float32: "float *",
    torch.int8: "int8_t *",
    torch.uint8: "uint8_t *",
    torch.int32: "int32_t *",
    torch.int64: "int64_t *",
}
_TENSOR_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_NAMES = {dtype: name for name, dtype in _TENSOR_TYPES.items()}


def available_on(*tensors: Tensor | None) -> tuple[Implementation, ...]:
    """What can run on these tensors, the best first, for `resolve_backend`.

    The C kernels take float32 in the memory of the CPU and compute no gradients; a None is an
    argument that was left out.
    """
    fits = HAVE_NATIVE and all(tensor is None or _is_plain(tensor) for tensor in tensors)
    return _BOTH if fits else _REFERENCE


def _is_plain(tensor: Tensor) -> bool:
    needs_gradient = tensor.requires_grad and torch.is_grad_enabled()
    return tensor.device.type == "cpu" and tensor.dtype == torch.float32 and not needs_gradient


def library() -> tuple[Any, Any]:
    """`lib` and `ffi` of the extension.

    Raises:
        BackendUnavailableError: if it is not built.
    """
    if not HAVE_NATIVE:
        raise BackendUnavailableError(WHY_NOT)
    return lib, ffi


def pointer(tensor: Tensor | None, c_type: str | None = None) -> Any:
    """Address of a contiguous tensor, as `c_type` or what fits its dtype; NULL for None.

    The tensor must outlive every use of the pointer.

    Raises:
        ShapeError: if the tensor is not contiguous.
    """
    if tensor is None:
        return ffi.NULL
    if not tensor.is_contiguous():
        raise ShapeError(f"a kernel needs contiguous memory, found strides {tensor.stride()}")
    return ffi.cast(c_type or _C_TYPES[tensor.dtype], tensor.data_ptr())


# ---- instruction sets ----

_MOST_LEVELS = 64


@dataclass(frozen=True, slots=True)
class InstructionSet:
    """CPU instructions that the kernels have variants for."""

    level: int
    """Number, as `dk_set_isa` takes it."""
    name: str
    """For the user."""


def instruction_sets() -> tuple[InstructionSet, ...]:
    """Those of this machine, plain C first; while no kernel runs.

    Raises:
        BackendUnavailableError: if the kernels are not built.
    """
    library()
    before, found = lib.dk_isa(), []
    try:
        for level in range(_MOST_LEVELS):
            name = lib.dk_isa_name(level)
            if name != ffi.NULL and lib.dk_set_isa(level) == 0:
                found.append(InstructionSet(level, ffi.string(name).decode()))
    finally:
        lib.dk_set_isa(before)
    return tuple(found)


@contextmanager
def using_instruction_set(instructions: InstructionSet) -> Iterator[None]:
    """Let all kernels of the process use these instructions in the block; while none runs.

    Raises:
        BackendUnavailableError: if this machine lacks them, or the kernels are not built.
    """
    library()
    before = lib.dk_isa()
    try:
        if lib.dk_set_isa(instructions.level):
            raise BackendUnavailableError(f"this machine has no {instructions.name}")
        yield
    finally:
        lib.dk_set_isa(before)


# ---- stored matrices ----

_KEPT: weakref.WeakKeyDictionary[Any, tuple[Tensor | None, ...]] = weakref.WeakKeyDictionary()


def has_native_type(name: str) -> bool:
    """Whether the C kernels can read a block type."""
    return HAVE_NATIVE and lib.dk_type_id(name.encode()) >= 0


def matrix_of(weight: QuantMatrix | Tensor) -> Any:
    """A stored matrix as a new `dk_matrix *`, which keeps the tensors alive.

    Args:
        weight: the matrix as stored, or a tensor [rows, columns] of float32, float16 or bfloat16.

    Raises:
        ShapeError: if the elements of a row do not lie side by side.
        BackendUnavailableError: if the kernels are not built, or lack the type.
    """
    library()
    matrix = ffi.new("dk_matrix *")
    fill_matrix(matrix, weight)
    scale = None if isinstance(weight, Tensor) else weight.scale
    _KEPT[matrix] = (weight if isinstance(weight, Tensor) else weight.data, scale)
    return matrix


def fill_matrix(matrix: Any, weight: QuantMatrix | Tensor) -> None:
    """Describe a stored matrix in a `dk_matrix`, which does not keep the tensors alive.

    Raises:
        ShapeError, BackendUnavailableError: as `matrix_of`.
    """
    if isinstance(weight, Tensor):
        name, data = _NAMES.get(weight.dtype, str(weight.dtype)), weight
        rows, columns = weight.shape
    else:
        name, data = weight.block_type.name, weight.data
        rows, columns = weight.rows, weight.columns
    kind = lib.dk_type_id(name.encode())
    if kind < 0 or name == "F4":  # which has no scales, as products expect of 4-bit floats
        raise BackendUnavailableError(f"the C kernels cannot read weights of type {name}")
    if data.device.type != "cpu":
        raise BackendUnavailableError(f"the C kernels cannot read weights on {data.device}")
    matrix.type = kind
    matrix.data = _address(data)
    matrix.rows = rows
    matrix.columns = columns
    matrix.row_bytes = data.stride(0) * data.element_size()
    matrix.factor = 1.0
    matrix.scale = ffi.NULL
    matrix.scale_height = matrix.scale_width = 1
    if isinstance(weight, Tensor):
        return
    matrix.factor = weight.tensor_scale
    if weight.scale is not None:
        matrix.scale = _address(weight.scale)
        matrix.scale_stride = weight.scale.stride(0)
        matrix.scale_height, matrix.scale_width = weight.scale_block


def _address(data: Tensor) -> Any:
    if data.shape[1] > 1 and data.stride(1) != 1:
        raise ShapeError(f"the elements of a row must lie side by side, strides {data.stride()}")
    return ffi.cast("uint8_t *", data.data_ptr())


# ---- runs ----


class NativeRun:
    """How kernels are run: threads, and who may stop them. For one calling thread at a time."""

    def __init__(
        self,
        threads: int = 1,
        *,
        is_pinned: bool = False,
        should_stop: Callable[[], bool] | None = None,
    ) -> None:
        """Make a run.

        Args:
            threads: that may work, the caller included, >= 1.
            is_pinned: each worker stays on one CPU.
            should_stop: asked every 20 ms while kernels work; True stops them. Without it only
                Ctrl+C does.

        Raises:
            BackendUnavailableError: if the kernels are not built.
        """
        library()
        self.should_stop = should_stop
        self.cdata = ffi.new("dk_run *")
        # The handle must not keep the run alive, or neither would ever go.
        self._handle = ffi.new_handle(weakref.ref(self))
        self.cdata.threads = threads
        self.cdata.is_pinned = is_pinned
        self.cdata.poll = lib.dk_ask_python
        self.cdata.poll_data = self._handle

    def check(self, status: int) -> None:
        """Judge what a kernel returned; after an error the run can be used again.

        Raises:
            CancelledError: if `should_stop` said so.
            BaseException: whatever `should_stop` or a signal handler raised, Ctrl+C included.
        """
        if status == 0:
            return
        self.cdata.stop = 0
        self.cdata.last_poll_ns = 0
        raised = getattr(_ASKED, "raised", None)
        if raised is not None:
            _ASKED.raised = None
            raise raised
        raise CancelledError("cancelled; the session stands at its last complete token")


def new_run(
    threads: int = 1,
    *,
    is_pinned: bool = False,
    should_stop: Callable[[], bool] | None = None,
) -> NativeRun:
    """A `NativeRun`."""
    return NativeRun(threads, is_pinned=is_pinned, should_stop=should_stop)


def run_here() -> NativeRun:
    """The calling thread's own run, with torch's number of threads, for operations called alone."""
    run: NativeRun | None = getattr(_ASKED, "run", None)
    if run is None:
        run = _ASKED.run = NativeRun()
    run.cdata.threads = torch.get_num_threads()
    return run


_ASKED = threading.local()
"""What the calling thread's own poll raised, and its run."""


def _ask(data: Any) -> bool:
    run: NativeRun | None = ffi.from_handle(data)()
    return run is not None and run.should_stop is not None and run.should_stop()


def _keep(_kind: type[BaseException], raised: BaseException, _trace: TracebackType | None) -> None:
    """Called by cffi when `_ask` raised: C code cannot pass it on, `NativeRun.check` does."""
    _ASKED.raised = raised


if HAVE_NATIVE:
    ffi.def_extern(name="dk_ask_python", error=1, onerror=_keep)(_ask)

"""Launches of kernels without the cost of finding the compiled one again.

Triton derives from the arguments of every launch for what it has to compile, in Python, which takes
longer than most kernels of a short chunk run. `launch` keeps the compiled kernel under a key that
tells at least as much apart as Triton does on NVIDIA's cards (constants and options by value; of
tensors the type and whether they are aligned to 16 bytes; of integers the width, whether they are
1, and whether 16 divides them) and then calls it directly. Elsewhere, and in the interpreter,
every launch goes through Triton.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from edgedsv4.kernels._triton import IS_INTERPRETED

_INT32 = 1 << 31
_compiled: dict[tuple[Any, ...], Any] = {}
_known: dict[int, tuple[Any, dict[str, bool]]] = {}


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, **named: Any) -> None:
    """Launch `kernel[grid](*arguments, **named)`.

    Args:
        kernel: a function decorated with `triton.jit`.
        grid: one to three numbers of programs.
        arguments: of the kernel, in order.
        named: the rest of them, and options of the launch.
    """
    values = _values(kernel, arguments, named)
    if values is None:
        kernel[grid](*arguments, **named)
        return
    key = (id(kernel), values[0], *map(_specialized, values[1]), *values[2])
    found = _compiled.get(key)
    if found is None:
        found = kernel[grid](*arguments, **named)
        if found is not None:  # nothing where launches are only recorded
            _compiled[key] = found
        return
    found[(*grid, 1, 1)[:3]](*values[3])


def cdiv(dividend: int, divisor: int) -> int:
    """The quotient of positive numbers, rounded up; Triton's own is slow outside of kernels."""
    return -(-dividend // divisor)


def power_of_two(number: int) -> int:
    """The least power of two that is not below a number."""
    return 1 << max(0, number - 1).bit_length()


def _values(
    kernel: Any, arguments: tuple[Any, ...], named: dict[str, Any]
) -> tuple[int, list[Any], list[Any], list[Any]] | None:
    """Device, run-time values, constants and options, and all values in order; None elsewhere."""
    if IS_INTERPRETED or torch.version.hip is not None:
        return None
    parameters = _parameters(kernel)
    ordered = list(arguments)
    for name in list(parameters)[len(arguments) :]:
        if name not in named:  # a default value
            return None
        ordered.append(named[name])
    if not ordered[0].is_cuda:
        return None
    runtime: list[Any] = []
    constants: list[Any] = []
    for is_constant, value in zip(parameters.values(), ordered, strict=True):
        (constants if is_constant else runtime).append(value)
    constants += [item for item in named.items() if item[0] not in parameters]
    return ordered[0].get_device(), runtime, constants, ordered


def _parameters(kernel: Any) -> dict[str, bool]:
    """Names of a kernel's parameters in order, and which are constants."""
    found = _known.get(id(kernel))
    if found is None:
        names = {parameter.name: parameter.is_constexpr for parameter in kernel.params}
        found = _known[id(kernel)] = (kernel, names)  # kept, so that the id stays its own
    return found[1]


def _specialized(value: Any) -> Any:
    """What Triton compiles a run-time value for, or more."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() & 15 == 0
    if type(value) is int:
        is_wide = not -_INT32 <= value < _INT32
        return is_wide and (value >= 1 << 63) + 1, value == 1, value & 15 == 0
    return type(value)

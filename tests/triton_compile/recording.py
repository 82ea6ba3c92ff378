"""Kernel launches as data: what Triton would compile for a launcher's call, on any target.

Triton itself derives types, constants and divisibility from the arguments; only the driver below it
is replaced, by one that names the target, and the step that would compile; and torch says that it
is built for AMD's cards where the target is one. Arguments are tensors of the device `meta`, which
have addresses' alignment and no memory.
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

from edgedsv4.kernels.gpu.targets import TARGETS

OPTIONS = (
    "num_warps",
    "num_stages",
    "num_ctas",
    "maxnreg",
    "enable_fp_fusion",
    "waves_per_eu",
    "matrix_instr_nonkdim",
    "kpack",
)
"""Options of a launch that change the code."""


@dataclass(frozen=True, eq=False)
class Launch:
    """One compiled variant of a kernel."""

    kernel: triton.JITFunction
    target: str
    """A name of `TARGETS`."""
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        """Module and kernel: `matvec._matvec_kernel`."""
        return f"{self.kernel.__module__.rsplit('.', 1)[-1]}.{self.kernel.fn.__name__}"

    @property
    def digest(self) -> str:
        """Changes when the code of the kernel, or how it is specialised, does."""
        names = list(self.signature)
        parts = {
            "source": source_digest(self.kernel),
            "signature": self.signature,
            "constants": {names[path[0]]: _text(value) for path, value in self.constants.items()},
            "attributes": {names[path[0]]: repr(value) for path, value in self.attributes.items()},
            "options": {name: repr(self.options.get(name)) for name in OPTIONS},
        }
        text = json.dumps(parts, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


class _Driver:
    """Stands where a GPU's driver would; the target's name is the device."""

    def __init__(self, target: str) -> None:
        self._target = target

    def get_current_target(self) -> GPUTarget:
        target = TARGETS[self._target]
        return GPUTarget(target.backend, target.arch, target.warp_size)

    def get_current_device(self) -> str:
        return self._target

    def get_current_stream(self, _: str) -> int:
        return 0


@contextmanager
def recording(target: str) -> Iterator[list[Launch]]:
    """Collect every launch of the block instead of running it.

    Args:
        target: for which device the launches are, a name of `TARGETS`.
    """
    launches: list[Launch] = []

    def keep(kernel: triton.JITFunction, *compiled: Any) -> None:
        _, signature, _, constants, options, attributes, _ = compiled
        launches.append(
            Launch(kernel, target, signature, constants, attributes, dict(vars(options)))
        )

    is_amd = TARGETS[target].backend == "hip"
    with (
        patch.object(torch.version, "hip", "7.0" if is_amd else None),
        patch.object(driver, "_active", _Driver(target)),
        patch.object(triton.JITFunction, "_do_compile", keep),
    ):
        yield launches


def record(target: str, call: Callable[[], object]) -> list[Launch]:
    """The launches that one call of a launcher makes."""
    with recording(target) as launches:
        call()
    return launches


def _text(constant: object) -> str:
    is_kernel = isinstance(constant, triton.JITFunction)
    return source_digest(constant) if is_kernel else repr(constant)


@cache
def source_digest(kernel: triton.JITFunction) -> str:
    """Hash of a kernel's code and all code and constants that it refers to, not of comments."""
    hasher, waiting, seen = hashlib.sha256(), [kernel], {id(kernel)}
    while waiting:
        function = waiting.pop()
        tree = ast.parse(function.src)
        _drop_docstrings(tree)
        hasher.update(ast.unparse(tree).encode())
        for name, value in sorted(_references(tree, function.fn.__globals__), key=lambda p: p[0]):
            if not isinstance(value, triton.JITFunction):
                hasher.update(f"{name}={value!r}".encode())
            elif id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)
    return hasher.hexdigest()


def _references(tree: ast.AST, scope: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Names of the kernel's module that the kernel uses: other kernels, and constants."""
    constants = (int, float, str, tuple, triton.language.constexpr)
    for name in {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}:
        if isinstance(scope.get(name), (triton.JITFunction, *constants)):
            yield name, scope[name]


def _drop_docstrings(tree: ast.AST) -> None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]

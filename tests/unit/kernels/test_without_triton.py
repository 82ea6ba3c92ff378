"""Without Triton everything can be imported and computed; only a launch of a kernel is refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import edgedsv4.kernels.gpu
from edgedsv4.kernels._triton import HAVE_TRITON, triton

KERNELS = Path(edgedsv4.kernels.gpu.__file__).parent
MODEL = Path(edgedsv4.__file__).parent / "model"
MODULES = [
    f"edgedsv4.{path.parent.parent.name + '.' if path.parent.name == 'gpu' else ''}"
    f"{path.parent.name}.{path.stem}"
    for path in sorted((*KERNELS.glob("*.py"), *MODEL.glob("*.py")))
    if path.stem != "__init__"
]
WITHOUT = """
import sys
sys.modules["triton"] = None  # as if it were not installed
from edgedsv4.kernels._triton import HAVE_TRITON
assert not HAVE_TRITON
"""


def run_without_triton(program: str) -> str:
    """What a program prints in a process of its own."""
    command = [sys.executable, "-W", "error::ImportWarning", "-c", WITHOUT + program]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_module_of_kernels_imports() -> None:
    assert "edgedsv4.kernels.gpu.targets" in MODULES
    imports = "\n".join(f"import {name}" for name in MODULES)
    assert run_without_triton(f"{imports}\nprint('imported')") == "imported\n"


def test_the_shipped_model_answers() -> None:
    program = """
from edgedsv4 import Engine, EngineOptions
with Engine.open("random-tiny", EngineOptions(context=64)) as engine:
    with engine.new_session() as session:
        session.evaluate([3, 4, 5])
        print(session.length)
"""
    assert run_without_triton(program) == "3\n"


def test_a_launch_says_what_is_missing() -> None:
    program = """
import torch
from edgedsv4.errors import BackendUnavailableError
from edgedsv4.kernels._triton import tl, triton

@triton.jit
def plain(x_ptr, SIZE: tl.constexpr):
    tl.store(x_ptr, SIZE)

@triton.jit(do_not_specialize=["count"])
def given(x_ptr, count):
    tl.store(x_ptr, count)

for kernel in (plain, given):
    try:
        kernel[(triton.cdiv(5, 4),)](torch.zeros(4), triton.next_power_of_2(5))
    except BackendUnavailableError as error:
        print(error)
"""
    assert (
        run_without_triton(program).splitlines()
        == ["Triton is not installed; install the extra `gpu`"] * 2
    )


def test_a_named_backend_is_refused() -> None:
    program = """
from edgedsv4 import Engine, EngineOptions
from edgedsv4.errors import BackendUnavailableError
try:
    Engine.open("random-tiny", EngineOptions(backend="triton"))
except BackendUnavailableError as error:
    print(error)
"""
    assert "backend 'triton' cannot run here" in run_without_triton(program)


def test_stand_ins_count_as_triton_does() -> None:
    program = """
from edgedsv4.kernels._triton import triton
print([(triton.next_power_of_2(n), triton.cdiv(n, 4)) for n in (1, 2, 3, 64, 65)])
"""
    expected = [(1, 1), (2, 1), (4, 1), (64, 16), (128, 17)]
    assert run_without_triton(program) == f"{expected}\n"
    if HAVE_TRITON:
        sizes = (1, 2, 3, 64, 65)
        assert expected == [(triton.next_power_of_2(n), triton.cdiv(n, 4)) for n in sizes]

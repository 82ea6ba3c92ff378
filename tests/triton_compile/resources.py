"""What a compiled kernel takes of a multiprocessor, read from its binary: no driver is needed."""

from __future__ import annotations

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from recording import Launch
from triton.backends import nvidia
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from edgedsv4.kernels.gpu.targets import TARGETS

CUOBJDUMP = Path(nvidia.__file__).parent / "bin" / "cuobjdump"


@dataclass(frozen=True)
class Resources:
    """Of one program, and of one thread."""

    shared: int
    """Bytes of shared memory."""
    registers: int
    spilled: int
    """Bytes of registers that a thread keeps in memory."""

    def faults(self, target: str) -> list[str]:
        """What is wrong with a kernel that takes this much."""
        limit, found = TARGETS[target].shared_bytes, []
        if self.shared > limit:
            found.append(f"{self.shared} bytes of shared memory, {limit} are there")
        if self.spilled:
            found.append(f"{self.spilled} bytes of registers are spilled")
        return found


def compile_launch(launch: Launch) -> triton.compiler.CompiledKernel:
    """Make the binary that the launch would make on its target."""
    target = TARGETS[launch.target]
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.attributes)
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    return triton.compile(source, target=gpu, options=launch.options)


def resources(kernel: triton.compiler.CompiledKernel) -> Resources:
    """Read the figures of a compiled kernel."""
    shared = kernel.metadata.shared
    if "cubin" in kernel.asm:
        text = _usage(kernel.asm["cubin"])
        frame, local = (int(re.search(rf"{name}:(\d+)", text)[1]) for name in ("STACK", "LOCAL"))
        return Resources(shared, int(re.search(r"REG:(\d+)", text)[1]), frame + local)
    text = kernel.asm["amdgcn"]
    registers, spilled = (
        int(re.search(rf"\.{name}:\s+(\d+)", text)[1])
        for name in ("vgpr_count", "vgpr_spill_count")
    )
    return Resources(shared, registers, 4 * spilled)


def _usage(binary: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [CUOBJDUMP, "-res-usage", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

"""Where the kernels under test run: on the CPU by the interpreter, else on the GPU."""

from edgedsv4.kernels._triton import IS_INTERPRETED

DEVICE = "cpu" if IS_INTERPRETED else "cuda"

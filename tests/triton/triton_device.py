"""Where the kernels under test run: on the CPU by the interpreter, else on the GPU."""

import torch

from edgedsv4.kernels._triton import IS_INTERPRETED
from edgedsv4.kernels.gpu.expert_scaled import triton_release

DEVICE = "cpu" if IS_INTERPRETED else "cuda"


def has_scaled_products() -> bool:
    """Whether block-scaled products of routed experts run here.

    Asked while tests are collected, so also where there is no card. Cards without these products
    get them as products of bfloat16, with the same values; for Ada and older ones some releases of
    Triton make a program that their assembler refuses, and Triton 3.6 mixes bytes up.
    """
    if IS_INTERPRETED:
        return True
    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability()[0] >= 9 and triton_release() >= (3, 7)

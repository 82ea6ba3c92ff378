"""Reads of device memory that do nothing else: the rate that memory-bound kernels are held to."""

from __future__ import annotations

from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch

BLOCK = 8192
"""Words of one program: 32 KiB, all of them requested before the first is needed."""
_WARPS = 8


def read_all(out: Tensor, words: Tensor) -> None:
    """Read a tensor once.

    Args:
        out: int32 [1], changed when all words of a block are equal to its number, which random
            words are not; so the compiler cannot leave the reads out.
        words: int32 [n], n a multiple of `BLOCK`.
    """
    launch(_read_kernel, (words.numel() // BLOCK,), out, words, BLOCK=BLOCK, num_warps=_WARPS)


@triton.jit
def _read_kernel(out_ptr, words_ptr, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    b_words = tl.load(words_ptr + i * BLOCK + tl.arange(0, BLOCK))  # [BLOCK]
    total = tl.sum(b_words.to(tl.int32) ^ i.to(tl.int32), axis=0)
    if total == 0x5EED1234:
        tl.store(out_ptr, total)

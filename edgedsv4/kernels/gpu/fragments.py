"""The order in which products go over the columns of a tile of weights.

For every 16 columns of the left operand a matrix unit wants of each thread the columns 2c, 2c + 1,
2c + 8 and 2c + 9, where c is the thread's place among four. Packed weights come in words of
consecutive columns. As a sum may go over its terms in any order, a position of 128 stands for
another column: position 8 g + 2 c + b (g < 16, c < 4, b < 2) for column 32 c + 2 g + b. A thread's
32 weights are then consecutive, and stay in the registers in which they are decoded. Activations
are brought into this order ahead of the product; on other matrix units it does no harm.
"""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from edgedsv4.kernels._triton import IS_INTERPRETED, tl, triton
from edgedsv4.kernels.gpu.conversions import to_bf16
from edgedsv4.kernels.gpu.launching import cdiv, launch

# Rows of activations end with whole tiles of weights of every type.
_TILE = 256
_BLOCK = 1024


def matrix_unit() -> Literal["wgmma", "mma", "mfma", "wmma", "other"]:
    """Kind of matrix unit of the GPU that launches go to; the last two named are AMD's."""
    if IS_INTERPRETED:
        return "other"
    target = triton.runtime.driver.active.get_current_target()
    if target.backend == "hip":
        return "mfma" if target.arch.startswith("gfx9") else "wmma"
    if target.backend != "cuda":
        return "other"
    return "wgmma" if target.arch // 10 == 9 else "mma"


def padded(columns: int) -> int:
    """Width of rows in the order of positions."""
    return -(-columns // _TILE) * _TILE


def pack_activations(out: Tensor, x: Tensor) -> None:
    """Rows in the order of positions, with zeros for columns that there are not; one launch.

    Args:
        out: out, [T, padded(K)] f32 or bf16, contiguous; rows past those of `x` stay as they are.
        x: [T, K] f32 or bf16; rows may lie apart.
    """
    tokens, columns = x.shape
    grid = (tokens, cdiv(out.shape[1], _BLOCK))
    launch(
        _pack_kernel, grid, out, x, columns, out.shape[1], x.stride(0), BLOCK=_BLOCK, num_warps=4
    )


@triton.jit
def _pack_kernel(out_ptr, x_ptr, K, stride_out_row, stride_x_row, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    o_k = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + token * stride_x_row + o_k, mask=o_k < K, other=0.0).to(tl.float32)
    x = tl.reshape(in_positions(tl.reshape(x, (BLOCK, 1))), (BLOCK,))
    out_ptrs = out_ptr + token * stride_out_row + o_k
    if out_ptr.dtype.element_ty == tl.bfloat16:
        tl.store(out_ptrs, to_bf16(x), mask=o_k < stride_out_row)
    else:
        tl.store(out_ptrs, x, mask=o_k < stride_out_row)


@triton.jit
def in_positions(x):
    """Columns to positions along the first axis: [BK, BT]."""
    BK: tl.constexpr = x.shape[0]
    BT: tl.constexpr = x.shape[1]
    x = tl.permute(tl.reshape(x, (BK // 128, 4, 16, 2, BT)), (0, 2, 1, 3, 4))
    return tl.reshape(x, (BK, BT))


@triton.jit
def weights_in_positions(w):
    """Columns to positions along the last axis: [BR, BK]."""
    BR: tl.constexpr = w.shape[0]
    BK: tl.constexpr = w.shape[1]
    w = tl.permute(tl.reshape(w, (BR, BK // 128, 4, 16, 2)), (0, 1, 3, 2, 4))
    return tl.reshape(w, (BR, BK))


@triton.jit
def position_of(column):
    """Position of a column."""
    within = column % 128
    return column - within + 8 * ((within % 32) // 2) + 2 * (within // 32) + within % 2

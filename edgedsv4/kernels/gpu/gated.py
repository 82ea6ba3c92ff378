"""The gate of an expert's hidden layer, out = silu(min(a, limit)) clamp(b, -limit, limit).

Definition: `edgedsv4.kernels.swiglu`.
"""

from __future__ import annotations

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import cdiv, launch

BLOCK, WARPS = 256, 4


def gated(out: Tensor, both: Tensor, limit: float) -> None:
    """Combine the two products of one input.

    Args:
        out: f32 [T, F], set by the launch.
        both: f32 [T, 2 F], a beside b.
        limit: clamp; inf for none.

    Raises:
        ShapeError: if the shapes do not fit each other.
    """
    tokens, width = out.shape
    if both.shape != (tokens, 2 * width) or not (out.is_contiguous() and both.is_contiguous()):
        raise ShapeError(f"gated: out {list(out.shape)} of products {list(both.shape)}")
    launch(
        _gated_kernel,
        (cdiv(width, BLOCK), tokens),
        out,
        both,
        width,
        float(limit),
        BN=BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _gated_kernel(out_ptr, both_ptr, width, limit, BN: tl.constexpr):
    token = tl.program_id(1).to(tl.int64)
    o_n = tl.program_id(0) * BN + tl.arange(0, BN)
    m_n = o_n < width
    a = tl.load(both_ptr + token * 2 * width + o_n, mask=m_n, other=0.0)
    b = tl.load(both_ptr + (token * 2 + 1) * width + o_n, mask=m_n, other=0.0)
    # Comparisons instead of minima, which could swallow a NaN.
    a = tl.where(a > limit, limit, a)
    b = tl.where(b > limit, limit, tl.where(b < -limit, -limit, b))
    e = tl.exp(-tl.abs(a))
    out = a * tl.where(a < 0, e, 1.0) / (1.0 + e) * b
    tl.store(out_ptr + token * width + o_n, out, mask=m_n)

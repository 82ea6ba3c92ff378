"""Sum of the results of a token's experts, in the order of its places."""

from __future__ import annotations

from torch import Tensor

from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import cdiv, launch, power_of_two


def sum_places(out: Tensor, outputs: Tensor, ids: Tensor, weights: Tensor, slots: int) -> None:
    """The sums out[t] = sum_j weights[t, j] outputs[t k + j]; one launch.

    Args:
        out: out, [T, D] f32, contiguous.
        outputs: [T * k, D] f32 or bf16, contiguous.
        ids: slots, int32 [T, k]; a place with a slot outside of the bank adds nothing.
        weights: f32 [T, k].
        slots: slots of the bank.
    """
    tokens, hidden = out.shape
    columns = min(1024, power_of_two(hidden))
    launch(
        _sum_kernel,
        (tokens, cdiv(hidden, columns)),
        out,
        outputs,
        ids,
        weights,
        hidden,
        slots,
        K=ids.shape[1],
        BLOCK=columns,
        num_warps=4,
    )


@triton.jit
def _sum_kernel(
    out_ptr, outputs_ptr, ids_ptr, weights_ptr, D, slots, K: tl.constexpr, BLOCK: tl.constexpr
):
    """One token: the weighted results of its places, in their order."""
    token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    m_column = o_column < D
    total = tl.zeros([BLOCK], tl.float32)
    for place in tl.static_range(K):
        slot = tl.load(ids_ptr + token * K + place)
        weight = tl.load(weights_ptr + token * K + place)
        is_used = (slot >= 0) & (slot < slots)
        y = tl.load(
            outputs_ptr + (token * K + place) * D + o_column, mask=m_column & is_used, other=0.0
        )
        total += tl.where(is_used, weight, 0.0) * y.to(tl.float32)
    tl.store(out_ptr + token * D + o_column, total, mask=m_column)

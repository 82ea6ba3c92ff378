"""Of the experts of a token, those that are on the card.

With slot_j = table[id_j] the ones with slot_j >= 0 are moved to the front, in their order: slots
and weights, and how many. Behind them are zeros, so that the first slot is one of the bank in any
case. The others are computed elsewhere, by whoever looks into the same table. One launch.
"""

from __future__ import annotations

import torch
from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch, power_of_two


def split_experts(
    slots: Tensor, factors: Tensor, used: Tensor, ids: Tensor, weights: Tensor, table: Tensor
) -> None:
    """Choose what the card computes.

    Args:
        slots: int32 [k] out, places in the bank.
        factors: f32 [k] out, the weights that go with them.
        used: int32 [1] out, how many there are.
        ids: int32 [k], of the router.
        weights: f32 [k], of the router.
        table: int32 [E], place of each expert in the bank, negative for those that are not there.

    Raises:
        ShapeError: if shapes or types do not fit.
    """
    shapes = {tuple(tensor.shape) for tensor in (slots, factors, ids, weights)}
    whole = all(tensor.dtype == torch.int32 for tensor in (slots, used, ids, table))
    fits = len(shapes) == 1 and ids.dim() == 1 and used.numel() == 1 and table.dim() == 1
    if not (fits and whole and factors.dtype == weights.dtype == torch.float32):
        raise ShapeError(
            f"split_experts: slots, factors, ids and weights are {sorted(shapes)}, used"
            f" {list(used.shape)}, table {list(table.shape)}; int32 and f32 are needed"
        )
    k = len(ids)
    launch(
        _split_kernel,
        (1,),
        *(slots, factors, used, ids, weights, table),
        K=k,
        PADDED_K=power_of_two(k),
        num_warps=1,
    )


@triton.jit
def _split_kernel(
    slots_ptr,
    factors_ptr,
    used_ptr,
    ids_ptr,
    weights_ptr,
    table_ptr,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
):
    o_k = tl.arange(0, PADDED_K)  # [PADDED_K]
    m_k = o_k < K
    ids = tl.load(ids_ptr + o_k, mask=m_k, other=0)
    weights = tl.load(weights_ptr + o_k, mask=m_k, other=0.0)
    slot = tl.load(table_ptr + ids, mask=m_k, other=-1)
    is_here = slot >= 0
    # Each goes to the place that counts those before it.
    is_before = (o_k[None, :] < o_k[:, None]) & is_here[None, :]  # [own, other]
    place = tl.sum(is_before.to(tl.int32), axis=1)
    used = tl.sum(is_here.to(tl.int32), axis=0)
    tl.store(slots_ptr + place, slot, mask=is_here)
    tl.store(factors_ptr + place, weights, mask=is_here)
    tl.store(slots_ptr + o_k, 0, mask=m_k & (o_k >= used))
    tl.store(factors_ptr + o_k, 0.0, mask=m_k & (o_k >= used))
    tl.store(used_ptr, used)

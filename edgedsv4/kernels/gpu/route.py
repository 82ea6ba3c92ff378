"""Routing: scores p = sqrt(softplus(logits)), the k experts with the largest p + bias, weights.

Weights are p / (sum of the chosen p + guard) * scale. Equal p + bias go to the lower expert id, NaN
comes first as in the definition, so that it reaches the weights; ids are ascending, or in the order
of the hash table. The definition is `kernels/router.py`. One launch, a program per token.
"""

from __future__ import annotations

from torch import Tensor

from edgedsv4.errors import ShapeError
from edgedsv4.kernels._triton import tl, triton
from edgedsv4.kernels.gpu.launching import launch, power_of_two
from edgedsv4.kernels.gpu.nvidia import await_inputs, overlap_options
from edgedsv4.kernels.router import SUM_GUARD

# In one warp the rounds of the selection need no barrier.
WARPS = 1


def route(
    ids: Tensor,
    weights: Tensor,
    logits: Tensor,
    bias: Tensor | None,
    *,
    scale: float,
    table: Tensor | None = None,
    token_ids: Tensor | None = None,
    overlap: bool = False,
) -> None:
    """Choose experts and weigh them.

    Args:
        ids: [T, k] int32 out, ascending.
        weights: [T, k] float32 out.
        logits: [T, E] float32.
        bias: [E] float32, added for the selection alone; None for none.
        scale: routed scaling factor.
        table: [V, k] int32 or int64, the experts of each token id, instead of a selection.
        token_ids: [T] int64 on the device, with a table.
        overlap: see `nvidia.overlap_options`.

    Raises:
        ShapeError: if the shapes disagree or a tensor is not contiguous.
    """
    tokens, experts = logits.shape
    k = ids.shape[1]
    if ids.shape != (tokens, k) or weights.shape != (tokens, k) or not 1 <= k <= experts:
        raise ShapeError(
            f"router: ids and weights are {tuple(ids.shape)}, {tuple(weights.shape)}"
            f" for logits {tuple(logits.shape)}"
        )
    if bias is not None and bias.shape != (experts,):
        raise ShapeError(f"router: bias is {tuple(bias.shape)}, expected {(experts,)}")
    if table is not None and (
        table.shape[1:] != (k,) or token_ids is None or token_ids.shape != (tokens,)
    ):
        raise ShapeError(f"router: the table is {tuple(table.shape)} for {k} experts")
    given = [t for t in (ids, weights, logits, bias, table, token_ids) if t is not None]
    if not all(tensor.is_contiguous() for tensor in given):
        raise ShapeError("router: tensors must be contiguous")
    launch(
        _route_kernel,
        (tokens,),
        *(ids, weights, logits, bias, table, token_ids, experts, scale),
        K=k,
        PADDED_K=power_of_two(k),
        BE=power_of_two(experts),
        SUM_GUARD=SUM_GUARD,
        num_warps=WARPS,
        **overlap_options(overlap=overlap),
    )


@triton.jit
def score(logits):
    """sqrt(softplus(logits)): softplus is max(x, 0) + log(1 + e^-|x|), to the last place or two.

    With e = e^-|x| the logarithm is 2 artanh(e / (2 + e)), whose argument is at most 1/3.
    """
    e = tl.exp(-tl.abs(logits))
    s = e / (2.0 + e)
    square = s * s
    series = 1.0 / 17
    for i in tl.static_range(8):
        series = series * square + 1.0 / (15 - 2 * i)
    # The comparison keeps NaN, which a maximum may drop.
    return tl.sqrt(tl.where(logits < 0.0, 0.0, logits) + 2.0 * s * series)


@triton.jit
def ordered(x):
    """int32 keys in the order of float32: -0 is 0, NaN the largest, above the least int32."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    is_number = x == x  # noqa: PLR0124 - NaN is not
    return tl.where(is_number, bits, 0x7FFFFFFF)


@triton.jit
def _best(selection, m_e, K: tl.constexpr, PADDED_K: tl.constexpr, BE: tl.constexpr):
    """Ids of the K largest of [BE], ascending: [PADDED_K], BE behind the last."""
    o_e = tl.arange(0, BE)  # [BE]
    o_k = tl.arange(0, PADDED_K)  # [PADDED_K]
    least = -2147483648
    key = tl.where(m_e, ordered(selection), least)  # [BE]
    found = tl.zeros([PADDED_K], tl.int32) + BE
    for i in tl.static_range(K):
        best = tl.argmax(key, axis=0, tie_break_left=True)
        found = tl.where(o_k == i, best, found)
        key = tl.where(o_e == best, least, key)
    # Each goes to the place that counts the smaller ones.
    place = tl.sum((found[None, :] < found[:, None]).to(tl.int32), axis=1)  # [PADDED_K]
    is_there = place[None, :] == o_k[:, None]  # [place, found]
    return tl.sum(tl.where(is_there, found[None, :], 0), axis=1)


@triton.jit
def _route_kernel(
    ids_ptr,
    weights_ptr,
    logits_ptr,
    bias_ptr,
    table_ptr,
    token_ids_ptr,
    experts,
    scale,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    BE: tl.constexpr,
    SUM_GUARD: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Program: one token."""
    await_inputs(OVERLAP)
    token = tl.program_id(0).to(tl.int64)
    o_k = tl.arange(0, PADDED_K)  # [PADDED_K]
    m_k = o_k < K
    logits_ptr += token * experts
    if table_ptr is not None:
        at = table_ptr + tl.load(token_ids_ptr + token) * K + o_k
        ids = tl.load(at, mask=m_k, other=0).to(tl.int32)  # [PADDED_K]
    else:
        o_e = tl.arange(0, BE)  # [BE]
        m_e = o_e < experts
        selection = score(tl.load(logits_ptr + o_e, mask=m_e, other=0.0))  # [BE]
        if bias_ptr is not None:
            selection += tl.load(bias_ptr + o_e, mask=m_e, other=0.0)
        ids = _best(selection, m_e, K, PADDED_K, BE)  # [PADDED_K]
    chosen = score(tl.load(logits_ptr + ids, mask=m_k, other=0.0))
    chosen = tl.where(m_k, chosen, 0.0)
    total = tl.sum(chosen, axis=0) + SUM_GUARD
    tl.store(ids_ptr + token * K + o_k, ids, mask=m_k)
    tl.store(weights_ptr + token * K + o_k, chosen / total * scale, mask=m_k)

"""The routed experts of one token on a card, wherever in a bank they lie.

With the profile `default` they see their input rounded to bytes where a card multiplies bytes of
their block types. Whether all experts live on the card or only some, the same kernels compute them,
and the CPU's part of a hybrid rounds its input by the same rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from edgedsv4.kernels.gpu.byte_products import BYTE_ORDERS, fits_bytes
from edgedsv4.kernels.gpu.byte_vector import GROUP
from edgedsv4.kernels.gpu.expert_bytes import down_bytes, gate_up_bytes
from edgedsv4.kernels.gpu.expert_vec import expert_down, expert_gate_up

if TYPE_CHECKING:
    from torch import Tensor

    from edgedsv4.kernels.gpu.byte_vector import ByteVector
    from edgedsv4.model.gpu_banks import ExpertBank
    from edgedsv4.model.gpu_buffers import StepBuffers


@dataclass(frozen=True, slots=True)
class ChosenExperts:
    """Those of a token's experts that the card computes."""

    bank: ExpertBank
    """Where they lie."""
    slots: Tensor
    """int32 [k], places in the bank."""
    weights: Tensor
    """f32 [k], of the router."""
    used: Tensor | None = None
    """int32 [1], how many of them count; None for all."""


def rounded_input(bank: ExpertBank, buffers: StepBuffers, family: str) -> ByteVector | None:
    """Place for the experts' input as bytes; None where they are not multiplied so."""
    fits = all(fits_bytes(matrix, family) for matrix in (bank.w1, bank.w2))
    if not fits or bank.w2.cols % GROUP:
        return None
    return buffers.rounded(bank.w1.cols, BYTE_ORDERS[bank.w1.type])


def token_experts(
    chosen: ChosenExperts,
    limit: float,
    buffers: StepBuffers,
    rounded: ByteVector | None,
    *,
    family: str,
    overlap: bool = False,
) -> None:
    """Launch the experts of a token, `StepBuffers.x` to `StepBuffers.o`.

    Args:
        chosen: which.
        limit: clamp of the hidden layer.
        buffers: of the step.
        rounded: x as bytes in the place of `rounded_input`; None to multiply floats.
        family: of the card.
        overlap: see `nvidia.overlap_options`.
    """
    slots, weights, used = chosen.slots, chosen.weights, chosen.used
    gate_up, down = (chosen.bank.w1, chosen.bank.w3), chosen.bank.w2
    how: dict[str, Any] = {"overlap": overlap, "used": used}
    if rounded is not None:
        width = down.cols
        h = buffers.rounded(len(slots) * width, BYTE_ORDERS[down.type])
        gate_up_bytes(h, rounded, slots, gate_up, limit, width=width, **how)
        down_bytes(buffers.o, h, slots, weights, down, **how)
        return
    how["family"] = family
    expert_gate_up(buffers.inner, buffers.x, slots, gate_up, None, (limit, limit), **how)
    expert_down(buffers.o, buffers.inner, slots, weights, down, None, **how)
